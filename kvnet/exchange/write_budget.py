"""How much a node may write to its disk of its own accord, in a day.

Most K/V is never used again, and flash wears out by being written. So what a node keeps without being told to comes
out of a bucket that holds one day's bytes and fills steadily. Nothing somebody waits for is ever refused: what a
prompt fetches is taken from the bucket, into debt if need be, and what the owner asked for by name is counted only.

Pure: the clock comes in as an argument, and where the state is kept is the caller's business.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

DAY_S: Final = 24 * 3600.0


class Writing(StrEnum):
    """Why something was written."""

    KEPT = "kept"
    """Of the node's own accord: from the bucket, and only when it holds enough."""
    FETCHED = "fetched"
    """For a prompt, or in the place of what went bad unnoticed: from the bucket, whatever it holds."""
    NAMED = "named"
    """Asked for by its owner: not from the bucket."""


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What outlives a restart.

    Attributes:
        left_bytes: in the bucket at ``as_of_s``; below 0 after more was fetched than it held.
        as_of_s: seconds since 1970.
        day: days since 1970 of the figures below.
        kept_bytes: written on that day of the node's own accord,
        fetched_bytes: for prompts and repairs,
        named_bytes: and at its owner's wish.
    """

    left_bytes: float
    as_of_s: float
    day: int = 0
    kept_bytes: int = 0
    fetched_bytes: int = 0
    named_bytes: int = 0


class WriteBudget:
    """A bucket of bytes that fills steadily to what may be written in a day.

    Args:
        day_bytes: what may be written in a day, which is also the most the bucket holds; 0 for nothing at all.
        state: from the last run; a bucket without one begins full.
        now_s: seconds since 1970.
        save: told the new state after every change.
    """

    def __init__(
        self,
        day_bytes: int,
        now_s: float,
        *,
        state: BudgetState | None = None,
        save: Callable[[BudgetState], None] = lambda _state: None,
    ) -> None:
        self.day_bytes = day_bytes
        self._save = save
        self._state = self._refilled(state or BudgetState(float(day_bytes), now_s), now_s)

    def state(self, now_s: float) -> BudgetState:
        """How it stands."""
        self._state = self._refilled(self._state, now_s)
        return self._state

    def left_bytes(self, now_s: float) -> int:
        """What may still be written of the node's own accord; at least 0."""
        return max(0, int(self.state(now_s).left_bytes))

    def spend(self, n_bytes: int, writing: Writing, now_s: float) -> None:
        """So many bytes were written."""
        if n_bytes <= 0:
            return
        state = self.state(now_s)
        if writing is Writing.NAMED:
            state = replace(state, named_bytes=state.named_bytes + n_bytes)
        else:
            left_bytes = max(-float(self.day_bytes), state.left_bytes - n_bytes)
            if writing is Writing.KEPT:
                state = replace(state, left_bytes=left_bytes, kept_bytes=state.kept_bytes + n_bytes)
            else:
                state = replace(state, left_bytes=left_bytes, fetched_bytes=state.fetched_bytes + n_bytes)
        self._state = state
        self._save(state)

    def _refilled(self, state: BudgetState, now_s: float) -> BudgetState:
        """A clock that jumped forward fills the bucket once, at most; one that jumped back fills and takes nothing."""
        elapsed_s = max(0.0, now_s - state.as_of_s)
        left_bytes = state.left_bytes + elapsed_s * self.day_bytes / DAY_S
        left_bytes = min(float(self.day_bytes), max(-float(self.day_bytes), left_bytes))
        day = int(now_s // DAY_S)
        if day != state.day:
            return BudgetState(left_bytes, now_s, day)
        return BudgetState(left_bytes, now_s, day, state.kept_bytes, state.fetched_bytes, state.named_bytes)
