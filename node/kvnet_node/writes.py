"""What this node may write and has written today, across restarts."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from kvnet.exchange.write_budget import BudgetState, WriteBudget, Writing
from kvnet_node.paths import write_private

_log = structlog.get_logger(__name__)


class Writes:
    """The write budget of a data directory.

    Args:
        file: where its state is kept; a missing or broken one counts as a full bucket.
        day_bytes: what may be written in a day.
        now: seconds since 1970.

    Attributes:
        budget: the bucket.
    """

    def __init__(self, file: Path, day_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._file = file
        self._now = now
        self.budget = WriteBudget(day_bytes, now(), state=_saved(file), save=self._save)

    def fetched(self, n_bytes: int) -> None:
        """A prompt, or a repair that nobody asked for, fetched so much."""
        self.budget.spend(n_bytes, Writing.FETCHED, self._now())

    def named(self, n_bytes: int) -> None:
        """So much was added or fetched by name."""
        self.budget.spend(n_bytes, Writing.NAMED, self._now())

    def state(self) -> BudgetState:
        """How it stands now."""
        return self.budget.state(self._now())

    def _save(self, state: BudgetState) -> None:
        try:
            write_private(self._file, msgspec.json.encode(state))
        except OSError as error:
            # A full disk: what was written is then forgotten at the next start, and no request fails for it.
            _log.warning("writes not noted", reason=error.strerror)


def _saved(file: Path) -> BudgetState | None:
    try:
        state = msgspec.json.decode(file.read_bytes(), type=BudgetState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return state if math.isfinite(state.left_bytes) and math.isfinite(state.as_of_s) else None
