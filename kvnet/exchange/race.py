"""A fetch against computing the same here: as long as it can win, it goes on."""

from collections import deque

import trio

from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetch_pack import ProgressCallback
from kvnet.exchange.planning import Missing, Weigher
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.cost import Offer
from kvnet.protocol.underway import Underway, worth_going_on

GRACE_S = 0.5
"""Seconds before a fetch is judged by its rate; what giving one up costs at most, beside the lookup."""


RATE_WINDOW_S = 0.5
"""The rate is that of what arrived in this time, and of two chunks at least."""

SILENCE_FACTOR = 2.0
"""How often the time that the chunks under way spare is waited for them; beyond it, computing them is sooner."""


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


class PlannedRace(Race):
    """As ``Race``, where it is known what this machine does: the plan is made anew as the rate changes.

    What has arrived is paid for. Only what is still to come is weighed against computing it.

    Args:
        weigher: for the prompt.
        offer: what is fetched, as it was when the plan was made.
        wanted_tokens: up to where.
        missing: the chunks that are to come for it.
        n_peers: how many may send chunks at the same time.
        progress: told of a fetch of one's own.
    """

    def __init__(
        self,
        weigher: Weigher,
        offer: Offer,
        wanted_tokens: int,
        missing: Missing,
        n_peers: int,
        progress: ProgressCallback | None,
    ) -> None:
        sizes = missing.sizes()
        super().__init__(weigher.local.seconds, max(sizes.values(), default=0), progress)
        self._weigher = weigher
        self._offer = offer
        self._wanted_tokens = wanted_tokens
        self._sizes = sizes
        self._block_of = {index: block for index, (block, _) in missing.tiles.items()}
        self._left = list(offer.block_bytes)
        self._underway_bytes = self._chunk_bytes * max(1, n_peers)
        self._arrivals: deque[tuple[float, int]] = deque()
        self._since_s = self._started_s

    @property
    def arrived_tokens(self) -> int:
        """Tokens whose state is here without a gap."""
        n_blocks = next((n for n, n_bytes in enumerate(self._left) if n_bytes), len(self._left))
        return max(self._weigher.held_tokens, min(self._wanted_tokens, n_blocks * BLOCK_TOKENS))

    def begin(self, total_bytes: int) -> None:
        """Wait for the first chunk."""
        self._total_bytes = total_bytes
        self._wait(self._started_s)

    def judge(self, event: FetchProgress) -> None:
        """Take in a chunk, of another prompt's fetch too, and decide whether what is to come is worth waiting for."""
        now_s = trio.current_time()
        n_bytes = self._sizes.pop(event.index, 0)
        if not n_bytes:
            return
        if event.index in self._block_of:
            self._left[self._block_of[event.index]] -= n_bytes
        self._arrived_bytes += n_bytes
        self._arrivals.append((now_s, n_bytes))
        arrived = self.arrived_tokens
        if now_s - self._started_s >= GRACE_S and arrived < self._wanted_tokens:
            underway = Underway(self._offer, self._wanted_tokens, arrived, self._arrived_bytes, self._rate(now_s))
            if not worth_going_on(self._weigher.machine, self._weigher.n_prompt, underway):
                self._scope.cancel()
        self._wait(now_s)

    def _rate(self, now_s: float) -> float:
        while len(self._arrivals) > 2 and self._arrivals[0][0] < now_s - RATE_WINDOW_S:
            self._since_s, _ = self._arrivals.popleft()
        return sum(n_bytes for _, n_bytes in self._arrivals) / max(1e-9, now_s - self._since_s)

    def _wait(self, heard_s: float) -> None:
        """No longer than what will have arrived with the next chunks spares, and not much longer than they do alone."""
        reached = min(1.0, (self._arrived_bytes + self._underway_bytes) / max(1, self._total_bytes))
        next_share = min(1.0, self._underway_bytes / max(1, self._total_bytes))
        spared_s = max(0.0, self._weigher.local.seconds - self._weigher.rest_s(self._wanted_tokens))
        self._scope.deadline = min(
            self._started_s + GRACE_S + spared_s * reached,
            heard_s + GRACE_S + SILENCE_FACTOR * spared_s * next_share,
        )
