"""A seed has a random stream of its own, and it is mlx-lm's."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvnet.engine.mlx import runtime

runtime.import_mlx_lm()

import mlx.core as mx  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from kvnet.engine.mlx.sampling import SeededSampler  # noqa: E402

pytestmark = pytest.mark.mlx

PLAIN: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}
FILTERED = {**PLAIN, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
EXCLUDING = {**FILTERED, "xtc_probability": 0.5, "xtc_threshold": 0.01}


@pytest.mark.parametrize("asked", [PLAIN, FILTERED, EXCLUDING], ids=["plain", "filtered", "excluding"])
def test_a_seed_draws_what_mlx_lm_draws_whatever_others_draw_between(asked: dict[str, Any]) -> None:
    for seed in range(10):
        logits = [mx.random.normal((1, 300), key=mx.random.key(1000 + i)) for i in range(12)]
        options = {name: value for name, value in asked.items() if name != "temperature"}
        theirs = make_sampler(asked["temperature"], **options, xtc_special_tokens=[5, 6])
        mx.random.seed(seed)
        expected = [theirs(each).item() for each in logits]
        ours = SeededSampler(SimpleNamespace(**asked), seed, [5, 6])
        drawn = []
        for each in logits:
            drawn.append(ours(each).item())
            mx.eval(mx.random.uniform(shape=(3,)))
        assert drawn == expected
