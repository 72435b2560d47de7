"""Tables of machines: the figures that they were taken from come out again."""

import pytest

from kvnet.errors import ConfigError
from simulations import chips


@pytest.mark.parametrize(("chip", "tokens_s"), [("m1-max", 499.6), ("m4", 224.8)])
def test_public_results_are_reproduced(chip: str, tokens_s: float) -> None:
    machine = chips.machine(chips.chip(chip), chips.model("llama-3.1-8b"))
    assert 512 / machine.prefill.seconds(0, 512) == pytest.approx(tokens_s, rel=0.02)


def test_every_chip_runs_every_model() -> None:
    for chip in chips.CHIPS.values():
        for model in chips.MODELS.values():
            machine = chips.machine(chip, model)
            assert machine.prefill.tokens_s(0) > machine.prefill.tokens_s(100_000) > 0
            assert chips.answer_tokens_s(chip, model) > 0


def test_kv_bytes_are_those_that_kvnet_size_prints() -> None:
    assert chips.model("llama-3.2-3b").kv_bytes_per_token == 114_688
    assert chips.model("qwen3-8b").kv_bytes_per_token == 147_456


@pytest.mark.parametrize(("find", "word"), [(chips.chip, "m4"), (chips.model, "qwen3-8b"), (chips.link, "10gbe")])
def test_an_unknown_name_is_told_with_those_that_are_known(find: object, word: str) -> None:
    assert callable(find)
    with pytest.raises(ConfigError) as failed:
        find("abacus")
    assert word in failed.value.hint
