"""The prefill loop: tokens into a cache, in steps that end at absolute multiples of the step.

mlx-lm's own loop ends with a step of one token and counts steps from wherever it starts. Here a run that continues from
restored state takes the same steps as one that never stopped, apart from the one at the cut. A short last step takes
the last token of the prompt along.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvnet.engine.mlx.caches import evaluate
from kvnet.engine.mlx.unfilled import clear_cache

BetweenSteps = Callable[[int], None]
"""Called after each step with the number of tokens in the cache; may raise to stop."""


TAIL_TOKENS = 64
"""A last step of at most so many tokens also gives the logits; after a longer one the last token is fed by itself. One
pass over the weights is saved, and at most so many rows of logits are computed of which only the last counts."""


def step_ends(start: int, end: int, step: int, stops: Sequence[int] = ()) -> list[int]:
    """Where the steps from ``start`` to ``end`` end: multiples of ``step``, ``stops`` in between, and ``end``."""
    multiples = range((start // step + 1) * step, end, step)
    wanted = {*multiples, *(stop for stop in stops if start < stop < end), end}
    return sorted(wanted) if end > start else []


def prompt_step_ends(start: int, n_tokens: int, step: int, stops: Sequence[int] = ()) -> list[int]:
    """Where the steps of a prompt end but for the last, which reaches from there to its end and gives the logits.

    Args:
        start: tokens that are in the caches.
        n_tokens: of the whole prompt; more than ``start``.
        step: where steps end at the latest.
        stops: where they end too.
    """
    ends = step_ends(start, n_tokens - 1, step, stops)
    if ends and ends[-1] not in stops and n_tokens - (ends[-2] if len(ends) > 1 else start) <= TAIL_TOKENS:
        ends.pop()
    return ends


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
        clear_cache()
        position = end
        between(position)


def last_logits(model: Any, caches: Sequence[Any], tokens: Sequence[int]) -> mx.array:
    """Feeds ``tokens`` in one step; the logits after the last, (1, 1, vocabulary), evaluated like the caches."""
    logits = model(mx.array([list(tokens)]), cache=caches)[:, -1:, :]
    mx.eval(logits, [cache.state for cache in caches])
    return logits
