import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import cbor
from kvnet.format.sample import (
    MAX_SAMPLE_BYTES,
    MAX_SAMPLE_ROWS_BYTES,
    POSITIONS,
    SAMPLE_CONTEXT,
    SAMPLE_STEP,
    SAMPLE_TOKENS,
    Sample,
    decode_sample,
    parts_of,
    rows_size_bytes,
    sample_hash,
    sample_plan,
    sample_tokens,
    vocabulary_of,
)
from kvnet.format.tensor import DType, LayerKind
from tests.unit.format.examples import PLAIN, PRODUCER, ROUNDS, fingerprint, layout

HALF = LayerKind(cache="kv", heads=2, k_dim=8, v_dim=4, dtype=DType.BFLOAT16)
WINDOW = LayerKind(cache="rotating", heads=2, k_dim=8, v_dim=8, dtype=DType.FLOAT32, window=16)
MODEL = fingerprint(layers=layout(HALF, order=bytes(5)))


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "version": 1,
        "fingerprint": MODEL.hash,
        "producer": PRODUCER,
        "vocabulary": 49152,
        "rows": bytes(rows_size_bytes(MODEL.layers)),
    }
    return Sample(**(fields | changes))


def test_a_sample_round_trips() -> None:
    encoded = sample().encode()
    assert decode_sample(encoded, MODEL) == sample()
    assert len(sample_hash(encoded)) == 32


def test_everybody_makes_the_same_token_ids_for_a_vocabulary() -> None:
    tokens = sample_tokens(49152)
    assert tokens[:4] == (41088, 28493, 40484, 45527)
    assert len(tokens) == SAMPLE_TOKENS
    assert max(tokens) < 49152
    assert sample_tokens(256) != sample_tokens(257)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 32000}, 32000),
        ({"text_config": {"vocab_size": 262144}}, 262144),
        ({}, 256),
        ({"vocab_size": 12}, 256),
        ({"vocab_size": "many", "text_config": 3}, 256),
        ({"vocab_size": 1 << 32}, 256),
    ],
)
def test_the_vocabulary_follows_from_the_configuration(config: dict[str, Any], size: int) -> None:
    assert vocabulary_of(config) == size


def test_the_first_middle_and_last_layers_are_sampled() -> None:
    assert sample_plan(layout(PLAIN, order=bytes(32))).layers == (0, 16, 31)
    assert sample_plan(layout(PLAIN, order=bytes(2))).layers == (0, 1)
    assert sample_plan(layout(PLAIN)).layers == (0,)
    assert sample_plan(layout(PLAIN)).positions == tuple(sorted(POSITIONS))


def test_a_model_with_large_rows_is_sampled_at_fewer_positions_and_the_last_is_kept() -> None:
    large = LayerKind(cache="kv", heads=32, k_dim=128, v_dim=128, dtype=DType.FLOAT32)
    layers = layout(large, order=bytes(32))
    assert sample_plan(layers).positions == (511,)
    assert rows_size_bytes(layers) == 3 * 32768
    fits = sample(fingerprint=fingerprint(layers=layers).hash, rows=bytes(rows_size_bytes(layers)))
    assert len(fits.encode()) <= MAX_SAMPLE_BYTES


def test_the_largest_sample_fits_beside_the_longest_names() -> None:
    producer = type(PRODUCER)("x" * 256, "x" * 256, "x" * 256, "x" * 256, (1 << 63) - 1)
    assert len(sample(producer=producer, rows=bytes(MAX_SAMPLE_ROWS_BYTES)).encode()) <= MAX_SAMPLE_BYTES


def test_a_model_that_cannot_be_sampled_says_why() -> None:
    huge = LayerKind(cache="kv", heads=1024, k_dim=128, v_dim=128, dtype=DType.FLOAT32)
    with pytest.raises(CompatibilityError, match="bytes a token in three layers"):
        sample_plan(layout(huge))
    with pytest.raises(CompatibilityError, match="rotating"):
        sample_plan(layout(PLAIN, WINDOW))


def test_the_parts_cover_the_rows_without_a_gap() -> None:
    parts = list(parts_of(MODEL.layers))
    assert [(part.layer, part.position, part.values) for part in parts[:3]] == [
        (0, 0, False),
        (0, 0, True),
        (0, 63, False),
    ]
    begin = 0
    for part in parts:
        assert part.where.start == begin
        begin = part.where.stop
    assert begin == rows_size_bytes(MODEL.layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"fingerprint": bytes(31)},
        {"vocabulary": 255},
        {"vocabulary": 1 << 32},
        {"rows": b""},
        {"rows": bytes(MAX_SAMPLE_ROWS_BYTES + 1)},
    ],
)
def test_a_sample_beyond_the_limits_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match="sample"):
        sample(**changes)


def test_a_sample_of_another_model_or_length_is_refused() -> None:
    with pytest.raises(MalformedError, match="another fingerprint"):
        decode_sample(sample().encode(), fingerprint())
    with pytest.raises(MalformedError, match="bytes of K/V"):
        decode_sample(sample(rows=bytes(3)).encode(), MODEL)
    with pytest.raises(MalformedError, match="sample"):
        decode_sample(bytes(MAX_SAMPLE_BYTES + 1), MODEL)
    with pytest.raises(MalformedError):
        decode_sample(cbor.encode({"version": 1}), MODEL)


def test_the_protocol_document_says_the_same() -> None:
    document = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    rule = document.split("sample-document = {")[1].split("\n}")[0]
    assert tuple(re.findall(r"^  ([a-z_]+):", rule, re.MULTILINE)) == Sample.__struct_fields__
    for text in (
        f"rows: bstr .size (1..{MAX_SAMPLE_ROWS_BYTES})",
        f"at most {MAX_SAMPLE_BYTES:,} bytes",
        f"`{SAMPLE_CONTEXT}`",
        f"steps of {SAMPLE_STEP} tokens",
        f"of {', '.join(map(str, POSITIONS))} the first ones that fit",
        f"its {SAMPLE_TOKENS} numbers",
    ):
        assert text in document


@ROUNDS
def test_hostile_bytes_are_refused_and_never_crash(rounds: int) -> None:
    generator = random.Random(1)
    sound = sample().encode()
    refused = 0
    for _ in range(rounds // 10):
        data = bytearray(sound[:400])
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            decode_sample(bytes(data) + sound[400:], MODEL)
        except MalformedError:
            refused += 1
    assert refused > 0
