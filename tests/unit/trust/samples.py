"""Small, sound values to sign, judge, look up and serve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvnet.format.chunks import ChunkEntry, encode_pages, layer_groups, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import ArtifactHash, PrefixKey, blake3_hash
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, encode_manifest
from kvnet.format.prefix import block_keys, tokens_to_bytes
from kvnet.format.tensor import DType, LayerKind
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace

OWN = PublisherKey(b"\1" * 32)
FRIEND = PublisherKey(b"\2" * 32)
STRANGER = PublisherKey(b"\3" * 32)
MINE = Namespace("mine", b"p" * 32, b"l" * 32)
OTHER = Namespace("other", b"q" * 32, b"m" * 32)

KIND = LayerKind("kv", heads=1, k_dim=4, v_dim=4, dtype=DType.FLOAT32)
LAYOUT = LayerLayout((KIND,), bytes(2))
FINGERPRINT = Fingerprint(b"w" * 32, b"c" * 32, (), "llama", LAYOUT)
PRODUCER = Producer("toy", "1", "cpu", "any", 256)


@dataclass(frozen=True)
class Artifact:
    """An artifact with all its bytes; fulfils what serving asks of a held artifact."""

    manifest: Manifest
    envelope: bytes
    chunks: tuple[bytes, ...]
    entries: tuple[ChunkEntry, ...]
    pages: tuple[bytes, ...]
    tokens: tuple[int, ...]
    keys: tuple[PrefixKey, ...]

    @property
    def hash(self) -> ArtifactHash:
        return artifact_of(self.manifest)


def make_artifact(
    tokens: Sequence[int] = range(300),
    *,
    key: PublisherKey = OWN,
    namespace: Namespace = MINE,
    derived_from: tuple[DerivedSpan, ...] = (),
    created: int = 1_800_000_000,
    publisher: bytes | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
) -> Artifact:
    """An artifact of these tokens, signed by `key`, which claims to be of `publisher` (the signer when None)."""
    groups = layer_groups(fingerprint.layers)
    keys = block_keys(namespace.prefix_root(fingerprint.hash), tokens)
    fields = {
        "version": 1,
        "fingerprint": fingerprint,
        "namespace": namespace.id,
        "n_tokens": len(tokens),
        "block_tokens": 256,
        "groups": groups,
        "codec": Codec.RAW,
        "last_prefix_key": keys[-1],
        "producer": PRODUCER,
        "continuation": (),
        "derived_from": derived_from,
        "context_size_bytes": 0,
        "created": created,
        "publisher": key.public if publisher is None else publisher,
    }
    chunks = _chunks(tokens, fingerprint)
    entries = tuple(ChunkEntry(len(chunk), blake3_hash(chunk)) for chunk in chunks)
    pages = tuple(encode_pages(entries))
    manifest = Manifest(
        **fields,  # type: ignore[arg-type]
        n_chunks=len(chunks),
        total_size_bytes=sum(map(len, chunks)),
        root=pages_root(pages),
    )
    envelope = seal(StatementType.MANIFEST, encode_manifest(manifest), key)
    return Artifact(manifest, envelope, chunks, entries, pages, tuple(tokens), tuple(keys))


def _chunks(tokens: Sequence[int], fingerprint: Fingerprint) -> tuple[bytes, ...]:
    """Token ids, then one tile a block of bytes that differ by block: what they mean does not matter here."""
    blocks = range(0, len(tokens), 256)
    tiles = [
        bytes([7 + start // 256]) * (min(256, len(tokens) - start) * fingerprint.layers.bytes_per_token)
        for start in blocks
    ]
    heads = [tokens_to_bytes(tokens[start : start + 4096]) for start in range(0, len(tokens), 4096)]
    return (*heads, *tiles)


def span(key: PublisherKey, first_block: int = 0, last_block: int = 0) -> DerivedSpan:
    return DerivedSpan(ArtifactHash(key.public), key.public, first_block, last_block)


def resigned(artifact: Artifact, *, key: PublisherKey = OWN, **fields: object) -> Artifact:
    """The same artifact with other fields in its manifest, signed again."""
    names = artifact.manifest.__struct_fields__
    manifest = Manifest(**({name: getattr(artifact.manifest, name) for name in names} | fields))
    return replace(artifact, manifest=manifest, envelope=seal(StatementType.MANIFEST, encode_manifest(manifest), key))
