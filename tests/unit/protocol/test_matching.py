import struct
from typing import Any

import pytest

from kvnet.format.fingerprint import Fingerprint, KvFormat, Producer, Verdict
from kvnet.format.sample import Sample, rows_size_bytes
from kvnet.format.tensor import DType, LayerKind
from kvnet.protocol.matching import (
    TOLERANCE,
    ModelHere,
    Packing,
    Relation,
    family,
    match_models,
    measure,
)
from tests.unit.format.examples import PLAIN, PRODUCER, fingerprint, layout

ELSEWHERE = Producer("mlx-lm", "mlx 0.32.5, mlx-lm 0.32.2", "another chip", "system", 2048)
HERE = Producer("mlx-lm", "mlx 0.32.4, mlx-lm 0.32.2", "another chip", "system", 2048)
UNKNOWN = Packing()
CODES = {DType.FLOAT32: "f", DType.FLOAT16: "e"}


def packed(dtype: DType, value: float) -> bytes:
    """One value in a dtype; bfloat16 is the upper half of float32."""
    return struct.pack("<f", value)[2:] if dtype is DType.BFLOAT16 else struct.pack("<" + CODES[dtype], value)


def model(dtype: DType = DType.FLOAT32, **changes: Any) -> Fingerprint:
    kind = LayerKind(cache="kv", heads=1, k_dim=2, v_dim=2, dtype=dtype)
    return fingerprint(layers=layout(kind, order=bytes(3)), **changes)


def sample(of: Fingerprint, *, value: float = 1.0, first: float | None = None, **changes: Any) -> Sample:
    """Every value the same, but the first one."""
    dtype = of.layers.kinds[0].dtype
    size = rows_size_bytes(of.layers) // dtype.size_bytes
    rows = packed(dtype, value if first is None else first) + packed(dtype, value) * (size - 1)
    fields: dict[str, Any] = {
        "version": 1,
        "fingerprint": of.hash,
        "producer": PRODUCER,
        "vocabulary": 512,
        "rows": rows,
    }
    return Sample(**(fields | changes))


def here(of: Fingerprint, name: str = "m", *, producer: Producer = PRODUCER, **rest: Any) -> ModelHere:
    return ModelHere(name, of, producer, **rest)


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType))
def test_a_difference_within_the_tolerance_is_rounding_and_one_beyond_is_not(dtype: DType) -> None:
    one = model(dtype)
    share = TOLERANCE[dtype]
    near = measure(one.layers, sample(one), sample(one, first=1.0 - share / 2))
    far = measure(one.layers, sample(one), sample(one, first=1.0 - 2 * share))
    assert (near.tolerated, far.tolerated) == (True, False)
    assert near.difference == pytest.approx(share / 2, rel=0.2)
    assert "K of layer 0" in far.words
    assert dtype.value in far.words


def test_equal_bits_are_no_difference_and_the_smallest_one_is_one() -> None:
    one = model()
    assert measure(one.layers, sample(one), sample(one)).difference == 0.0
    tiny = measure(one.layers, sample(one), sample(one, first=1.0000001))
    assert tiny.difference
    assert "less than 0.01 %" in tiny.words


def test_differences_count_against_the_largest_value_of_their_own_layer_and_kind() -> None:
    one = model()
    # Far above everything else in K of layer 0, so that a step of 1 there is small beside it.
    assert measure(one.layers, sample(one, first=1000.0), sample(one, first=1001.0)).tolerated


def test_values_that_are_all_zero_do_not_divide_by_zero() -> None:
    one = model()
    assert measure(one.layers, sample(one, value=0.0, first=1.0), sample(one, value=0.0, first=1.0001)).tolerated


def test_values_that_are_not_finite_are_never_tolerated() -> None:
    one = model()
    found = measure(one.layers, sample(one), sample(one, first=float("nan")))
    assert (found.difference, found.tolerated) == (None, False)
    assert "not finite" in found.words


def test_samples_of_other_token_ids_are_not_compared() -> None:
    one = model()
    found = measure(one.layers, sample(one), sample(one, vocabulary=513))
    assert (found.difference, found.tolerated) == (None, False)
    assert "512 here, 513 there" in found.words


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_without_two_samples_the_producers_decide() -> None:
    one = model()
    assert match_models(here(one), here(one)).verdict is Verdict.EXACT
    found = match_models(here(one, producer=HERE, sample=sample(one)), here(one, producer=ELSEWHERE))
    assert (found.relation, found.verdict, found.measured) == (Relation.SAME, Verdict.TOLERANT, None)
    assert found.reasons == ("mlx 0.32.4 here, 0.32.5 there",)


def test_a_measured_difference_lowers_a_verdict() -> None:
    one = model()
    rounding = match_models(here(one, sample=sample(one)), here(one, sample=sample(one, first=1.0001)))
    assert rounding.verdict is Verdict.TOLERANT
    assert rounding.reasons == ("K/V measured 0.01 % apart (K of layer 0); up to 2 % is rounding in float32",)
    wrong = match_models(here(one, sample=sample(one)), here(one, sample=sample(one, first=2.0)))
    assert wrong.verdict is Verdict.INCOMPATIBLE
    assert wrong.relation is Relation.SAME
    assert "50 % apart" in wrong.reasons[0]
    assert wrong.advice


def test_that_samples_agree_never_raises_a_verdict() -> None:
    one = model()
    found = match_models(
        here(one, producer=HERE, sample=sample(one)), here(one, producer=ELSEWHERE, sample=sample(one))
    )
    assert found.verdict is Verdict.TOLERANT
    assert found.measured
    assert found.measured.difference == 0.0
    exact = match_models(here(one, sample=sample(one)), here(one, sample=sample(one)))
    assert (exact.verdict, exact.reasons) == (Verdict.EXACT, ())


# --- the names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "Llama-3.2-3B-Instruct-8bit"),
        ("Qwen3-8B-MLX-bf16", "someone/qwen3-8b-4bit-DWQ"),
        ("SmolLM2-135M-Instruct-float32", "SmolLM2-135M-Instruct.Q4_K_M"),
    ],
)
def test_names_of_one_model_in_two_forms_have_one_family(one: str, other: str) -> None:
    assert family(one) == family(other)


def test_names_of_two_models_have_two_families() -> None:
    assert family("Llama-3.2-3B-Instruct-4bit") != family("Llama-3.2-1B-Instruct-4bit")
    assert family("Llama-3.2-3B-4bit") != family("Llama-3.2-3B-Instruct-4bit")


def near(ours: Fingerprint, theirs: Fingerprint, here_: Packing = UNKNOWN, there: Packing = UNKNOWN) -> Any:
    return match_models(here(ours, "org/Model-3B-4bit", packing=here_), here(theirs, "Model-3B-8bit", packing=there))


def test_another_quantisation_is_named_and_what_follows_from_it_is_not() -> None:
    found = near(model(), model(weights=b"\1" * 32, config=b"\1" * 32), Packing(4, 64), Packing(8, 64))
    assert found.relation is Relation.NEAR
    assert found.reasons == ("other quantisation: 4-bit in groups of 64 here, 8-bit in groups of 64 there",)
    assert "same quantisation" in found.advice
    found = near(model(), model(weights=b"\1" * 32), Packing(4), Packing())
    assert found.reasons == ("other quantisation: 4-bit here, not quantised there",)


def test_another_dtype_is_named() -> None:
    other = model(DType.BFLOAT16, weights=b"\1" * 32, config=b"\1" * 32)
    found = near(model(DType.FLOAT16), other, Packing(dtype="float16"), Packing(dtype="bfloat16"))
    assert found.reasons == ("float16 here, bfloat16 there",)
    # Where nobody says what the weights are in, the K/V does.
    found = near(model(DType.FLOAT16), other)
    assert found.reasons[0] == "K/V in float16 here, bfloat16 there"
    assert found.relation is Relation.NEAR


def test_equal_weights_under_another_configuration_are_the_same_model_nearly() -> None:
    found = match_models(here(model(), "one"), here(model(config=b"\1" * 32), "two"))
    assert found.relation is Relation.NEAR
    assert found.reasons == ("another configuration of the model",)
    assert "config.json" in found.advice


def test_other_weights_of_the_same_name_are_named() -> None:
    found = near(model(), model(weights=b"\1" * 32))
    assert found.reasons == ("other weights",)
    assert "copy" in found.advice


def test_two_different_models_have_nothing_to_do_with_each_other() -> None:
    for other in (
        fingerprint(weights=b"\1" * 32, layers=layout(PLAIN)),
        model(weights=b"\1" * 32, architecture="qwen3"),
    ):
        assert near(model(), other).relation is Relation.OTHER
    apart = match_models(here(model(), "A"), here(model(weights=b"\1" * 32), "B"))
    assert (apart.relation, apart.verdict) == (Relation.OTHER, Verdict.INCOMPATIBLE)
    assert near(model(), model(kv=KvFormat(8, 64))).relation is Relation.NEAR
