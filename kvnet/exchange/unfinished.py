"""What an add that ends early leaves: the whole blocks it has computed, as an artifact of the text's beginning.

It has no name and is not pinned: it may be evicted like anything kept unasked, and goes when the add that begins with
it is done.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from kvnet.engine.kv_state import Origin, PrefillProgress, WrittenChunk
from kvnet.errors import EngineCrashedError, NotInStoreError
from kvnet.exchange.drafts import Draft
from kvnet.exchange.reuse import PrefixHit
from kvnet.format.chunks import ChunkEntry, ChunkPlan
from kvnet.format.hashes import ArtifactHash, ChunkHash, PrefixKey, blake3_hash
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.store.interface import ArtifactRecord, PackWriter, SignedBeginning, Store

NOTE_TOKENS: Final = 2048
NOTE_SHARE: Final = 32
"""What is computed is noted on disk after so many tokens, of a long text after one part in so many: a process that is
killed costs that much. A note lists all chunks and token ids, and the share keeps all notes of a text of a million
tokens at 0.3 % of its K/V, for 64 KiB a token."""

ENDS_EARLY: Final = (trio.Cancelled, KeyboardInterrupt, EngineCrashedError)
"""What ends an add without anything being wrong with the tiles it has written."""


Sign = Callable[[Mapping[int, ChunkEntry]], tuple[Manifest, bytes, Sequence[PrefixKey]]]
"""Of a chunk list by index: the manifest, the same signed, and the prefix keys."""


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
class Notes:
    """When to note on disk what is computed.

    Attributes:
        noted_tokens: so many from the start are noted, or held anyway.
    """

    noted_tokens: int

    def due(self, n_tokens: int) -> bool:
        """Whether it is time again, with so many tokens computed."""
        return n_tokens - self.noted_tokens >= max(NOTE_TOKENS, n_tokens // NOTE_SHARE)


@dataclass(slots=True)
class _NotedHead:
    """Takes the head of a draft for a note: token ids go into the note itself.

    Attributes:
        chunks: their bytes, by index.
    """

    chunks: dict[int, bytes] = field(default_factory=dict)

    def put(self, index: int, data: bytes) -> ChunkHash:
        """Take a chunk."""
        self.chunks[index] = data
        return blake3_hash(data)

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """A chunk that is held already needs no place."""


@dataclass(slots=True)
class Tiles:
    """What an export has told of so far.

    Attributes:
        notes: when to note them on disk; ``None`` for an add of which nothing is kept when it ends early.
        written: tiles that lie in the pack, by index.
        origins: artifacts that a live cache continued from.
    """

    notes: Notes | None = None
    written: dict[int, WrittenChunk] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()

    def note(self, event: PrefillProgress) -> None:
        """Take in an event of the export."""
        self.written |= {chunk.index: chunk for chunk in event.written}
        self.origins = event.origins or self.origins

    def beginning(self, draft: Draft, short: Draft, tokens: Sequence[int], sign: Sign) -> SignedBeginning:
        """What the pack holds of an artifact that ends sooner.

        Args:
            draft: what the pack is filled for.
            short: the other, which ends after whole blocks, all of them written.
            tokens: its token ids.
            sign: makes its manifest.

        Raises:
            TrustError: it may not be kept.
        """
        head = _NotedHead()
        entries = short.write_head(head, tokens, b"")
        offsets: dict[int, int] = {}
        for block in range(short.first_block, short.plan.n_blocks):
            pairs = zip(draft.plan.tiles_of_block(block), short.plan.tiles_of_block(block), strict=True)
            for old, new in pairs:
                chunk = self.written[old]
                entries[new], offsets[new] = ChunkEntry(chunk.length_bytes, chunk.hash), chunk.offset
        manifest, envelope, _ = sign(entries)
        listed = tuple(entries[index] for index in range(len(short.plan)))
        return SignedBeginning(envelope, listed, head.chunks, offsets, replaced_by(manifest, draft.source))

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


def may_replace(new: Manifest, old: ArtifactRecord) -> bool:
    """Whether nobody misses ``old`` when ``new`` begins with its tokens: kept automatically, signed by the same key.

    An artifact that depends on fewer others is not given up for one that depends on more: those may be distrusted.
    """
    mine, theirs = new, old.manifest
    return (
        not old.pinned
        and theirs.publisher == mine.publisher
        and theirs.context_size_bytes == 0
        and theirs.n_tokens < mine.n_tokens
        and theirs.producer == mine.producer
        and {span.publisher for span in mine.derived_from} <= {span.publisher for span in theirs.derived_from}
    )


def replaced_by(manifest: Manifest, source: PrefixHit | None) -> ArtifactHash | None:
    """The stored beginning that an artifact extends, when nobody misses it once that is there."""
    if source is None or source.n_tokens < source.manifest.n_tokens or not may_replace(manifest, source.record):
        return None
    return source.artifact


def let_go(store: Store, source: PrefixHit | None, record: ArtifactRecord) -> ArtifactHash | None:
    """Release a beginning that an artifact extends, when nobody misses it; blocking."""
    artifact = replaced_by(record.manifest, source)
    if artifact is not None:
        with suppress(NotInStoreError):
            store.release(artifact)
    return artifact
