"""Admission: what fits the model's window and the memory, decided from figures before MLX is touched.

On Metal running out of memory aborts the process and cannot be caught, so it must not come to that.
"""

import threading
from collections.abc import Callable

from kvnet.engine.mlx.caches import HEADROOM_TOKENS
from kvnet.errors import OverBudgetError


class Budget:
    """Memory for weights and K/V, shared by everything that runs.

    Args:
        weights_size_bytes: always in use.
        kv_bytes_per_token: over all layers; 0 when unknown, then only the window counts.
        window_tokens: the model's window; 0 when unknown.
        limit_bytes: for weights and K/V together.
    """

    def __init__(
        self, *, weights_size_bytes: int, kv_bytes_per_token: int, window_tokens: int, limit_bytes: int
    ) -> None:
        self._weights = weights_size_bytes
        self._per_token = kv_bytes_per_token
        self._window = window_tokens
        self._limit = limit_bytes
        self._running: list[int] = []
        self._changed = threading.Condition()

    def check(self, n_tokens: int, max_tokens: int = 0) -> None:
        """Refuses what could never run, even alone.

        Raises:
            OverBudgetError: with the figures.
        """
        total = n_tokens + max_tokens
        if self._window and total > self._window:
            raise OverBudgetError(
                f"the model's window is {self._window:,} tokens; the prompt has {n_tokens:,}"
                + (f" and {max_tokens:,} may be generated" if max_tokens else ""),
                hint="shorten the prompt" + (" or lower --max-tokens" if max_tokens else ""),
            )
        needed = self._needed([total])
        if needed > self._limit:
            raise OverBudgetError(
                f"{total:,} tokens need {needed:,} bytes ({self._weights:,} for the weights and {self._per_token:,} a "
                f"token); the memory budget is {self._limit:,} bytes",
                hint="shorten the prompt, or use a smaller model",
            )

    def acquire(self, total_tokens: int, cancelled: Callable[[], bool]) -> bool:
        """Waits until ``total_tokens`` fit beside what runs; returns whether they were taken (not when cancelled)."""
        with self._changed:
            while self._running and self._needed([*self._running, total_tokens]) > self._limit:
                if cancelled():
                    return False
                self._changed.wait()
            self._running.append(total_tokens)
            return True

    def release(self, total_tokens: int) -> None:
        """Gives back what ``acquire`` took."""
        with self._changed:
            self._running.remove(total_tokens)
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets waiting requests look whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()

    def _needed(self, totals: list[int]) -> int:
        # A batch pads every row to the longest, and copies all rows when one joins.
        longest = max(totals) + HEADROOM_TOKENS
        rows = longest if len(totals) == 1 else 2 * len(totals) * longest
        return self._weights + rows * self._per_token
