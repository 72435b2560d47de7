"""Admission: what fits the model's window and the memory, decided from figures before MLX is touched.

On Metal running out of memory aborts the process and cannot be caught, so it must not come to that. Memory holds
weights, the K/V of what runs, and live caches; live caches go as soon as what runs needs their place.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvnet.engine.mlx.caches import HEADROOM_TOKENS
from kvnet.engine.mlx.state_cost import StateCost
from kvnet.errors import BusyError, CrowdedError, OverBudgetError, WindowError

WAIT_S = 60.0
"""How long a request waits for memory that others hold, counted from its arrival."""

LIVE_SHARE = 4
"""Live caches get one part in so many of what the weights leave, unless a setting says otherwise."""


class Shelved(Protocol):
    """Live caches, as far as their memory goes."""

    lock: threading.RLock
    cap_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        ...

    def reclaim(self, size_bytes: int) -> int:
        """Drops some until so many bytes are free; how many that freed."""
        ...


class Budget:
    """Memory for weights and K/V, shared by everything that runs; other models may have part of it, see ``limit``.

    Args:
        weights_size_bytes: always in use.
        cost: of a sequence's K/V and other state.
        window_tokens: the model's window; 0 when unknown.
        limit_bytes: for weights and K/V together.
        live: what gives way to running requests; ``None`` when nothing is kept.
        live_bytes: most that live caches get; ``None`` for one part in ``LIVE_SHARE`` of what the weights leave.
        wait_s: longest wait for memory.
    """

    def __init__(
        self,
        *,
        weights_size_bytes: int,
        cost: StateCost,
        window_tokens: int,
        limit_bytes: int,
        live: Shelved | None = None,
        live_bytes: int | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self._weights = weights_size_bytes
        self._cost = cost
        self._window = window_tokens
        self._most = limit_bytes
        self._limit = limit_bytes
        self._live = live
        self._live_bytes_asked = live_bytes
        self._wait_s = wait_s
        self._running: list[int] = []
        # One lock for both, so that a finished request's memory becomes a live cache's in one step.
        self.lock = live.lock if live is not None else threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._cap_live()

    def limit(self, limit_bytes: int) -> int:
        """See ``Engine.limit_memory``."""
        with self._changed:
            self._limit = min(max(limit_bytes, self._weights), self._most)
            self._cap_live()
            if self._live is not None:
                over = self._live_bytes() - min(self.live_room_bytes(), self._live.cap_bytes)
                if over > 0:
                    self._live.reclaim(over)
            self._changed.notify_all()
            # Live caches that are being read stay until they were.
            return max(self._limit, self._running_bytes() + self._live_bytes())

    def _cap_live(self) -> None:
        if self._live is not None:
            asked = self._live_bytes_asked
            self._live.cap_bytes = default_live_bytes(self._limit, self._weights) if asked is None else asked

    def check(self, n_tokens: int, max_tokens: int = 0) -> None:
        """Refuses what could never run, even alone.

        Raises:
            WindowError: more tokens than the model's window.
            OverBudgetError: more memory than there is.
            CrowdedError: more memory than other models leave; all with the figures.
        """
        total = n_tokens + max_tokens
        if self._window and total > self._window:
            raise WindowError(
                f"the model's window is {self._window:,} tokens; the prompt has {n_tokens:,}"
                + (f" and {max_tokens:,} may be generated" if max_tokens else ""),
                hint="shorten the prompt" + (" or lower --max-tokens" if max_tokens else ""),
            )
        needed = self._needed([total])
        if needed > self._most:
            raise OverBudgetError(
                f"{total:,} tokens need {needed:,} bytes ({self._weights:,} of them for the "
                f"weights); the memory budget is {self._most:,} bytes",
                hint="shorten the prompt, or use a smaller model",
            )
        if needed > self._limit:
            raise self._crowded(total)

    def acquire(
        self,
        total_tokens: int,
        cancelled: Callable[[], bool],
        *,
        since_s: float | None = None,
        movable_bytes: int = 0,
        give_way: Callable[[], None] = lambda: None,
    ) -> bool:
        """Waits until ``total_tokens`` fit beside what runs; returns whether they were taken (not when cancelled).

        Args:
            total_tokens: prompt and answer together.
            cancelled: whether the request still matters.
            since_s: monotonic time the wait counts from; now by default.
            movable_bytes: of the live caches, how much the request itself can take over.
            give_way: called before a wait: drops work that can be done again later.

        Raises:
            BusyError: others held the memory for too long; with the figures.
            CrowdedError: other models got the memory meanwhile.
        """
        deadline_s = (time.monotonic() if since_s is None else since_s) + self._wait_s
        with self._changed:
            while not self._fits(total_tokens, movable_bytes):
                if cancelled():
                    return False
                if self._limit < self._needed([total_tokens]) <= self._most:
                    raise self._crowded(total_tokens)
                give_way()
                if self._fits(total_tokens, movable_bytes) or not self._running:
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._busy(total_tokens)
                self._changed.wait(left_s)
            self._running.append(total_tokens)
            return True

    def acquire_spare(self, total_tokens: int) -> bool:
        """Takes memory that nothing else holds or waits for, live caches included; whether there was as much."""
        with self._changed:
            if self._running or self._needed([total_tokens]) + self._live_bytes() > self._limit:
                return False
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

    def live_room_bytes(self) -> int:
        """What live caches may take at the moment, all of them together."""
        with self.lock:
            return self._limit - self._running_bytes()

    def overdrawn(self) -> bool:
        """Whether running requests and live caches together are beyond the limit."""
        with self.lock:
            return self._live_bytes() > self.live_room_bytes()

    def _fits(self, total_tokens: int, movable_bytes: int) -> bool:
        running = [*self._running, total_tokens]
        if self._running and self._needed(running) > self._limit:
            return False
        over = self._needed(running) + self._live_bytes() - movable_bytes - self._limit
        if over > 0 and self._live is not None:
            over -= self._live.reclaim(over)
        return over <= 0

    def _running_bytes(self) -> int:
        return self._needed(self._running) if self._running else self._weights

    def _live_bytes(self) -> int:
        return self._live.size_bytes if self._live is not None else 0

    def _crowded(self, total_tokens: int) -> CrowdedError:
        return CrowdedError(
            f"{total_tokens:,} tokens need {self._needed([total_tokens]):,} bytes with the weights; other models in "
            f"memory leave {self._limit:,} of {self._most:,}",
            hint="try again: models that nobody uses are taken out of memory for this",
        )

    def _busy(self, total_tokens: int) -> BusyError:
        return BusyError(
            f"no memory for {total_tokens:,} tokens within {self._wait_s:.0f} s: {len(self._running)} requests with "
            f"{sum(self._running):,} tokens run, and together they would need "
            f"{self._needed([*self._running, total_tokens]):,} bytes of {self._limit:,}",
            hint="try again later, or send fewer requests at once",
        )

    def _needed(self, totals: list[int]) -> int:
        # A batch pads every row to the longest, and copies all rows when one joins.
        longest = max(totals) + HEADROOM_TOKENS
        n_sequences = 1 if len(totals) == 1 else 2 * len(totals)
        return self._weights + n_sequences * self._cost.bytes_for(longest)


def default_live_bytes(limit_bytes: int, weights_size_bytes: int) -> int:
    """Bytes for live caches when no setting says otherwise."""
    return max(0, limit_bytes - weights_size_bytes) // LIVE_SHARE
