"""A fetch against computing the same here: as long as it can win, it goes on."""

import trio

from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetch_pack import ProgressCallback

GRACE_S = 0.5
"""Seconds before a fetch is judged by its rate; what giving one up costs at most, beside the lookup."""


class Race:
    """A fetch against local prefill: given up as soon as it cannot win any more.

    Args:
        prefill_s: estimated seconds of the prefill that the fetch would spare.
        chunk_bytes: of the largest chunk: nothing is heard of a chunk before all of it is here.
        progress: told of a fetch of one's own.
    """

    def __init__(self, prefill_s: float, chunk_bytes: int, progress: ProgressCallback | None) -> None:
        self._prefill_s = prefill_s
        self._progress = progress
        self._started_s = trio.current_time()
        self._chunk_bytes = chunk_bytes
        self._total_bytes = 0
        self._last_done_bytes = 0
        self._arrived_bytes = 0
        self._scope = trio.CancelScope()

    def begin(self, total_bytes: int) -> None:
        """Wait for the first chunk."""
        self._wait_for_next(0, total_bytes)

    def scope(self) -> trio.CancelScope:
        """A new scope that ends when the fetch cannot win any more."""
        self._scope = trio.CancelScope(deadline=self._scope.deadline)
        return self._scope

    def _wait_for_next(self, done_bytes: int, total_bytes: int) -> None:
        """Wait no longer than what will have arrived with the next chunk spares.

        However a peer spreads its bytes, fetching and then computing the rest takes little longer than computing all.
        """
        share = min(1.0, (done_bytes + self._chunk_bytes) / max(1, total_bytes))
        self._scope.deadline = self._started_s + GRACE_S + self._prefill_s * share

    def judge(self, event: FetchProgress) -> None:
        """Judge by the rate so far; called after every chunk, of another prompt's fetch too.

        A fetch that was taken over counts only what was still missing; what had come before is here all the same.
        """
        elapsed_s = trio.current_time() - self._started_s
        step = event.done_bytes - self._last_done_bytes
        self._arrived_bytes += step if 0 < step <= self._chunk_bytes else min(event.done_bytes, self._chunk_bytes)
        self._last_done_bytes = event.done_bytes
        self._total_bytes = max(self._total_bytes, event.total_bytes)
        left_bytes = event.total_bytes - event.done_bytes
        left_s = elapsed_s * left_bytes / max(1, self._arrived_bytes)
        if elapsed_s >= GRACE_S and left_s > self._prefill_s:
            self._scope.cancel()
        self._wait_for_next(self._total_bytes - left_bytes, self._total_bytes)

    async def watch(self, event: FetchProgress) -> None:
        """Judge a fetch of this prompt's own, and tell who wants to know."""
        self.judge(event)
        if self._progress is not None:
            await self._progress(event)
