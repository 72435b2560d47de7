"""Blocks to chunks: which bytes each chunk holds, which chunks a prefix needs, and the chunk list.

A plan is arithmetic. Nothing is built in proportion to the number of chunks until somebody asks for it, so that a
hostile manifest costs nothing.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from kvnet.errors import CompatibilityError, IntegrityError, MalformedError
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.hashes import BytesLike, ChunkHash, blake3_hash
from kvnet.format.limits import (
    CONTEXT_CHUNK_BYTES,
    ENTRY_SIZE_BYTES,
    HASH_SIZE_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_CONTEXT_BYTES,
    MAX_GROUPED_TILE_BYTES,
    MAX_TOKENS,
    MIN_TILE_BYTES,
    PAGE_ENTRIES,
    TOKENS_PER_CHUNK,
)
from kvnet.format.prefix import BLOCK_TOKENS, TOKEN_SIZE_BYTES, block_count
from kvnet.format.tensor import tile_size_bytes


class ChunkKind(Enum):
    """What a chunk holds."""

    TOKENS = "tokens"
    CONTEXT = "context"
    TILE = "tile"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of one kind that share tiles.

    Attributes:
        first_layer: the first of them, from 0.
        n_layers: how many.
        kind: index of their kind in the layout.
    """

    first_layer: int
    n_layers: int
    kind: int


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk of a plan. Fields that do not apply to its kind are 0.

    Attributes:
        index: its place in the plan.
        kind: what it holds.
        block: of a tile.
        group: of a tile, its place among the layer groups.
        first_layer: of a tile.
        n_layers: of a tile.
        first_token: of a tile or of token ids.
        n_tokens: of a tile or of token ids.
        raw_size_bytes: size before the codec.
    """

    index: int
    kind: ChunkKind
    block: int
    group: int
    first_layer: int
    n_layers: int
    first_token: int
    n_tokens: int
    raw_size_bytes: int


def layer_groups(layout: LayerLayout) -> tuple[LayerGroup, ...]:
    """The groups a publisher makes: the fewest layers of one kind whose full tile is at least ``MIN_TILE_BYTES``.

    The last group of a run of equal layers may be smaller.

    Raises:
        CompatibilityError: a layer this version cannot move, or one whose full block exceeds ``MAX_CHUNK_BYTES``.
    """
    groups: list[LayerGroup] = []
    layer = 0
    while layer < len(layout.order):
        kind = layout.order[layer]
        run_end = layer + 1
        while run_end < len(layout.order) and layout.order[run_end] == kind:
            run_end += 1
        size = _layers_per_tile(layout, kind)
        groups += [LayerGroup(first, min(size, run_end - first), kind) for first in range(layer, run_end, size)]
        layer = run_end
    return tuple(groups)


def _layers_per_tile(layout: LayerLayout, kind: int) -> int:
    layout.kinds[kind].require_full_attention()
    one = tile_size_bytes(layout.kinds[kind], 1, BLOCK_TOKENS)
    if one > MAX_CHUNK_BYTES:
        raise CompatibilityError(f"expected at most {MAX_CHUNK_BYTES} bytes of K/V per layer and block, found {one}")
    return -(-MIN_TILE_BYTES // one)


def groups_from_counts(layout: LayerLayout, counts: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Layer groups as a manifest lists them, by their numbers of layers.

    Raises:
        MalformedError: they do not cover the layers exactly, mix kinds, or make tiles that are too large.
        CompatibilityError: a layer this version cannot move.
    """
    if sum(counts) != len(layout.order) or 0 in counts:
        raise MalformedError(f"layer groups: expected {len(layout.order)} layers in all, found {sum(counts)}")
    groups: list[LayerGroup] = []
    first = 0
    for count in counts:
        kinds = set(layout.order[first : first + count])
        if len(kinds) != 1:
            raise MalformedError(f"layer groups: expected layers of one kind, found {len(kinds)} from layer {first}")
        groups.append(LayerGroup(first, count, kinds.pop()))
        first += count
    for group in groups:
        kind = layout.kinds[group.kind]
        kind.require_full_attention()
        most = MAX_CHUNK_BYTES if group.n_layers == 1 else MAX_GROUPED_TILE_BYTES
        size = tile_size_bytes(kind, group.n_layers, BLOCK_TOKENS)
        if size > most:
            raise MalformedError(f"layer groups: expected full tiles of at most {most} bytes, found {size}")
    return tuple(groups)


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of an artifact, in order: token ids, context, then tiles block by block, each block group by group.

    Attributes:
        n_tokens: tokens of the artifact.
        layers: what every layer keeps.
        groups: layer groups, which cover the layers in order.
        context_size_bytes: bytes of messages and template inputs; 0 for none.

    Raises:
        MalformedError: no tokens, or sizes beyond the limits.
        CompatibilityError: a layer this version cannot move.
    """

    n_tokens: int
    layers: LayerLayout
    groups: tuple[LayerGroup, ...]
    context_size_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_tokens <= MAX_TOKENS:
            raise MalformedError(f"tokens: expected 1 to {MAX_TOKENS}, found {self.n_tokens}")
        if not 0 <= self.context_size_bytes <= MAX_CONTEXT_BYTES:
            raise MalformedError(
                f"context: expected at most {MAX_CONTEXT_BYTES} bytes, found {self.context_size_bytes}"
            )
        if groups_from_counts(self.layers, [group.n_layers for group in self.groups]) != self.groups:
            raise MalformedError("layer groups: expected consecutive groups from layer 0")
        if len(self) > MAX_CHUNKS:
            raise MalformedError(f"chunks: expected at most {MAX_CHUNKS}, found {len(self)}")

    def __len__(self) -> int:
        return self.first_tile + self.n_blocks * len(self.groups)

    def __iter__(self) -> Iterator[ChunkSpec]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> ChunkSpec:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk: expected 0 to {len(self) - 1}, found {index}")
        if index in self.token_chunks:
            first = index * TOKENS_PER_CHUNK
            count = min(TOKENS_PER_CHUNK, self.n_tokens - first)
            return ChunkSpec(index, ChunkKind.TOKENS, 0, 0, 0, 0, first, count, count * TOKEN_SIZE_BYTES)
        if index in self.context_chunks:
            start = (index - self.context_chunks.start) * CONTEXT_CHUNK_BYTES
            size = min(CONTEXT_CHUNK_BYTES, self.context_size_bytes - start)
            return ChunkSpec(index, ChunkKind.CONTEXT, 0, 0, 0, 0, 0, 0, size)
        block, number = divmod(index - self.first_tile, len(self.groups))
        group = self.groups[number]
        first = block * BLOCK_TOKENS
        count = min(BLOCK_TOKENS, self.n_tokens - first)
        size = tile_size_bytes(self.layers.kinds[group.kind], group.n_layers, count)
        return ChunkSpec(index, ChunkKind.TILE, block, number, group.first_layer, group.n_layers, first, count, size)

    @property
    def n_blocks(self) -> int:
        """Blocks, a short last one included."""
        return block_count(self.n_tokens)

    @cached_property
    def token_chunks(self) -> range:
        """Indices of the token-id chunks."""
        return range(-(-self.n_tokens // TOKENS_PER_CHUNK))

    @cached_property
    def context_chunks(self) -> range:
        """Indices of the context chunks."""
        start = self.token_chunks.stop
        return range(start, start - (-self.context_size_bytes // CONTEXT_CHUNK_BYTES))

    @property
    def first_tile(self) -> int:
        """Index of the first tile."""
        return self.context_chunks.stop

    @property
    def raw_size_bytes(self) -> int:
        """Bytes of all chunks before the codec."""
        return self.head_size_bytes + self.n_tokens * self.layers.bytes_per_token

    @property
    def head_size_bytes(self) -> int:
        """Bytes of the token-id and context chunks, which are stored as they are."""
        return self.n_tokens * TOKEN_SIZE_BYTES + self.context_size_bytes

    def tiles_of_block(self, block: int) -> range:
        """Indices of a block's tiles, one per layer group.

        Raises:
            IndexError: no such block.
        """
        if not 0 <= block < self.n_blocks:
            raise IndexError(f"block: expected 0 to {self.n_blocks - 1}, found {block}")
        start = self.first_tile + block * len(self.groups)
        return range(start, start + len(self.groups))

    def needed_for(self, n_tokens: int) -> list[int]:
        """Indices of the chunks that reusing the first ``n_tokens`` tokens takes: their ids, and tiles that cover them.

        Raises:
            ValueError: more tokens than there are, or fewer than none.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise ValueError(f"tokens: expected 0 to {self.n_tokens}, found {n_tokens}")
        tiles_end = self.first_tile + block_count(n_tokens) * len(self.groups)
        return [*range(-(-n_tokens // TOKENS_PER_CHUNK)), *range(self.first_tile, tiles_end)]


_ENTRY: Final = struct.Struct("<I32s")


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One line of the chunk list: stored size and hash of a chunk, or 0 and 32 zero bytes for one that is left out.

    Raises:
        MalformedError: a size that is no u32, a hash that is not 32 bytes, or one of the two zero without the other.
    """

    length_bytes: int
    hash: ChunkHash

    def __post_init__(self) -> None:
        if not 0 <= self.length_bytes < 1 << 32 or len(self.hash) != HASH_SIZE_BYTES:
            raise MalformedError("chunk entry: expected a u32 length and a hash of 32 bytes")
        if (self.length_bytes == 0) != (self.hash == _NO_HASH):
            raise MalformedError("chunk entry: expected length 0 and a zero hash together, or neither")

    @property
    def absent(self) -> bool:
        """Whether the publisher left the chunk out."""
        return self.length_bytes == 0


@dataclass(frozen=True, slots=True)
class VerifiedChunk:
    """Stored bytes of a chunk that were hashed in this process and match: whoever keeps them need not hash again.

    Made in one place only, from what the fetch machine has compared with the signed chunk list.

    Attributes:
        index: in the chunk plan.
        data: its stored bytes.
        hash: BLAKE3 of `data`.
    """

    index: int
    data: BytesLike
    hash: ChunkHash


_NO_HASH: Final = ChunkHash(bytes(HASH_SIZE_BYTES))
ABSENT: Final = ChunkEntry(0, _NO_HASH)
"""The entry of a chunk its publisher left out."""


def page_count(n_chunks: int) -> int:
    """Pages of a chunk list."""
    return -(-n_chunks // PAGE_ENTRIES)


def page_size_bytes(n_chunks: int, page: int) -> int:
    """Bytes of one page of a chunk list; 0 beyond its end."""
    return max(0, min(PAGE_ENTRIES, n_chunks - page * PAGE_ENTRIES)) * ENTRY_SIZE_BYTES


def encode_pages(entries: Sequence[ChunkEntry]) -> list[bytes]:
    """The chunk list in pages of ``PAGE_ENTRIES`` entries: u32 little-endian length and 32-byte hash each."""
    return [
        b"".join(_ENTRY.pack(entry.length_bytes, entry.hash) for entry in entries[start : start + PAGE_ENTRIES])
        for start in range(0, len(entries), PAGE_ENTRIES)
    ]


def decode_page(data: BytesLike, n_entries: int | None = None) -> tuple[ChunkEntry, ...]:
    """The entries of one page.

    Args:
        data: the page.
        n_entries: how many there must be; without it, any number a page can hold.

    Raises:
        MalformedError: another size, or an entry that is neither present nor absent.
    """
    if n_entries is not None and len(data) != n_entries * ENTRY_SIZE_BYTES:
        raise MalformedError(f"page: expected {n_entries * ENTRY_SIZE_BYTES} bytes, found {len(data)}")
    if not 0 < len(data) <= PAGE_ENTRIES * ENTRY_SIZE_BYTES or len(data) % ENTRY_SIZE_BYTES:
        raise MalformedError(
            f"page: expected 1 to {PAGE_ENTRIES} entries of {ENTRY_SIZE_BYTES} bytes, found {len(data)} bytes"
        )
    return tuple(ChunkEntry(length, ChunkHash(digest)) for length, digest in _ENTRY.iter_unpack(data))


def pages_root(pages: Sequence[BytesLike]) -> bytes:
    """The root that a manifest signs: BLAKE3 over the concatenated page hashes."""
    return blake3_hash(b"".join(blake3_hash(page) for page in pages))


def decode_pages(pages: Sequence[BytesLike], n_chunks: int, root: bytes) -> tuple[ChunkEntry, ...]:
    """A whole chunk list: sizes first, then the root, then the entries.

    Raises:
        MalformedError: sizes that do not fit ``n_chunks``, or a malformed entry.
        IntegrityError: the pages do not have this root.
    """
    found = [len(page) for page in pages]
    if found != [page_size_bytes(n_chunks, page) for page in range(page_count(n_chunks))]:
        raise MalformedError(f"chunk list: expected {page_count(n_chunks)} pages for {n_chunks} chunks")
    if pages_root(pages) != root:
        raise IntegrityError("the chunk list does not match the root in the manifest")
    return tuple(entry for page in pages for entry in decode_page(page))
