import random
import struct
from typing import Any

import pytest

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import cbor
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import (
    IRRELEVANT_CONFIG_FIELDS,
    Adapter,
    Fingerprint,
    KvFormat,
    LayerLayout,
    Producer,
    Verdict,
    compare,
    config_digest,
    decode_fingerprint,
    weights_digest,
)
from kvnet.format.hashes import blake3_hash
from kvnet.format.tensor import DType, LayerKind, StateShape
from tests.unit.format.examples import PLAIN, PRODUCER, ROUNDS, fingerprint, layout

OTHER = LayerKind(cache="kv", heads=1, k_dim=8, v_dim=4, dtype=DType.BFLOAT16)
TENSORS = [("b", "F32", (2, 3), bytes(32)), ("a", "BF16", (), b"\1" * 32)]
CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": {"factor": 2.0}}


def adapted(scale: float = 1.0, name: bytes = b"A") -> Adapter:
    return Adapter.of(blake3_hash(name), scale)


def test_a_fingerprint_round_trips_and_its_hash_is_that_of_its_document() -> None:
    one = fingerprint(adapters=(adapted(),), layers=layout(PLAIN, OTHER))
    again = decode_fingerprint(one.encode())
    assert again == one
    assert again.hash == one.hash
    assert len(one.hash) == 32


def test_every_field_changes_the_hash() -> None:
    variants = [
        fingerprint(),
        fingerprint(weights=b"\1" * 32),
        fingerprint(config=b"\1" * 32),
        fingerprint(architecture="qwen3"),
        fingerprint(layers=layout(OTHER)),
        fingerprint(layers=layout(order=bytes(2))),
        fingerprint(kv=KvFormat(8, 64)),
        # Base, A at full and half scale, B, A and B, B and A: none is served for another.
        fingerprint(adapters=(adapted(),)),
        fingerprint(adapters=(adapted(0.5),)),
        fingerprint(adapters=(adapted(name=b"B"),)),
        fingerprint(adapters=(adapted(), adapted(name=b"B"))),
        fingerprint(adapters=(adapted(name=b"B"), adapted())),
    ]
    assert len({one.hash for one in variants}) == len(variants)


def test_an_adapter_scale_is_written_as_a_big_endian_double() -> None:
    assert adapted(0.5).scale == struct.pack(">d", 0.5) == bytes.fromhex("3fe0000000000000")


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": bytes(31)},
        {"config": b""},
        {"adapters": (adapted(),) * 9},
        {"architecture": ""},
        {"architecture": "a b"},
        {"architecture": "a" * 65},
        {"block_tokens": 128},
    ],
)
def test_a_fingerprint_beyond_the_limits_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match="fingerprint"):
        fingerprint(**changes)


@pytest.mark.parametrize(("digest", "scale"), [(bytes(31), bytes(8)), (bytes(32), bytes(4))])
def test_a_malformed_adapter_is_refused(digest: bytes, scale: bytes) -> None:
    with pytest.raises(MalformedError, match="adapter"):
        Adapter(digest, scale)


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (0, 64), (17, 64), (8, 4097)])
def test_a_kv_format_that_contradicts_itself_is_refused(bits: int, group: int) -> None:
    with pytest.raises(MalformedError, match="kv"):
        KvFormat(bits, group)


@pytest.mark.parametrize(
    ("kinds", "order", "reason"),
    [
        ((), b"\0", "layer kinds"),
        ((PLAIN,) * 17, bytes(range(17)), "layer kinds"),
        ((PLAIN, PLAIN), b"\0\1", "distinct"),
        ((PLAIN,), b"", "layers"),
        ((PLAIN,), bytes(513), "layers"),
        ((PLAIN,), b"\1", "order"),
        ((PLAIN, OTHER), b"\0", "order"),
        ((PLAIN, OTHER), b"\1\0", "order"),
        ((PLAIN, OTHER), b"\0\1\2", "order"),
    ],
)
def test_a_layout_has_one_way_to_be_written(kinds: tuple[LayerKind, ...], order: bytes, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        LayerLayout(kinds=kinds, order=order)


def test_a_layout_tells_kinds_and_bytes_per_token() -> None:
    layers = layout(PLAIN, OTHER, order=bytes((0, 1, 1)))
    assert layers.kind_of(2) == OTHER
    assert layers.bytes_per_token == 3 * 128 * 4 + 2 * 12 * 2


def test_an_irregular_hybrid_takes_few_bytes_and_an_impossible_one_is_refused() -> None:
    state = LayerKind(
        cache="state", heads=0, k_dim=0, v_dim=0, dtype=DType.FLOAT32, states=(StateShape(DType.FLOAT32, (16, 64)),)
    )
    irregular = fingerprint(layers=layout(PLAIN, state, order=bytes((0, 1, 1, 0, 1) * 20)))
    assert len(irregular.encode()) < 700
    kinds = tuple(
        LayerKind(
            cache="state",
            heads=0,
            k_dim=0,
            v_dim=0,
            dtype=DType.FLOAT32,
            states=(StateShape(DType.FLOAT32, (side, 64)),) * 8,
        )
        for side in range(1, 17)
    )
    with pytest.raises(CompatibilityError, match="2048"):
        fingerprint(layers=layout(*kinds)).encode()


@ROUNDS
def test_damaged_documents_are_refused_or_are_what_they_say(rounds: int) -> None:
    rng = random.Random(11)
    document = fingerprint(adapters=(adapted(),), layers=layout(PLAIN, OTHER)).encode()
    for _ in range(rounds):
        data = bytearray(document)
        for _change in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert decode_fingerprint(bytes(data)).encode() == data
        except MalformedError:
            continue


def test_a_document_with_a_field_missing_added_or_of_another_type_is_refused() -> None:
    value = cbor.decode(fingerprint().encode(), max_bytes=2048, what="fingerprint")
    for changed in (
        {name: value[name] for name in value if name != "kv"},
        value | {"tokenizer": bytes(32)},
        value | {"weights": "text"},
        value | {"layers": value["layers"] | {"order": [0]}},
        [value],
    ):
        with pytest.raises(MalformedError):
            decode_fingerprint(cbor.encode(changed))


def test_the_weights_digest_ignores_the_order_of_tensors_and_nothing_else() -> None:
    digest = weights_digest(TENSORS)
    assert digest == weights_digest(reversed(TENSORS))
    name, dtype, shape, content = TENSORS[0]
    for changed in (
        ("c", dtype, shape, content),
        (name, "F16", shape, content),
        (name, dtype, (3, 2), content),
        (name, dtype, shape, b"\2" * 32),
    ):
        assert weights_digest([changed, TENSORS[1]]) != digest


@pytest.mark.parametrize("tensors", [[], [TENSORS[0], TENSORS[0]], [("a", "F32", (1,), bytes(31))]])
def test_weights_that_have_no_one_meaning_are_refused(tensors: list) -> None:
    with pytest.raises(MalformedError, match="weights"):
        weights_digest(tensors)


def test_the_config_digest_ignores_order_spelling_and_the_listed_fields() -> None:
    digest = config_digest(CONFIG)
    assert digest == config_digest(dict(reversed(CONFIG.items())))
    assert digest == config_digest(CONFIG | {"rope_theta": 10000})
    assert digest == config_digest(CONFIG | dict.fromkeys(IRRELEVANT_CONFIG_FIELDS, 7))
    assert config_digest(CONFIG | {"text_config": {}}) == config_digest(CONFIG | {"text_config": {"use_cache": True}})


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"factor": 4.0}},
        {"rope_scaling": {"factor": 2.0, "use_cache": True}},
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"quantization": {"bits": 4, "group_size": 64}},
        {"sliding_window": 4096},
        {"text_config": None},
        {"never_seen_before": 0},
    ],
)
def test_the_config_digest_minds_everything_else(changes: dict[str, Any]) -> None:
    assert config_digest(CONFIG | changes) != config_digest(CONFIG)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1 << 53, {1: 2}, object(), "\ud800"])
def test_a_config_without_canonical_json_is_refused(value: object) -> None:
    with pytest.raises(MalformedError, match="model configuration"):
        config_digest({"time_step_limit": [0.0, value]})


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime": "x" * 257},
        {"versions": "a\nb"},
        {"device": "\x1b[31m"},
        {"system": "\x9b"},
        {"prefill_step": -1},
        {"prefill_step": 1 << 63},
    ],
)
def test_a_producer_record_is_bounded_and_free_of_control_characters(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"runtime": "r", "versions": "v", "device": "d", "system": "s", "prefill_step": 1}
    with pytest.raises(MalformedError, match="producer"):
        Producer(**(fields | changes))


def test_the_same_fingerprint_and_producer_are_exact() -> None:
    found = compare(fingerprint(), fingerprint(), PRODUCER, PRODUCER, codec=Codec.SHUFFLE_ZSTD1)
    assert (found.verdict, found.differences) == (Verdict.EXACT, ())


def test_other_numerics_are_tolerant_and_named() -> None:
    theirs = Producer("mlx-lm", "2", "another chip", "system", 512)
    found = compare(fingerprint(), fingerprint(), PRODUCER, theirs)
    assert found.verdict is Verdict.TOLERANT
    assert found.differences == (
        "versions: 1 here, 2 there",
        "device: chip here, another chip there",
        "prefill step: 2048 tokens here, 512 tokens there",
    )


def test_another_fingerprint_is_incompatible_whatever_the_producer_and_every_field_is_named() -> None:
    ours = fingerprint(layers=layout(PLAIN))
    changes: dict[str, Any] = {
        "weights": b"\1" * 32,
        "config": b"\1" * 32,
        "adapters": (adapted(),),
        "architecture": "qwen3",
        "layers": layout(OTHER),
        "kv": KvFormat(8, 64),
    }
    found = compare(ours, fingerprint(**changes), PRODUCER, PRODUCER)
    assert found.verdict is Verdict.INCOMPATIBLE
    assert len(found.differences) == len(changes)
    for field, value in changes.items():
        one = compare(ours, fingerprint(**{field: value}), PRODUCER, PRODUCER)
        assert one.verdict is Verdict.INCOMPATIBLE
        assert len(one.differences) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": layout(PLAIN, order=bytes(2))}, "1 layers here, 2 there"),
        (
            {"layers": layout(LayerKind(cache="kv", heads=3, k_dim=64, v_dim=64, dtype=DType.FLOAT16))},
            "K/V in float32 here, float16 there",
        ),
        ({"layers": layout(OTHER)}, "other shapes of K/V or kinds of caches"),
        ({"kv": KvFormat(8, 64)}, "K/V not quantised here, quantised to 8 bits in groups of 64 there"),
        ({"adapters": (Adapter.of(bytes(32), 0.5),)}, "no adapter here, adapter 00000000 at 0.5 there"),
        ({"architecture": "qwen3"}, "architecture llama here, qwen3 there"),
        ({"weights": b"\1" * 32}, "other weights"),
        ({"config": b"\1" * 32}, "another configuration of the model"),
    ],
)
def test_what_differs_between_fingerprints_is_said_in_plain_words(changes: dict[str, Any], words: str) -> None:
    assert compare(fingerprint(), fingerprint(**changes), PRODUCER, PRODUCER).differences == (words,)


def test_of_versions_only_those_that_differ_are_named() -> None:
    def on(versions: str) -> Producer:
        return Producer("mlx-lm", versions, "chip", "system", 2048)

    ours = on("mlx 0.32.4, mlx-lm 0.32.2, blas OpenBLAS 0.3.21")
    found = compare(fingerprint(), fingerprint(), ours, on("mlx 0.32.5, mlx-lm 0.32.2"))
    assert found.differences == ("mlx 0.32.4 here, 0.32.5 there", "blas OpenBLAS 0.3.21 here, none there")
    found = compare(fingerprint(), fingerprint(), ours, on("mine"))
    assert found.differences == (f"versions: {ours.versions} here, mine there",)


def test_a_lossy_codec_is_tolerant_at_best() -> None:
    found = compare(fingerprint(), fingerprint(), PRODUCER, PRODUCER, codec=Codec.Q8)
    assert found.verdict is Verdict.TOLERANT
    assert found.differences == ("stored with the lossy codec q8",)


def test_a_fingerprint_can_be_a_key() -> None:
    assert {fingerprint(): 1}[fingerprint()] == 1
    assert isinstance(fingerprint(), Fingerprint)
