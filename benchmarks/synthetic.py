"""A large artifact made of random bytes: nobody computes it, everything else about it is real."""

import secrets
from collections.abc import Iterator

from kvnet.exchange.identity import FixedIdentity
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, layer_groups, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import blake3_hash
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import block_keys, tokens_to_bytes
from kvnet.format.tensor import DType, LayerKind
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy

KEY = PublisherKey(b"benchmark".ljust(32, b"\0"))
NAMESPACE = Namespace("mine", b"p" * 32, b"l" * 32)
LAYERS = 28
BLOCK_BYTES = LAYERS << 20
"""Eight heads of 128 in float16 are 1 MiB a layer and block of 256 tokens: the layers of Llama 3.2 3B."""

_KIND = LayerKind("kv", heads=8, k_dim=128, v_dim=128, dtype=DType.FLOAT16)


def identity() -> FixedIdentity:
    """Whoever made the artifact, on both sides."""
    return FixedIdentity(KEY, TrustPolicy("own", own=frozenset({KEY.public}), trusted=frozenset()), (NAMESPACE,))


def make_artifact(
    store: Store, size_bytes: int, *, layers: int = LAYERS, first_token: int = 0, pinned: bool = True
) -> ArtifactRecord:
    """Put an artifact of about so many bytes into a store; its chunks are all different.

    Args:
        store: where it goes.
        size_bytes: of its K/V, in steps of a block: a mebibyte for each layer.
        layers: of the model.
        first_token: its first token id; the others follow. Artifacts that begin with another are other ones.
        pinned: whether it is to stay.
    """
    fingerprint = Fingerprint(b"w" * 32, b"c" * 32, (), "llama", LayerLayout((_KIND,), bytes(layers)))
    tokens = range(first_token, first_token + size_bytes // (layers << 20) * 256)
    plan = ChunkPlan(len(tokens), fingerprint.layers, layer_groups(fingerprint.layers), 0)
    writer = store.begin_pack(len(plan), expected_bytes=size_bytes)
    entries = tuple(
        ChunkEntry(len(data), writer.put(index, data, blake3_hash(data)))
        for index, data in enumerate(_chunks(plan, tokens))
    )
    pages = tuple(encode_pages(entries))
    keys = block_keys(NAMESPACE.prefix_root(fingerprint.hash), tokens)
    manifest = Manifest(
        version=1,
        fingerprint=fingerprint,
        namespace=NAMESPACE.id,
        n_tokens=len(tokens),
        block_tokens=256,
        groups=plan.groups,
        codec=Codec.RAW,
        n_chunks=len(entries),
        total_size_bytes=sum(entry.length_bytes for entry in entries),
        root=pages_root(pages),
        last_prefix_key=keys[-1],
        producer=Producer("synthetic", "1", "cpu", "any", 256),
        continuation=(),
        derived_from=(),
        context_size_bytes=0,
        created=1_800_000_000,
        publisher=KEY.public,
    )
    envelope = seal(StatementType.MANIFEST, encode_manifest(manifest), KEY)
    return writer.publish(envelope, keys=keys, pinned=pinned)


def _chunks(plan: ChunkPlan, tokens: range) -> Iterator[bytes]:
    """Random once, then stamped with the index: no two chunks are equal, and none can be compressed."""
    ids = tokens_to_bytes(tokens)
    filler = secrets.token_bytes(4 << 20)
    for spec in plan:
        if spec.kind is ChunkKind.TOKENS:
            yield ids[spec.first_token * 4 :][: spec.raw_size_bytes]
        else:
            yield spec.index.to_bytes(8, "big") + filler[8 : spec.raw_size_bytes]
