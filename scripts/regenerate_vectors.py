"""Writes the golden vectors of the format to ``tests/vectors``; the same bytes every time.

    python scripts/regenerate_vectors.py           write them
    python scripts/regenerate_vectors.py --check   say what would change, exit 1 if anything would

A vector that changes is a change of the format: it takes a new version or a new derivation context, and a decision
record (see ``docs/format.md``, section 13).
"""

import io
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvnet.format import cbor, codecs, container, hashes, prefix, q8
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, layer_groups, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import (
    Adapter,
    Fingerprint,
    LayerLayout,
    Producer,
    config_digest,
    weights_digest,
)
from kvnet.format.hashes import ArtifactHash
from kvnet.format.manifest import DerivedSpan, Manifest, encode_manifest
from kvnet.format.tensor import DType, LayerKind, layer_slices
from kvnet.format.ticket import Ticket, format_ticket
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import (
    AnyStatement,
    Attestation,
    HeldEntry,
    Invitation,
    KeyRotation,
    Membership,
    ProviderRecord,
    Rekey,
    Removal,
    Revocation,
    SealedSecret,
    Tag,
)
from kvnet.trust.statements import rotation_message, sign_statement
from scripts.membership_vectors import membership_vectors

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "vectors"

PREFIX_SECRET = bytes(range(32))
LOOKUP_SECRET = bytes(range(32, 64))
PUBLISHER = bytes(range(64, 96))
OTHER_PUBLISHER = bytes(range(96, 128))
TOKENS = [(7 * position + 3) % 50_000 for position in range(261)]
CONTEXT = b'{"inputs":{},"messages":[{"content":"Hello","role":"system"}]}'
ENVELOPE = b"stands for a signed envelope, which this layer does not judge"

CODEC_CASES: dict[str, tuple[int, int, str]] = {
    "float32 ramp, level 1": (
        4,
        256,
        "28b52ffd6000008d02006404000080c0002040608090a0b0c0d0e0f0000810182028303840485058606870788084888c9094989ca0a4a8acb0b4b8bcc0c4c8ccd0d4d8dce0e4e8ecf0f4f8fc003e3e3e3f4003100044190cd3d336",
    ),
    "float32 ramp, level 19": (
        4,
        256,
        "28b52ffd6000008d020064040080c0002040608090a0b0c0d0e0f0000810182028303840485058606870788084888c9094989ca0a4a8acb0b4b8bcc0c4c8ccd0d4d8dce0e4e8ecf0f4f8fc003e3e3e3f40400310001b1ce2e35321",
    ),
    "bfloat16 ramp, level 1, with a checksum": (
        2,
        192,
        "28b52ffd24c0650300240680828486888a8c8e90929496989a9c9ea0a2a4a6a8aaacaeb0b2b4b6b8babcbec0c2c4c6c8caccced0d2d4d6d8dadcdee0e2e4e6e8eaeceef0f2f4f6f8fafcfe000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f3f400200a091901230037092bd23",
    ),
    "zeros, level 3": (
        2,
        512,
        "28b52ffd6000014d00001000000100fb2ac002",
    ),
    "noise, stored as it is, level 1": (
        4,
        128,
        "28b52ffd20800104006eff9cbb78b385174b343b8cd131d777db0057c625fe4b6408b97d46006111ad34b3a578903711aff545ded260c3cc85c1ff5b38f63e76574f7819a89e1db6ff0b7a440a1d38a3a012542eb70a85e245b4e45d045d24ead9edaf6a6b63b15a299c98e62c3f76061d2fc5bbe3d6a53c9ac98da501b0499886084d74586b629ac5",
    ),
}
"""Element size, raw size and stored bytes. Decoding is pinned, encoding is not: these frames stay when zstd changes."""


def fingerprint() -> Fingerprint:
    """Two kinds of layers, one adapter."""
    weights = weights_digest(
        [
            ("model.norm.weight", "F32", (4,), hashes.blake3_hash(b"norm")),
            ("model.embed_tokens.weight", "BF16", (16, 4), hashes.blake3_hash(b"embedding")),
        ]
    )
    return Fingerprint(
        weights=weights,
        config=config_digest(CONFIG),
        adapters=(Adapter.of(hashes.blake3_hash(b"adapter"), 0.5),),
        architecture="llama",
        layers=LayerLayout(
            kinds=(
                LayerKind(cache="kv", heads=1, k_dim=2, v_dim=2, dtype=DType.FLOAT16),
                LayerKind(cache="kv", heads=1, k_dim=3, v_dim=1, dtype=DType.BFLOAT16),
            ),
            order=bytes((0, 0, 1)),
        ),
    )


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "hidden_size": 4,
    "transformers_version": "4.99.0",
    "eos_token_id": [1, 2],
    "rms_norm_eps": 1e-05,
    "text_config": {"use_cache": True, "num_hidden_layers": 3},
}


def manifest(plan: ChunkPlan, entries: list[ChunkEntry]) -> Manifest:
    """The example artifact's manifest."""
    model = fingerprint()
    root = prefix.prefix_root(PREFIX_SECRET, model.hash)
    return Manifest(
        version=1,
        fingerprint=model,
        namespace=hashes.namespace_id(PREFIX_SECRET),
        n_tokens=len(TOKENS),
        block_tokens=prefix.BLOCK_TOKENS,
        groups=plan.groups,
        codec=Codec.RAW,
        n_chunks=len(plan),
        total_size_bytes=sum(entry.length_bytes for entry in entries),
        root=pages_root(encode_pages(entries)),
        last_prefix_key=prefix.block_keys(root, TOKENS)[-1],
        producer=Producer("mlx-lm", "mlx-lm 0.32.2, mlx 0.32.4", "example chip", "example system", 2048),
        continuation=(17, 4, 4_294_967_295),
        derived_from=(DerivedSpan(ArtifactHash(hashes.blake3_hash(b"source")), OTHER_PUBLISHER, 0, 0),),
        context_size_bytes=len(CONTEXT),
        created=1_796_000_000,
        publisher=PUBLISHER,
    )


def example_plan() -> ChunkPlan:
    """261 tokens, so that the last block is short."""
    layers = fingerprint().layers
    return ChunkPlan(len(TOKENS), layers, layer_groups(layers), len(CONTEXT))


def example_chunks(plan: ChunkPlan) -> list[bytes]:
    """Every chunk's bytes; tiles count up."""
    heads = {ChunkKind.TOKENS: prefix.tokens_to_bytes(TOKENS), ChunkKind.CONTEXT: CONTEXT}
    return [heads.get(spec.kind, bytes(i % 251 for i in range(spec.raw_size_bytes))) for spec in plan]


def example_entries(chunks: list[bytes]) -> list[ChunkEntry]:
    """The chunk list of the example."""
    return [ChunkEntry(len(data), hashes.blake3_hash(data)) for data in chunks]


def fingerprint_vectors() -> dict[str, Any]:
    """Fingerprint document and its hash."""
    model = fingerprint()
    return {
        "config": CONFIG,
        "config_digest": model.config.hex(),
        "weights_digest": model.weights.hex(),
        "adapter_scale_0.5": model.adapters[0].scale.hex(),
        "document": model.encode().hex(),
        "hash": model.hash.hex(),
    }


def prefix_vectors() -> dict[str, Any]:
    """Namespace, root, keys, and what of them travels."""
    model = fingerprint()
    root = prefix.prefix_root(PREFIX_SECRET, model.hash)
    keys = prefix.block_keys(root, TOKENS)
    return {
        "prefix_secret": PREFIX_SECRET.hex(),
        "lookup_secret": LOOKUP_SECRET.hex(),
        "public_prefix_secret": prefix.PUBLIC_PREFIX_SECRET.hex(),
        "namespace_id": hashes.namespace_id(PREFIX_SECRET).hex(),
        "public_namespace_id": hashes.namespace_id(prefix.PUBLIC_PREFIX_SECRET).hex(),
        "fingerprint_hash": model.hash.hex(),
        "root": root.hex(),
        "tokens": TOKENS,
        "keys": [key.hex() for key in keys],
        "key_of_token_0_alone": prefix.block_keys(root, [0])[0].hex(),
        "lookup_keys": [hashes.lookup_key(LOOKUP_SECRET, key).hex() for key in keys],
        "dht_keys": [hashes.dht_key(hashes.lookup_key(LOOKUP_SECRET, key)).hex() for key in keys],
        "checkpoints": {str(count): prefix.checkpoints(count) for count in (1, 255, 256, 257, 1024, 1205, 131_072)},
    }


def _spec_fields(plan: ChunkPlan, index: int) -> dict[str, Any]:
    spec = plan[index]
    fields: dict[str, Any] = {name: getattr(spec, name) for name in spec.__slots__}
    return fields | {"kind": spec.kind.value}


PLANS: dict[str, tuple[int, int, list[LayerKind], bytes]] = {
    "the example": (len(TOKENS), len(CONTEXT), [], b""),
    "30 layers, 3 heads of 64, float32, 1,205 tokens": (
        1205,
        0,
        [LayerKind(cache="kv", heads=3, k_dim=64, v_dim=64, dtype=DType.FLOAT32)],
        bytes(30),
    ),
    "36 layers, 8 heads of 128, bfloat16, 128,000 tokens, context of 3,000,000 bytes": (
        128_000,
        3_000_000,
        [LayerKind(cache="kv", heads=8, k_dim=128, v_dim=128, dtype=DType.BFLOAT16)],
        bytes(36),
    ),
    "61 layers of latent attention, K 512 and V 64, bfloat16, 9,000 tokens": (
        9000,
        0,
        [LayerKind(cache="kv", heads=1, k_dim=512, v_dim=64, dtype=DType.BFLOAT16)],
        bytes(61),
    ),
}


def chunk_vectors() -> dict[str, Any]:
    """Plans, tiles and the chunk list."""
    plans = {}
    for name, (n_tokens, context_size_bytes, kinds, order) in PLANS.items():
        layers = LayerLayout(kinds=tuple(kinds), order=order) if kinds else fingerprint().layers
        plan = ChunkPlan(n_tokens, layers, layer_groups(layers), context_size_bytes)
        plans[name] = {
            "groups": [group.n_layers for group in plan.groups],
            "n_chunks": len(plan),
            "raw_size_bytes": plan.raw_size_bytes,
            "first_tile": plan.first_tile,
            "first": _spec_fields(plan, 0),
            "tile": _spec_fields(plan, plan.first_tile),
            "last": _spec_fields(plan, len(plan) - 1),
            "needed_for_257": plan.needed_for(257),
        }
    entries = example_entries(example_chunks(example_plan()))
    pages = encode_pages(entries)
    return {
        "plans": plans,
        "slices_of_2_layers_and_5_tokens": layer_slices(fingerprint().layers.kinds[1], 2, 5),
        "entries": [[entry.length_bytes, entry.hash.hex()] for entry in entries],
        "pages": [page.hex() for page in pages],
        "root": pages_root(pages).hex(),
    }


def manifest_vectors() -> dict[str, Any]:
    """Manifest bytes, artifact hash, its texts and keyed form."""
    plan = example_plan()
    data = encode_manifest(manifest(plan, example_entries(example_chunks(plan))))
    artifact = hashes.artifact_hash_of(data)
    return {
        "manifest": data.hex(),
        "artifact_hash": artifact.hex(),
        "text": hashes.artifact_text(artifact),
        "short_text": hashes.short_text(artifact),
        "keyed_artifact": hashes.keyed_artifact(LOOKUP_SECRET, artifact).hex(),
    }


def ticket_vectors() -> dict[str, Any]:
    """Tickets with and without addresses."""
    artifact = ArtifactHash(hashes.blake3_hash(b"artifact"))
    addresses = ("/ip4/192.0.2.1/tcp/5864/p2p/12D3KooWExample", "/ip6/2001:db8::1/tcp/5864/p2p/12D3KooWExample")
    return {
        "artifact_hash": artifact.hex(),
        "plain": format_ticket(Ticket(artifact)),
        "addresses": list(addresses),
        "addressed": format_ticket(Ticket(artifact, addresses)),
    }


def container_bytes() -> bytes:
    """The example artifact as a container."""
    chunks = example_chunks(example_plan())
    out = io.BytesIO()
    container.write_container(out.write, ENVELOPE, encode_pages(example_entries(chunks)), chunks)
    return out.getvalue()


def codec_vectors() -> list[dict[str, Any]]:
    """Stored bytes and what they decode to."""
    cases = []
    for name, (itemsize, size, stored) in CODEC_CASES.items():
        raw = codecs.decode_chunk(Codec.SHUFFLE_ZSTD1, bytes.fromhex(stored), itemsize, size)
        cases.append({"name": name, "itemsize": itemsize, "stored": stored, "raw": raw.hex()})
    return cases


Q8_CASES: dict[str, tuple[int, int, DType, int, str]] = {
    "float32, K 64 and V 64, ramp": (64, 64, DType.FLOAT32, 1, "ramp"),
    "float16, K 96 and V 80: groups of 32 and of 16": (96, 80, DType.FLOAT16, 1, "ramp"),
    "bfloat16, K 64 and V 8, noise": (64, 8, DType.BFLOAT16, 2, "noise"),
    "float32, K 8 and V 8: equal, tiny and huge values": (8, 8, DType.FLOAT32, 3, "edges"),
    "float16, K 8 and V 8: up to the largest value": (8, 8, DType.FLOAT16, 3, "edges"),
}
"""K dim, V dim, dtype, tokens of the tile (one layer, one head), and what is in it."""

EDGES: dict[DType, tuple[str, ...]] = {
    DType.FLOAT32: (
        "3f800000 3f800000 3f800000 3f800000 3f800000 3f800000 3f800000 3f800000",
        "00000001 80000001 00000000 80000000 007fffff 807fffff 00000000 80000000",
        "00800000 00800001 04000000 04ffffff 03000000 84000000 80800000 02000000",
        "7e7fffff fe7fffff 00000000 3f800000 bf800000 7e000000 fe000000 40490fdb",
        "c2f6e979 c2f6e97a c2f6e97b c2f6e97c c2f6e97d c2f6e97e c2f6e97f c2f6e980",
        "bf000000 3f000000 3e000000 be000000 3d000000 bd000000 3c000000 bc000000",
    ),
    DType.FLOAT16: (
        "3c00 3c00 3c00 3c00 3c00 3c00 3c00 3c00",
        "0001 8001 0000 8000 03ff 83ff 0400 8400",
        "7bff fbff 0000 3c00 bc00 7000 f000 4248",
        "7bff 7bfe 7bfd 7bfc 7bfb 7bfa 7bf9 7bf8",
        "fbff fbfe fbfd fbfc fbfb fbfa fbf9 fbf8",
        "b800 3800 3000 b000 2800 a800 2000 a000",
    ),
}
"""Rows of 8 values as big-endian hex: K and V of three tokens."""


def q8_tile(k_dim: int, v_dim: int, dtype: DType, n_tokens: int, content: str) -> bytes:
    """A tile of one layer with one head."""
    if content == "edges":
        rows = (b"".join(bytes.fromhex(value)[::-1] for value in row.split()) for row in EDGES[dtype])
        return b"".join(rows)
    count = (k_dim + v_dim) * n_tokens
    if content == "ramp":
        values = [(index - count / 3) / 16 for index in range(count)]
    else:
        # A linear congruential generator: every machine draws the same.
        state, values = 1, []
        for _ in range(count):
            state = (state * 1_103_515_245 + 12_345) % (1 << 31)
            values.append(state / (1 << 28) - 4)
    if dtype is DType.BFLOAT16:
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{count}{'f' if dtype is DType.FLOAT32 else 'e'}", *values)


def q8_vectors() -> list[dict[str, Any]]:
    """Tiles, their stored bytes, and what these decode to."""
    cases = []
    for name, (k_dim, v_dim, dtype, n_tokens, content) in Q8_CASES.items():
        kind = LayerKind(cache="kv", heads=1, k_dim=k_dim, v_dim=v_dim, dtype=dtype)
        raw = q8_tile(k_dim, v_dim, dtype, n_tokens, content)
        stored = q8.encode_tile(kind, 1, n_tokens, raw)
        decoded = q8.decode_tile(kind, 1, n_tokens, stored)
        shape = {"k_dim": k_dim, "v_dim": v_dim, "dtype": dtype.value, "n_tokens": n_tokens}
        cases.append({"name": name, **shape, "raw": raw.hex(), "stored": stored.hex(), "decoded": decoded.hex()})
    return cases


def example_statements(signer: PublisherKey, other: PublisherKey) -> dict[str, AnyStatement]:
    """One body of each type; every field has a value of its own."""
    said: dict[str, Any] = {"sequence": 1_800_000_000_123, "issued": 1_800_000_000, "expires": 0}
    soon = said | {"expires": 1_800_003_600}
    namespace, artifact, peer = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 102))
    addresses = ("/ip4/192.0.2.7/tcp/5862/p2p/12D3KooWexample", "/ip6/2001:db8::7/tcp/5862")
    keys = (bytes(range(1, 33)), bytes(range(2, 34)))
    entry = HeldEntry(artifact=artifact, n_tokens=261, codec="raw", size_bytes=12_345, keys=keys)
    rotated = rotation_message(signer.public, other.public, said["sequence"])
    sealed = (SealedSecret(member=other.public, box=bytes(range(80))),)
    return {
        "an artifact": Revocation(**said, kind="artifact", target=artifact, reason="made with a broken build"),
        "a publisher": Revocation(**said, kind="publisher", target=other.public, reason=""),
        "a key gives way": KeyRotation(**said, new=other.public, new_signature=other.sign(rotated)),
        "a page of what is held": ProviderRecord(
            **soon,
            namespace=namespace,
            peer=peer,
            addresses=addresses,
            page=0,
            entries=(entry,),
            revocations=17,
            n_revocations=2,
        ),
        "an invitation of a colleague": Invitation(
            **soon,
            id=bytes(range(16)),
            secret=bytes(range(3, 35)),
            role="colleague",
            swarm="team",
            namespace=namespace,
            founder=signer.public,
            peer=peer,
            addresses=addresses[:1],
            uses=3,
        ),
        "a device comes in": Membership(
            **said, namespace=namespace, member=other.public, peers=(peer,), role="device", label="Ann's laptop"
        ),
        "a new lookup secret": Rekey(**said, namespace=namespace, removed=(signer.public,), sealed=sealed),
        "gone from all machines": Removal(**said, namespace=namespace, artifact=artifact),
        "a name": Tag(**said, namespace=namespace, name="project", number=2, artifact=artifact),
        "computed again": Attestation(
            **said, namespace=namespace, artifact=artifact, claim="differs", max_difference="0.25"
        ),
    }


def statement_vectors() -> dict[str, Any]:
    """Statements of two publishers; signatures are deterministic (RFC 8032)."""
    signer, other = PublisherKey(bytes([1]) * 32), PublisherKey(bytes([2]) * 32)
    bodies = example_statements(signer, other)
    signed = {name: sign_statement(body, signer) for name, body in bodies.items()}
    revoked, rotated = signed["an artifact"].envelope, bodies["a key gives way"]
    expiring = msgspec.structs.replace(bodies["an artifact"], expires=1_900_000_000)
    one_sided = msgspec.structs.replace(rotated, new_signature=bytes(64))
    payload = cbor.encode_struct(bodies["an artifact"])
    refused = {
        "one bit of the signature differs": revoked[:-1] + bytes([revoked[-1] ^ 1]),
        "a byte follows": revoked + b"\0",
        "the body of another type": seal(StatementType.REMOVAL, payload, signer),
        "no statement but a manifest": seal(StatementType.MANIFEST, payload, signer),
        "a field nobody knows": seal(StatementType.REVOCATION, b"\xa9" + payload[1:] + b"\x69zzzzzzzzz\x00", signer),
        "a revocation that expires": sign_statement(expiring, signer).envelope,
        "a rotation that the new key has not signed": sign_statement(one_sided, signer).envelope,
    }
    return {
        "signer_seed": (bytes([1]) * 32).hex(),
        "signer": signer.public.hex(),
        "other_seed": (bytes([2]) * 32).hex(),
        "other": other.public.hex(),
        "valid": [
            {
                "name": name,
                "type": each.kind.value,
                "subject": each.body.subject.hex(),
                "payload": cbor.encode_struct(each.body).hex(),
                "envelope": each.envelope.hex(),
                "hash": hashes.blake3_hash(each.envelope).hex(),
            }
            for name, each in signed.items()
        ],
        "refused": [{"name": name, "envelope": envelope.hex()} for name, envelope in refused.items()],
    }


def all_vectors() -> dict[str, bytes]:
    """Every file, by name."""
    documents: dict[str, Callable[[], Any]] = {
        "chunks.json": chunk_vectors,
        "codecs.json": codec_vectors,
        "fingerprint.json": fingerprint_vectors,
        "manifest.json": manifest_vectors,
        "membership.json": membership_vectors,
        "prefix.json": prefix_vectors,
        "q8.json": q8_vectors,
        "statements.json": statement_vectors,
        "ticket.json": ticket_vectors,
    }
    files = {name: (json.dumps(make(), indent=1) + "\n").encode() for name, make in documents.items()}
    return files | {"container.kva": container_bytes()}


def main(arguments: list[str]) -> int:
    """Writes or checks; returns the exit code."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    changed = 0
    for name, data in all_vectors().items():
        path = FOLDER / name
        if path.exists() and path.read_bytes() == data:
            continue
        changed += 1
        print(f"{name}: {'differs' if path.exists() else 'is missing'}")
        if not arguments:
            path.write_bytes(data)
    print(f"{changed} of {len(all_vectors())} files {'would change' if arguments else 'written'}")
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
