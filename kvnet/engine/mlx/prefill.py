"""The prefill loop: tokens into a cache, in steps that end at absolute multiples of the step.

mlx-lm's own loop ends with a step of one token and counts steps from wherever it starts. Here a run that continues from
restored state takes the same steps as one that never stopped, apart from the one at the cut.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvnet.engine.mlx.caches import evaluate

BetweenSteps = Callable[[int], None]
"""Called after each step with the number of tokens in the cache; may raise to stop."""


def step_ends(start: int, end: int, step: int, stops: Sequence[int] = ()) -> list[int]:
    """Where the steps from ``start`` to ``end`` end: multiples of ``step``, ``stops`` in between, and ``end``."""
    multiples = range((start // step + 1) * step, end, step)
    wanted = {*multiples, *(stop for stop in stops if start < stop < end), end}
    return sorted(wanted) if end > start else []


def prefill(
    model: Any,
    caches: Sequence[Any],
    tokens: Sequence[int],
    *,
    start: int,
    ends: Sequence[int],
    between: BetweenSteps,
) -> None:
    """Feeds ``tokens[start:ends[-1]]``; the caches hold the first ``start`` tokens already.

    Only K/V is evaluated: the logits of a prefill step are never computed.
    """
    position = start
    for end in ends:
        model(mx.array([list(tokens[position:end])]), cache=caches)
        evaluate(caches)
        mx.clear_cache()
        position = end
        between(position)


def last_logits(model: Any, caches: Sequence[Any], tokens: Sequence[int]) -> mx.array:
    """Feeds ``tokens`` in one step and returns the logits after the last, float32 (vocabulary,), evaluated."""
    logits = model(mx.array([list(tokens)]), cache=caches)[0, -1, :].astype(mx.float32)
    mx.eval(logits)
    return logits
