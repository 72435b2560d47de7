"""What an add that ends early leaves: the whole blocks it has computed, as an artifact of the text's beginning.

It has no name and is not pinned: it may be evicted like anything kept unasked, and goes when the add that begins with
it is done.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from kvnet.engine.kv_state import Origin, PrefillProgress, WrittenChunk
from kvnet.errors import EngineCrashedError
from kvnet.format.chunks import ChunkEntry, ChunkPlan
from kvnet.format.hashes import ArtifactHash
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.store.interface import ArtifactRecord, PackWriter

ENDS_EARLY: Final = (trio.Cancelled, KeyboardInterrupt, EngineCrashedError)
"""What ends an add without anything being wrong with the tiles it has written."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is kept of an add that ended early.

    Attributes:
        record: the artifact as it is stored; whole blocks, without a context.
        new_bytes: chunk bytes written for it.
        superseded: an earlier beginning that this one begins with, which was let go.
    """

    record: ArtifactRecord
    new_bytes: int
    superseded: ArtifactHash | None = None


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Who is told when an add ends early. None of them may block or raise.

    Attributes:
        keeps: so many tokens are about to be kept, which takes as long as writing them.
        kept: they are.
        lost: nothing is kept, and why.
    """

    keeps: Callable[[int], None]
    kept: Callable[[Beginning], None]
    lost: Callable[[str], None]


@dataclass(slots=True)
class Tiles:
    """What an export has told of so far.

    Attributes:
        written: tiles that lie in the pack, by index.
        origins: artifacts that a live cache continued from.
    """

    written: dict[int, WrittenChunk] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()

    def note(self, event: PrefillProgress) -> None:
        """Take in an event of the export."""
        self.written |= {chunk.index: chunk for chunk in event.written}
        self.origins = event.origins or self.origins

    def whole_blocks(self, plan: ChunkPlan, first_block: int) -> int:
        """Blocks of 256 tokens, from the start on, of which every tile is written or, before ``first_block``, held."""
        block = first_block
        while block < plan.n_tokens // BLOCK_TOKENS and all(i in self.written for i in plan.tiles_of_block(block)):
            block += 1
        return block


def move_block(
    block: int,
    interrupted: tuple[PackWriter, ChunkPlan],
    to: tuple[PackWriter, ChunkPlan],
    written: Mapping[int, WrittenChunk],
) -> dict[int, ChunkEntry]:
    """Copy a block's tiles into another pack, each hashed as it is read; blocking.

    The pack they lie in is not used itself: the engine may write on for a moment, and its layout is that of the whole.

    Args:
        block: which.
        interrupted: the pack that will not be finished, and its plan.
        to: where the tiles go, and the plan there.
        written: what the engine has told of, by index in the interrupted pack.

    Returns:
        Their entries, by index in the other pack.

    Raises:
        IntegrityError: bytes that are not those the engine has told of.
        StoreError: the disk failed, or there is no room.
    """
    (source, old_plan), (target, new_plan) = interrupted, to
    pairs = list(zip(old_plan.tiles_of_block(block), new_plan.tiles_of_block(block), strict=True))
    source.adopt([written[old] for old, _ in pairs])
    entries: dict[int, ChunkEntry] = {}
    for old, new in pairs:
        data = source.read(old)
        entries[new] = ChunkEntry(len(data), target.put(new, data, written[old].hash))
    return entries


def may_replace(new: ArtifactRecord, old: ArtifactRecord) -> bool:
    """Whether nobody misses ``old`` when ``new`` begins with its tokens: kept automatically, signed by the same key.

    An artifact that depends on fewer others is not given up for one that depends on more: those may be distrusted.
    """
    mine, theirs = new.manifest, old.manifest
    return (
        old.hash != new.hash
        and not old.pinned
        and theirs.publisher == mine.publisher
        and theirs.context_size_bytes == 0
        and theirs.n_tokens < mine.n_tokens
        and theirs.producer == mine.producer
        and {span.publisher for span in mine.derived_from} <= {span.publisher for span in theirs.derived_from}
    )
