"""What the use cases report when they are done."""

from dataclasses import dataclass

from kvnet.format.hashes import ArtifactHash
from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class PrefixFetched:
    """A prefix that peers had and that is in the store now.

    Attributes:
        artifact: its artifact hash.
        n_tokens: tokens that it shares with the prompt and whose K/V is here.
        peer: the peer that most of it came from; empty when nothing had to be fetched.
        n_bytes: bytes fetched.
        n_chunks: chunks fetched.
        seconds: from the first query to the last byte.
    """

    artifact: ArtifactHash
    n_tokens: int
    peer: PeerId
    n_bytes: int
    n_chunks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """``done_bytes`` of ``total_bytes`` have arrived and matched their hash; the last from ``peer``."""

    done_bytes: int
    total_bytes: int
    done_chunks: int
    total_chunks: int
    peer: PeerId
