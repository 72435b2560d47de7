import random
from collections.abc import Callable
from typing import Any

import cbor2
import pytest

from kvnet.errors import CompatibilityError, KvnetError, MalformedError, UnsupportedVersionError
from kvnet.format import cbor
from kvnet.format.chunks import ABSENT, ChunkEntry, LayerGroup
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import KvFormat, Producer
from kvnet.format.hashes import ArtifactHash, artifact_hash_of
from kvnet.format.limits import MAX_CHUNKS, MAX_MANIFEST_BYTES
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, decode_manifest, encode_manifest
from kvnet.format.tensor import DType, LayerKind
from tests.unit.format.examples import ROUNDS, entries, fingerprint, layout, manifest

SOUND = encode_manifest(manifest())
SPAN = DerivedSpan(ArtifactHash(b"\1" * 32), b"\2" * 32, 0, 0)


def fields() -> dict[str, Any]:
    value = cbor.decode(SOUND, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    assert isinstance(value, dict)
    return value


def written(**changes: Any) -> bytes:
    """The sound manifest's bytes with fields changed behind the back of the class that checks them."""
    return cbor.encode(fields() | changes)


def refusal(data: bytes) -> KvnetError:
    with pytest.raises(KvnetError) as caught:
        decode_manifest(data)
    return caught.value


def test_a_manifest_round_trips_and_is_named_by_the_hash_of_its_bytes() -> None:
    one = decode_manifest(SOUND)
    assert one == manifest()
    assert encode_manifest(one) == SOUND
    assert artifact_of(one) == artifact_hash_of(SOUND)
    assert one.n_blocks == 2
    assert one.plan() is one.plan()
    assert len(one.plan()) == one.n_chunks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_chunks": 5}, "6 chunks by its own layout, found 5"),
        ({"n_chunks": 7}, "6 chunks by its own layout, found 7"),
        ({"n_chunks": 0}, "6 chunks"),
        ({"n_chunks": MAX_CHUNKS + 1}, f"at most {MAX_CHUNKS} chunks"),
        ({"n_chunks": (1 << 63) - 1}, f"at most {MAX_CHUNKS} chunks"),
        ({"n_chunks": "6"}, f"at most {MAX_CHUNKS} chunks"),
        ({"n_chunks": True}, "int"),
        ({"n_tokens": 0}, "tokens: expected 1"),
        ({"n_tokens": 262}, "bytes in all"),
        ({"n_tokens": 513}, "chunks by its own layout"),
        ({"n_tokens": (1 << 22) + 1}, "tokens: expected 1 to 4194304"),
        ({"n_tokens": (1 << 63) - 1}, "tokens: expected 1 to 4194304"),
        ({"total_size_bytes": 0}, "bytes in all"),
        ({"total_size_bytes": 7371}, "bytes in all"),
        ({"total_size_bytes": (1 << 63) - 1}, "bytes in all"),
        ({"context_size_bytes": 0}, "chunks by its own layout"),
        ({"context_size_bytes": (1 << 20) + 1}, "chunks by its own layout"),
        ({"context_size_bytes": 1 << 40}, "context: expected at most"),
        ({"block_tokens": 128}, "blocks of 256 tokens, found 128"),
        ({"groups": []}, "3 layers"),
        ({"groups": [3]}, "one kind"),
        ({"groups": [1, 2]}, "one kind"),
        ({"groups": [2, 0, 1]}, "layer groups"),
        ({"groups": [1, 1, 1]}, "chunks by its own layout"),
        ({"groups": [(1 << 63) - 1, 1]}, "3 layers"),
        ({"groups": b"\2\1"}, "array"),
        ({"codec": "q9"}, "enum"),
        ({"codec": ""}, "enum"),
        ({"codec": 0}, "str"),
        ({"namespace": bytes(31)}, "namespace: expected 32 bytes"),
        ({"root": bytes(33)}, "root: expected 32 bytes"),
        ({"last_prefix_key": b""}, "last_prefix_key: expected 32 bytes"),
        ({"publisher": bytes(64)}, "publisher: expected 32 bytes"),
        ({"publisher": "a" * 32}, "bytes"),
        ({"continuation": list(range(9))}, "continuation of at most 8"),
        ({"continuation": [1 << 32]}, "32 bits"),
        ({"derived_from": [[bytes(32), bytes(32), 0, 2]]}, "blocks below 2, found 2"),
        ({"derived_from": [[bytes(32), bytes(32), 1, 0]]}, "first <= last"),
        ({"derived_from": [[bytes(32), bytes(32), 0, (1 << 63) - 1]]}, "blocks below 2"),
        ({"derived_from": [[bytes(31), bytes(32), 0, 0]]}, "32 bytes"),
        ({"derived_from": [[bytes(32), bytes(31), 0, 0]]}, "32 bytes"),
        ({"derived_from": [[bytes(32), bytes(32), 0]]}, "length"),
        ({"derived_from": [[bytes(32), bytes(32), 0, 0, 0]]}, "length"),
        ({"derived_from": [[bytes(32), bytes(32), 0, 1], [bytes(32), bytes(32), 1, 1]]}, "overlap"),
        ({"derived_from": [[bytes(32), bytes(32), 0, 0], [bytes(32), bytes(32), 0, 0]]}, "overlap"),
        ({"derived_from": [[bytes([n]) * 32, bytes(32), 0, 0] for n in range(17)]}, "16 derived spans"),
        ({"producer": {}}, "missing"),
        ({"fingerprint": {}}, "missing"),
        ({"fingerprint": bytes(10)}, "object"),
        ({"created": 1 << 63}, "2\\^63|integer"),
        ({"host": "name"}, "unknown field"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_limits_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MalformedError, match=reason):
        decode_manifest(written(**changes))


def nested(path: str, value: Any) -> bytes:
    """The sound manifest with a field inside it replaced; ``path`` is dotted, numbers index arrays."""
    document = fields()
    at: Any = document
    *parents, last = path.split(".")
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[last] = value
    return cbor.encode(document)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("fingerprint.layers.kinds.0.dtype", "float8", "enum"),
        ("fingerprint.layers.kinds.0.cache", "paged", "layer kind"),
        ("fingerprint.layers.kinds.0.heads", 0, "heads"),
        ("fingerprint.layers.kinds.0.heads", (1 << 63) - 1, "heads"),
        ("fingerprint.layers.kinds.0.k_dim", (1 << 63) - 1, "K dim"),
        ("fingerprint.layers.kinds.0.heads", 1024, "bytes in all"),
        ("fingerprint.layers.order", b"\0\1", "layers in all"),
        ("fingerprint.layers.order", b"\0\1\2", "order"),
        ("fingerprint.layers.order", bytes(600), "layers: expected 1 to 512"),
        ("fingerprint.block_tokens", 512, "blocks of 256"),
        ("fingerprint.weights", bytes(16), "32 bytes"),
        ("fingerprint.architecture", "../llama", "architecture"),
        ("fingerprint.kv.bits", 8, "kv"),
        ("producer.device", "x" * 257, "producer device"),
        ("producer.device", "\x1b[2J", "producer device"),
        ("producer.prefill_step", "2048", "int"),
    ],
)
def test_a_manifest_malformed_in_its_depths_is_refused_with_the_reason(path: str, value: Any, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        decode_manifest(nested(path, value))


def test_every_missing_field_is_named() -> None:
    for name in fields():
        data = cbor.encode({field: value for field, value in fields().items() if field != name})
        expected = {"version": "version", "n_chunks": "chunks"}.get(name, f"`{name}`")
        assert expected in str(refusal(data))


@pytest.mark.parametrize("version", [0, 2, (1 << 63) - 1, "1", [1], "x" * 1000])
def test_another_version_is_said_to_be_another_version_whatever_else_it_holds(version: Any) -> None:
    error = refusal(cbor.encode({"version": version, "something": "new"}))
    assert isinstance(error, UnsupportedVersionError)
    assert len(str(error)) < 200


@pytest.mark.parametrize("value", [[], 1, b"", "manifest", True, [fields()]])
def test_what_is_no_map_is_no_manifest(value: Any) -> None:
    assert "expected a map" in str(refusal(cbor.encode(value)))


def replaced(old: str, new: str) -> bytes:
    assert bytes.fromhex(old) in SOUND
    return SOUND.replace(bytes.fromhex(old), bytes.fromhex(new), 1)


N_TOKENS = "686e5f746f6b656e73190105"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # n_tokens twice, with two meanings.
        (lambda: b"\xb2" + replaced(N_TOKENS, N_TOKENS + "686e5f746f6b656e7319270f")[1:], "a map key twice"),
        (lambda: SOUND + b"\0", "bytes after"),
        (lambda: b"\xbf" + SOUND[1:] + b"\xff", "indefinite"),
        (lambda: replaced("83 11 04 1a ffffffff", "9f 11 04 1a ffffffff ff"), "indefinite"),
        (lambda: replaced("43 00 00 01", "5f 43 00 00 01 ff"), "indefinite"),
        (lambda: replaced(N_TOKENS, "686e5f746f6b656e731a00000105"), "more bytes than needed"),
        (lambda: replaced(N_TOKENS, "686e5f746f6b656e73f95c14"), "a float"),
        (lambda: replaced(N_TOKENS, "686e5f746f6b656e73c2420105"), "a tag"),
        (lambda: replaced(N_TOKENS, "686e5f746f6b656e73d903e8190105"), "a tag"),
        (lambda: cbor2.dumps(dict(reversed(fields().items()))), "out of order"),
        (lambda: SOUND[:-1], "an end|fewer"),
        (lambda: b"", "an end"),
        (lambda: bytes(MAX_MANIFEST_BYTES + 1), "at most 4096 bytes"),
    ],
)
def test_a_second_spelling_of_a_manifest_is_refused(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        decode_manifest(make())


@pytest.mark.parametrize("unit", [b"\x81", b"\xa1\x00", b"\xc1", b"\x9f"])
def test_deep_nesting_is_refused_as_a_manifest_and_inside_one(unit: bytes) -> None:
    assert "at most 4096 bytes" in str(refusal(unit * 100_000))
    assert isinstance(refusal(unit * 2000), MalformedError)
    inside = replaced("83 11 04 1a ffffffff", (unit * 500).hex() + "00")
    assert isinstance(refusal(inside), MalformedError)


def test_well_formed_kinds_that_this_version_cannot_move_are_incompatible_and_named() -> None:
    rotating = LayerKind(cache="rotating", heads=1, k_dim=2, v_dim=2, dtype=DType.FLOAT16, window=16)
    document = cbor.decode(
        fingerprint(layers=layout(rotating, order=bytes(3))).encode(), max_bytes=2048, what="fingerprint"
    )
    error = refusal(written(fingerprint=document, groups=[3]))
    assert isinstance(error, CompatibilityError)
    assert "'rotating'" in str(error)
    with pytest.raises(CompatibilityError, match="quantised"):
        manifest(fingerprint=fingerprint(kv=KvFormat(8, 64)))


def test_a_fingerprint_document_above_its_own_limit_is_refused_inside_a_manifest() -> None:
    state = {"dtype": "float32", "shape": [65_536] * 6}
    kinds = [
        {
            "cache": "kv",
            "heads": heads,
            "k_dim": 1,
            "v_dim": 1,
            "dtype": "float16",
            "window": 0,
            "keep": 0,
            "states": [],
        }
        for heads in range(1, 17)
    ]
    kinds[0]["states"] = [state] * 8
    layers = {"kinds": kinds, "order": bytes(range(16)) + bytes(480)}
    with pytest.raises(MalformedError, match="2048 bytes"):
        decode_manifest(nested("fingerprint.layers", layers))


def test_a_manifest_too_large_to_write_is_refused_before_it_is_signed() -> None:
    kinds = [LayerKind(cache="kv", heads=heads, k_dim=1, v_dim=1, dtype=DType.FLOAT16) for heads in range(1, 17)]
    layers = layout(*kinds, order=bytes(range(16)) + bytes(range(16)) * 26)
    groups = tuple(LayerGroup(layer, 1, kind) for layer, kind in enumerate(layers.order))
    large = Producer("x" * 256, "x" * 256, "x" * 256, "x" * 256, 1)
    spans = tuple(DerivedSpan(ArtifactHash(bytes([number]) * 32), bytes(32), 0, 0) for number in range(16))
    per_block = len(groups)
    one = manifest(
        fingerprint=fingerprint(layers=layers),
        groups=groups,
        producer=large,
        derived_from=spans,
        n_chunks=2 + 2 * per_block,
        total_size_bytes=4 * 261 + manifest().context_size_bytes + 261 * layers.bytes_per_token,
    )
    with pytest.raises(CompatibilityError, match="4096 bytes"):
        encode_manifest(one)


def test_spans_of_two_artifacts_may_overlap_and_those_of_one_may_follow_each_other() -> None:
    other = DerivedSpan(ArtifactHash(b"\3" * 32), b"\2" * 32, 0, 1)
    following = DerivedSpan(SPAN.artifact, SPAN.publisher, 1, 1)
    one = manifest(derived_from=(following, SPAN, other))
    assert decode_manifest(encode_manifest(one)).derived_from == (following, SPAN, other)


def test_a_compressed_artifact_may_have_any_total_its_codec_can_reach() -> None:
    head, tiles = 4 * 261 + manifest().context_size_bytes, 4
    for total in (head + tiles, 7000, 7370 + 4 * 1024):
        assert manifest(codec=Codec.SHUFFLE_ZSTD1, total_size_bytes=total).total_size_bytes == total
    for total in (head + tiles - 1, 7370 + 4 * 1100):
        with pytest.raises(MalformedError, match="bytes in all"):
            manifest(codec=Codec.SHUFFLE_ZSTD1, total_size_bytes=total)


def test_a_chunk_list_that_fits_is_accepted() -> None:
    manifest().check_entries(entries())


def with_entry(index: int, entry: ChunkEntry) -> list[ChunkEntry]:
    changed = entries()
    changed[index] = entry
    return changed


def test_a_chunk_list_of_another_length_or_sum_is_refused() -> None:
    for wrong in (entries()[:-1], [*entries(), entries()[0]], with_entry(0, ChunkEntry(1, entries()[0].hash))):
        with pytest.raises(MalformedError, match="6 chunks of 7370 bytes"):
            manifest().check_entries(wrong)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_no_chunk_of_a_full_attention_model_may_be_absent(index: int) -> None:
    rest = entries()[index].length_bytes
    other = 3 if index != 3 else 2
    moved = with_entry(index, ABSENT)
    moved[other] = ChunkEntry(moved[other].length_bytes + rest, moved[other].hash)
    with pytest.raises(MalformedError, match="is absent"):
        manifest().check_entries(moved)


def test_sizes_shifted_between_chunks_are_refused() -> None:
    moved = entries()
    moved[2] = ChunkEntry(moved[2].length_bytes - 1, moved[2].hash)
    moved[3] = ChunkEntry(moved[3].length_bytes + 1, moved[3].hash)
    with pytest.raises(MalformedError, match="chunk 2: expected"):
        manifest().check_entries(moved)
    # Compressed tiles may have any size up to the bound; token ids may not.
    manifest(codec=Codec.SHUFFLE_ZSTD1).check_entries(moved)
    head = entries()
    head[0] = ChunkEntry(head[0].length_bytes - 1, head[0].hash)
    head[2] = ChunkEntry(head[2].length_bytes + 1, head[2].hash)
    with pytest.raises(MalformedError, match="chunk 0"):
        manifest(codec=Codec.SHUFFLE_ZSTD1).check_entries(head)


def q8_manifest(**changes: Any) -> Manifest:
    """Two layers of 8 K and 8 V elements in float16: 256 and 5 tokens, 2 tiles a block."""
    layers = layout(LayerKind("kv", 1, 8, 8, DType.FLOAT16), LayerKind("kv", 1, 8, 16, DType.FLOAT16))
    head = 4 * 261 + manifest().context_size_bytes
    usual = {
        "total_size_bytes": head + 261 * (24 + 32),
        "codec": Codec.Q8,
        "fingerprint": fingerprint(layers=layers),
        "groups": (LayerGroup(0, 1, 0), LayerGroup(1, 1, 1)),
    }
    return manifest(**usual | changes)


def test_a_q8_artifact_has_exactly_the_size_of_its_layout() -> None:
    one = q8_manifest()
    assert decode_manifest(encode_manifest(one)) == one
    for total in (one.total_size_bytes - 1, one.total_size_bytes + 1):
        with pytest.raises(MalformedError, match="bytes in all"):
            q8_manifest(total_size_bytes=total)


def test_every_tile_of_a_q8_artifact_has_exactly_its_size() -> None:
    one = q8_manifest()
    sizes = [4 * 261, one.context_size_bytes, 256 * 24, 256 * 32, 5 * 24, 5 * 32]
    listed = [ChunkEntry(size, entries()[0].hash) for size in sizes]
    one.check_entries(listed)
    listed[2:4] = ChunkEntry(256 * 24 - 1, listed[2].hash), ChunkEntry(256 * 32 + 1, listed[3].hash)
    with pytest.raises(MalformedError, match="chunk 2: expected 6144"):
        one.check_entries(listed)


def test_a_q8_artifact_of_rows_that_no_group_divides_is_refused() -> None:
    with pytest.raises(MalformedError, match="none divides K dim"):
        manifest(codec=Codec.Q8)


def test_a_creation_time_before_1970_cannot_be_written() -> None:
    with pytest.raises(MalformedError, match="creation time"):
        manifest(created=-1)


@ROUNDS
def test_damaged_manifests_are_refused_or_are_what_they_say(rounds: int) -> None:
    rng = random.Random(13)
    accepted = 0
    for _ in range(rounds):
        data = bytearray(SOUND)
        for _change in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        try:
            one: Manifest = decode_manifest(bytes(data))
        except (MalformedError, CompatibilityError):
            continue
        accepted += 1
        assert encode_manifest(one) == data
    # Hashes and names may take any value, so that some changes leave a sound manifest.
    assert 0 < accepted < 0.9 * rounds
