"""What verifying looks at beyond hashes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkSpec, encode_pages, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, LayerLayout
from kvnet.format.hashes import blake3_hash
from kvnet.format.manifest import encode_manifest
from kvnet.format.q8 import encode_tile, parts_of
from kvnet.format.tensor import DType, LayerKind
from kvnet.store.disk import DiskStore
from kvnet.store.interface import Store
from kvnet.store.memory import MemoryStore
from kvnet.trust.envelope import StatementType, seal
from tests.unit.store.samples import OWN, Sample, publish, sample

KIND = LayerKind("kv", heads=1, k_dim=8, v_dim=8, dtype=DType.FLOAT32)
FINGERPRINT = Fingerprint(b"w" * 32, b"c" * 32, (), "llama", LayerLayout((KIND,), bytes(2)))


def negative_scale(spec: ChunkSpec, stored: bytes) -> bytes:
    part = parts_of(KIND, spec.n_layers, spec.n_tokens)[0]
    high_byte = part.scales.start + 1
    return stored[:high_byte] + b"\xff" + stored[high_byte + 1 :]


def q8_sample(
    change: Callable[[ChunkSpec, bytes], bytes] = lambda _spec, stored: stored,
    *,
    tile: int = -1,
    fingerprint: Fingerprint = FINGERPRINT,
) -> Sample:
    """The sample's artifact in q8, one of its tiles changed before it was hashed and signed."""
    plain = sample(range(300), fingerprint=fingerprint)
    specs = list(plain.manifest.plan())
    chunks = []
    for spec, chunk in zip(specs, plain.chunks, strict=True):
        if spec.kind is not ChunkKind.TILE:
            chunks.append(chunk)
            continue
        kind = fingerprint.layers.kind_of(spec.first_layer)
        stored = encode_tile(kind, spec.n_layers, spec.n_tokens, bytes(spec.raw_size_bytes))
        chunks.append(change(spec, stored) if spec is specs[tile] else stored)
    entries = tuple(ChunkEntry(len(chunk), blake3_hash(chunk)) for chunk in chunks)
    pages = tuple(encode_pages(entries))
    manifest = structs.replace(
        plain.manifest, codec=Codec.Q8, root=pages_root(pages), total_size_bytes=sum(map(len, chunks))
    )
    envelope = seal(StatementType.MANIFEST, encode_manifest(manifest), OWN)
    return Sample(manifest, envelope, tuple(chunks), entries, pages, plain.tokens, b"", plain.keys)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)


def test_a_q8_tile_that_no_encoder_writes_is_found_though_its_hash_is_right(store: Store) -> None:
    good, bad = q8_sample(), q8_sample(negative_scale)
    publish(store, good)
    publish(store, bad)
    assert store.verify(good.hash).bad == ()
    assert store.verify(bad.hash).bad == (len(bad.chunks) - 1,)
    store.close()


def test_every_tile_is_looked_at(store: Store) -> None:
    first_tile = q8_sample().manifest.plan().first_tile
    for tile in range(first_tile, len(q8_sample().chunks)):
        bad = q8_sample(negative_scale, tile=tile)
        publish(store, bad)
        assert store.verify(bad.hash).bad == (tile,)
    store.close()


def test_a_tile_is_looked_at_as_one_of_its_own_layers(store: Store) -> None:
    wider = LayerKind("kv", heads=2, k_dim=16, v_dim=8, dtype=DType.FLOAT32)
    mixed = Fingerprint(b"w" * 32, b"c" * 32, (), "llama", LayerLayout((KIND, wider), bytes([0, 1])))
    artifact = q8_sample(fingerprint=mixed)
    publish(store, artifact)
    assert store.verify(artifact.hash).bad == ()
    store.close()
