"""Small signed artifacts with all their bytes, and ways to put them into a store."""

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, layer_groups, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import ArtifactHash, ChunkHash, PrefixKey, blake3_hash
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, encode_manifest
from kvnet.format.prefix import block_keys, tokens_to_bytes
from kvnet.format.tensor import DType, LayerKind
from kvnet.store.interface import ArtifactRecord, PackWriter, Store
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace

OWN = PublisherKey(b"\1" * 32)
FRIEND = PublisherKey(b"\2" * 32)
MINE = Namespace("mine", b"p" * 32, b"l" * 32)
OTHER = Namespace("other", b"q" * 32, b"m" * 32)

KIND = LayerKind("kv", heads=1, k_dim=4, v_dim=4, dtype=DType.FLOAT32)
FINGERPRINT = Fingerprint(b"w" * 32, b"c" * 32, (), "llama", LayerLayout((KIND,), bytes(2)))
OTHER_FINGERPRINT = Fingerprint(b"x" * 32, b"c" * 32, (), "llama", LayerLayout((KIND,), bytes(2)))
BYTES_PER_TOKEN = FINGERPRINT.layers.bytes_per_token


@dataclass(frozen=True)
class Sample:
    """An artifact with all its bytes."""

    manifest: Manifest
    envelope: bytes
    chunks: tuple[bytes, ...]
    entries: tuple[ChunkEntry, ...]
    pages: tuple[bytes, ...]
    tokens: tuple[int, ...]
    context: bytes
    keys: tuple[PrefixKey, ...]

    @property
    def hash(self) -> ArtifactHash:
        return artifact_of(self.manifest)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.chunks))


@dataclass(frozen=True)
class Written:
    """What an engine says about a chunk it wrote."""

    index: int
    offset: int
    length_bytes: int
    hash: ChunkHash


def sample(
    tokens: Sequence[int] = range(600),
    *,
    context: bytes = b"",
    key: PublisherKey = OWN,
    namespace: Namespace = MINE,
    fingerprint: Fingerprint = FINGERPRINT,
    created: int = 1_800_000_000,
    keys: Sequence[PrefixKey] | None = None,
    derived_from: tuple[DerivedSpan, ...] = (),
) -> Sample:
    """An artifact of these tokens. Its tiles follow from the tokens up to their end, so equal prefixes share tiles."""
    plan = ChunkPlan(len(tokens), fingerprint.layers, layer_groups(fingerprint.layers), len(context))
    chunks = _chunks(plan, tokens, context)
    entries = tuple(ChunkEntry(len(chunk), blake3_hash(chunk)) for chunk in chunks)
    pages = tuple(encode_pages(entries))
    own_keys = block_keys(namespace.prefix_root(fingerprint.hash), tokens) if keys is None else list(keys)
    manifest = Manifest(
        version=1,
        fingerprint=fingerprint,
        namespace=namespace.id,
        n_tokens=len(tokens),
        block_tokens=256,
        groups=plan.groups,
        codec=Codec.RAW,
        n_chunks=len(chunks),
        total_size_bytes=sum(map(len, chunks)),
        root=pages_root(pages),
        last_prefix_key=own_keys[-1],
        producer=Producer("toy", "1", "cpu", "any", 256),
        continuation=(),
        derived_from=derived_from,
        context_size_bytes=len(context),
        created=created,
        publisher=key.public,
    )
    envelope = seal(StatementType.MANIFEST, encode_manifest(manifest), key)
    return Sample(manifest, envelope, chunks, entries, pages, tuple(tokens), context, tuple(own_keys))


def _chunks(plan: ChunkPlan, tokens: Sequence[int], context: bytes) -> tuple[bytes, ...]:
    data = tokens_to_bytes(tokens)
    chunks: list[bytes] = []
    taken = 0
    for spec in plan:
        if spec.kind is ChunkKind.TOKENS:
            chunks.append(data[spec.first_token * 4 :][: spec.raw_size_bytes])
        elif spec.kind is ChunkKind.CONTEXT:
            chunks.append(context[taken : taken + spec.raw_size_bytes])
            taken += spec.raw_size_bytes
        else:
            prefix = data[: 4 * (spec.first_token + spec.n_tokens)]
            chunks.append(blake3(prefix + bytes([spec.group])).digest(length=spec.raw_size_bytes))
    return tuple(chunks)


def keys_of(manifest: Manifest, tokens: list[int]) -> list[PrefixKey]:
    """Prefix keys, for one who is a member of ``MINE`` alone."""
    if manifest.namespace != MINE.id:
        return []
    return block_keys(MINE.prefix_root(manifest.fingerprint.hash), tokens)


def fill(writer: PackWriter, artifact: Sample, indices: Sequence[int] | None = None) -> None:
    """Put some chunks, all by default."""
    for index in range(len(artifact.chunks)) if indices is None else indices:
        writer.put(index, artifact.chunks[index], artifact.entries[index].hash)


def publish(
    store: Store, artifact: Sample, indices: Sequence[int] | None = None, *, pinned: bool = False, keyed: bool = True
) -> ArtifactRecord:
    """Put some chunks, all by default, and publish."""
    writer = store.begin_pack(len(artifact.chunks))
    try:
        fill(writer, artifact, indices)
        return writer.publish(
            artifact.envelope,
            keys=artifact.keys if keyed else (),
            pinned=pinned,
            allow_partial=indices is not None,
            entries=artifact.entries,
        )
    except BaseException:
        writer.abort()
        raise


def check_whole(store: Store, artifact: Sample) -> None:
    """Fails unless everything of an artifact can be read back."""
    record = store.get(artifact.hash)
    assert record is not None
    assert record.complete
    assert record.manifest == artifact.manifest
    assert record.entries == artifact.entries
    assert record.size_bytes == artifact.size_bytes
    assert [store.read_chunk(entry.hash) for entry in record.entries] == list(artifact.chunks)
    assert store.tokens_of(artifact.hash) == list(artifact.tokens)
    assert (store.context_of(artifact.hash) or b"") == artifact.context
