"""What generated requests are drawn from: times of a day, popularity, sizes."""

from typing import Final

import numpy as np

from simulations.workload.requests import Floats, Ints

DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0

WORKING_DAY: Final = (
    0.2, 0.1, 0.1, 0.1, 0.1, 0.2, 0.5, 2.0, 5.0, 9.0, 10.0, 9.5,
    6.0, 7.0, 9.5, 9.5, 9.0, 7.0, 4.0, 2.5, 2.0, 1.5, 0.8, 0.4,
)  # fmt: skip
"""How much is asked in each hour of a working day, by weight. An assumption: most from nine to six, less at noon."""
MORNING_S: Final = 8 * HOUR_S
EVENING_S: Final = 19 * HOUR_S
"""Working hours, as laptops know them."""


def times(rng: np.random.Generator, count: int, days: float, *, working_hours: bool) -> Floats:
    """So many times over some days, in no order, in seconds from the first midnight.

    Args:
        rng: what they are drawn with.
        count: how many.
        days: over how many; a part of a day is one from its midnight on.
        working_hours: most of them in working hours; otherwise evenly.
    """
    if not working_hours:
        return rng.random(count) * days * DAY_S
    n_hours = max(1, round(days * 24))
    weights = np.array(WORKING_DAY)[np.arange(n_hours) % 24]
    hours: Floats = rng.choice(n_hours, size=count, p=weights / weights.sum()).astype(np.float64)
    # A part of an hour more or less is spread over all of them.
    hour_s: float = HOUR_S * days * 24 / n_hours
    return np.multiply(hours + rng.random(count), hour_s)


def zipf(rng: np.random.Generator, n_things: int, exponent: float, count: int) -> Ints:
    """Which of some things, so many times: the k-th with a weight of k to the power of minus `exponent`."""
    weights = np.arange(1, n_things + 1, dtype=np.float64) ** -exponent
    chosen = np.searchsorted(np.cumsum(weights), rng.random(count) * weights.sum(), side="right")
    within: Ints = np.minimum(chosen, n_things - 1).astype(np.int64)
    return within


def sizes(rng: np.random.Generator, mean: float, spread: float, count: int) -> Ints:
    """Log-normal numbers of tokens of a mean, at least 1 each; `spread` is the deviation of their logarithms."""
    drawn = np.exp(rng.normal(np.log(max(mean, 1)) - spread**2 / 2, spread, count))
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
