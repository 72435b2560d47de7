"""What the fetch machine tells its driver to do."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvnet.format.hashes import BytesLike
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId

_WORDS: Final = {
    DropReason.BAD_CHUNK: "sent other bytes than asked for",
    DropReason.UNASKED: "sent what nobody had asked for",
    DropReason.UNKNOWN: "did not know the artifact",
    DropReason.BUSY: "had too much to do",
    DropReason.SILENT: "fell silent",
    DropReason.SLOW: "sent too slowly",
    DropReason.GONE: "broke off",
    DropReason.EXHAUSTED: "did not have what is missing",
    DropReason.SPARE: "stood by",
}


def _words(reason: DropReason) -> str:
    """What became of a provider, of one or of several."""
    return _WORDS.get(reason, reason.value)


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
        n_missing = len(self.missing)
        missing = f"{n_missing:,} chunks are missing" if n_missing > 1 else "a chunk is missing"
        counts = Counter(reason for _, reason in self.reasons)
        if not counts:
            return f"{missing} and no peer has {'them' if n_missing > 1 else 'it'}"
        if counts.total() == 1:
            return f"{missing}: the only provider {' '.join(map(_words, counts))}"
        return f"{missing}: of {counts.total()} providers " + ", ".join(
            f"{count} {_words(reason)}" for reason, count in counts.items()
        )


Instruction = RequestChunks | DropPeer | ChunkVerified | Completed | Failed
