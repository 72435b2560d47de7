"""``kvnet bench ttft`` with a tiny model: every row does what it is named after."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

WIDE = {
    **LLAMA, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024, "num_attention_heads": 8,
}  # fmt: skip
"""Of a model whose prefill is quicker than any fetch, nothing would come from a peer."""

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]


def test_one_length_is_one_line_and_all_answers_are_the_same(kvnet: Kvnet, tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "wide", WIDE, scale=0.05)
    ran = kvnet("--json", "--quiet", "bench", "ttft", "--prefix-tokens", "256", "--rounds", "1", "--model", str(model))
    assert ran.code == 0, ran.stderr
    (line,) = ran.lines
    assert list(line)[:8] == [
        "type", "prefix_tokens", "cold_s", "plain_mlx_lm_s", "local_store_s", "peer_s", "empty_network_s", "same_text",
    ]  # fmt: skip
    assert (line["type"], line["same_text"], line["rounds"]) == ("ttft", True, 1)
    assert line["prompt_tokens"] > line["prefix_tokens"] > 256
    assert all(line[key] > 0 for key in list(line)[2:7])


@pytest.mark.parametrize("arguments", [["--prefix-tokens", "10"], ["--rounds", "0"], ["--model", "no-such-model"]])
def test_a_benchmark_that_cannot_be_run_is_a_usage_error(kvnet: Kvnet, arguments: list[str]) -> None:
    ran = kvnet("bench", "ttft", *arguments)
    assert (ran.code, ran.stdout) == (2, "")
