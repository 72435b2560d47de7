"""What time a peer has: a word among the capabilities of its ``hello``, ``clock/SECONDS`` since 1970.

Nothing is decided by it. Statements expire by wall clocks, so a person is told when two of them are far apart.
"""

from collections.abc import Iterable

CLOCK_PREFIX = "clock/"
"""What the word begins with."""
MAX_DIGITS = 12
"""Of the seconds: 30,000 years. A longer word is passed over."""

TOLERABLE_SKEW_S = 60
"""Clocks that are nearer than this trouble nothing: what expires lasts for longer."""


def clock_word(now_s: float) -> str:
    """The capability that says it is `now_s` seconds since 1970."""
    return f"{CLOCK_PREFIX}{max(0, int(now_s))}"


def clock_of(capabilities: Iterable[str]) -> int | None:
    """Seconds since 1970 as a peer says; None when it does not."""
    for word in capabilities:
        digits = word.removeprefix(CLOCK_PREFIX)
        if word != digits and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
            return int(digits)
    return None
