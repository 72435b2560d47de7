"""What crosses an engine's boundary when K/V is restored or exported.

K/V never crosses it as a value. For a restore the caller names chunks by file, offset, length and hash; the engine
reads them into a buffer of its own, hashes *that* and builds arrays from it. For an export the engine writes tiles
into a file the caller gives, and the caller hashes them again before adopting them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvnet.format.codecs import Codec
from kvnet.format.hashes import ChunkHash


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Where one chunk's stored bytes lie: ``length_bytes`` at ``offset`` of ``path``, with this hash.

    ``index`` is the chunk's place in the artifact's plan.
    """

    index: int
    path: Path
    offset: int
    length_bytes: int
    hash: ChunkHash


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A chunk the engine wrote: ``length_bytes`` stored bytes at ``offset`` of the pack it was given."""

    index: int
    offset: int
    length_bytes: int
    hash: ChunkHash


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """State to continue from.

    Attributes:
        manifest: manifest bytes of the artifact; the caller has judged its signature and publisher.
        n_tokens: how many of its tokens to reuse, from the start; may end inside a block.
        chunks: where the tiles lie that cover these tokens; others may be listed and are not read.
    """

    manifest: bytes
    n_tokens: int
    chunks: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The first ``n_tokens`` tokens of a state were restored from the artifact with this manifest."""

    manifest: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Compute the K/V of ``tokens`` and write its tiles.

    Attributes:
        tokens: the whole prefix, from position 0.
        restore: state for its beginning, or ``None`` to compute all of it.
        pack_path: existing file to write to.
        pack_offset: where in it the first tile goes; the others follow in plan order.
        first_block: blocks before it are not written; they must be covered by ``restore``.
        codec: how tiles are stored.
        context_size_bytes: size of the context chunks in the artifact to be, so that chunk indices agree.
        prefill: compute what neither a live cache nor ``restore`` covers; otherwise such an export is refused.
        background: give way to every request that somebody waits for, between two blocks.
    """

    tokens: Sequence[int]
    restore: RestorePlan | None
    pack_path: Path
    pack_offset: int
    first_block: int = 0
    codec: Codec = Codec.RAW
    context_size_bytes: int = 0
    prefill: bool = True
    background: bool = False


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """``done_tokens`` of ``total_tokens`` have their K/V, restored ones included.

    Attributes:
        written: of an export, the tiles that lie in the pack since the event before: what is here stays good when the
            export ends early.
        origins: of an export: artifacts that a live cache continued from, as in ``Exported``; told before any tile is.
    """

    done_tokens: int
    total_tokens: int
    written: tuple[WrittenChunk, ...] = ()
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """The export is finished; every tile written, in plan order.

    Attributes:
        chunks: what was written.
        restored_tokens: tokens restored from the plan, or continued from a live cache.
        prefilled_tokens: tokens computed now.
        restore_s: seconds of restore.
        prefill_s: seconds of prefill.
        origins: artifacts that a live cache continued from, besides the plan of the request.
    """

    chunks: tuple[WrittenChunk, ...]
    restored_tokens: int
    prefilled_tokens: int
    restore_s: float
    prefill_s: float
    origins: tuple[Origin, ...] = ()


ExportEvent = PrefillProgress | Exported
