"""What the fetch machine tells its driver to do."""

from dataclasses import dataclass

from kvnet.format.hashes import BytesLike
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class RequestChunks:
    """Ask this peer for these chunks, in this order, behind those it was asked for already."""

    peer: PeerId
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Stop the stream of this peer; whatever it still sends is not wanted."""

    peer: PeerId
    reason: DropReason


@dataclass(frozen=True, slots=True)
class ChunkVerified:
    """This chunk matched its hash and may be kept; `data` is what was handed in."""

    index: int
    data: BytesLike
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Completed:
    """Every needed chunk was verified."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nobody is left to ask.

    Attributes:
        missing: the chunks that did not come, ascending.
        reasons: why each provider fell away.
    """

    missing: tuple[int, ...]
    reasons: tuple[tuple[PeerId, DropReason], ...]

    @property
    def text(self) -> str:
        """The failure in words."""
        if not self.reasons:
            return f"{len(self.missing):,} chunks are missing and no peer has them"
        counts = {reason: sum(1 for _, other in self.reasons if other is reason) for _, reason in self.reasons}
        why = ", ".join(f"{count} {reason.value}" for reason, count in counts.items())
        return f"{len(self.missing):,} chunks are missing and none of {len(self.reasons)} providers gave them ({why})"


Instruction = RequestChunks | DropPeer | ChunkVerified | Completed | Failed
