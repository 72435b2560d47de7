"""A seed has a random stream of its own, and it is mlx-lm's."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvnet.engine.mlx import runtime

runtime.import_mlx_lm()

import mlx.core as mx  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from kvnet.engine.mlx import sampling  # noqa: E402

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
        ours = sampling.SeededSampler(SimpleNamespace(**asked), seed, [5, 6])
        drawn = []
        for each in logits:
            drawn.append(ours(each).item())
            mx.eval(mx.random.uniform(shape=(3,)))
        assert drawn == expected


def test_a_sampler_that_fails_leaves_the_random_state_to_others() -> None:
    tokenizer = SimpleNamespace(encode=lambda _: [5], eos_token_ids=[2])

    def sampler(**asked: Any) -> Any:
        return sampling.make_sampler(
            SimpleNamespace(sampling=SimpleNamespace(**{**PLAIN, **asked}), seed=None), tokenizer
        )

    logits = mx.random.normal((1, 300), key=mx.random.key(1))
    with pytest.raises(ValueError, match="top_k"):
        sampler(top_k=0.5)(logits)
    assert 0 <= sampler()(logits).item() < 300
