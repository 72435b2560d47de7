"""An artifact to be: its plan, what it takes from a stored one, and the manifest that will describe it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvnet.engine.kv_state import WrittenChunk
from kvnet.exchange.reuse import PrefixHit
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, Producer
from kvnet.format.hashes import ChunkHash, NamespaceId, PrefixKey
from kvnet.format.manifest import MANIFEST_VERSION, DerivedSpan, Manifest
from kvnet.format.prefix import BLOCK_TOKENS, tokens_to_bytes


class HeadTarget(Protocol):
    """Where the beginning of an artifact goes: a pack writer, or a note of what one holds."""

    def put(self, index: int, data: bytes) -> ChunkHash:
        """Take a chunk."""
        ...

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """Use a chunk that is held already."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """An artifact to be.

    Attributes:
        fingerprint: of the model.
        plan: its chunks.
        source: the stored prefix it extends, if there is one.
        first_block: blocks before it are those of the source, as they are.
    """

    fingerprint: Fingerprint
    plan: ChunkPlan
    source: PrefixHit | None
    first_block: int

    def source_entry(self, index: int) -> ChunkEntry:
        """The source's entry for the same tile; its index differs when token or context chunks differ in number."""
        assert self.source is not None  # noqa: S101 - a first block above 0 comes from a source
        spec = self.plan[index]
        return self.source.record.entries[self.source.manifest.plan().tiles_of_block(spec.block)[spec.group]]

    def write_head(self, target: HeadTarget, tokens: Sequence[int], context: bytes) -> dict[int, ChunkEntry]:
        """Token ids and context go in as chunks; tiles of whole reused blocks are referenced where they lie."""
        entries: dict[int, ChunkEntry] = {}
        heads = {ChunkKind.TOKENS: memoryview(tokens_to_bytes(tokens)), ChunkKind.CONTEXT: memoryview(context)}
        offsets = dict.fromkeys(heads, 0)
        for spec in self.plan:
            if spec.kind is ChunkKind.TILE:
                if spec.block >= self.first_block:
                    break
                entries[spec.index] = self.source_entry(spec.index)
                target.reference(spec.index, entries[spec.index])
                continue
            start = offsets[spec.kind]
            offsets[spec.kind] = start + spec.raw_size_bytes
            data = bytes(heads[spec.kind][start : start + spec.raw_size_bytes])
            entries[spec.index] = ChunkEntry(len(data), target.put(spec.index, data))
        return entries

    def manifest(
        self,
        producer: Producer,
        *,
        codec: Codec,
        created_s: int,
        namespace: NamespaceId,
        last_key: PrefixKey,
        publisher: bytes,
        spans: tuple[DerivedSpan, ...],
        entries: list[ChunkEntry],
    ) -> Manifest:
        """What will be signed, once every chunk is known."""
        return Manifest(
            version=MANIFEST_VERSION,
            fingerprint=self.fingerprint,
            namespace=namespace,
            n_tokens=self.plan.n_tokens,
            block_tokens=BLOCK_TOKENS,
            groups=self.plan.groups,
            codec=codec,
            n_chunks=len(entries),
            total_size_bytes=sum(entry.length_bytes for entry in entries),
            root=pages_root(encode_pages(entries)),
            last_prefix_key=last_key,
            producer=producer,
            continuation=(),
            derived_from=spans,
            context_size_bytes=self.plan.context_size_bytes,
            created=created_s,
            publisher=publisher,
        )


def written_bytes(chunks: Sequence[WrittenChunk]) -> int:
    """Bytes of chunks that were written."""
    return sum(chunk.length_bytes for chunk in chunks)
