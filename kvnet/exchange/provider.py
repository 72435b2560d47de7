"""A peer to ask for chunks, and what it delivered."""

from dataclasses import dataclass

from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class Provider:
    """A peer to ask, and how requests to it name the artifact.

    Attributes:
        peer: who.
        session: id of the control session in which the namespace is proved.
        slot: of the namespace in that session.
        artifact: the artifact hash under the lookup secret.
    """

    peer: PeerId
    session: bytes
    slot: int
    artifact: bytes


@dataclass(slots=True)
class Delivered:
    """What one peer delivered: verified bytes and chunks, and why it was left, if it was.

    Attributes:
        n_bytes: verified bytes.
        n_chunks: in so many chunks.
        dropped: why it was left, a `DropReason`; "" when it was not.
        seconds: from the first request to it until its last chunk.
        path: how its chunks came: "bulk" or "stream"; "" when no channel to it could be opened.
        surplus_bytes: of chunks that nobody wanted any more when they came.
    """

    n_bytes: int = 0
    n_chunks: int = 0
    dropped: str = ""
    seconds: float = 0.0
    path: str = ""
    surplus_bytes: int = 0
