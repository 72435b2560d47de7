"""The chunks that nobody is asked for, in the order in which they are wanted."""

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from kvnet.protocol.fetch_limits import ChunkOrder
from kvnet.protocol.fetch_peer import FetchPeer
from kvnet.protocol.ids import PeerId

Rank = tuple[int, int]
"""A chunk's place in the order: smaller comes sooner."""

Fits = Callable[[int], bool]
"""Whether one more chunk may be asked for."""


class PendingChunks:
    """A heap of chunks, the next one first.

    Args:
        indices: of the chunks.
        order: which comes next.
        peers: the providers, as they are at any time.
        first: chunks that come before all others in any order.
    """

    def __init__(
        self,
        indices: Iterable[int],
        order: ChunkOrder,
        peers: Mapping[PeerId, FetchPeer],
        *,
        first: Container[int] = (),
    ) -> None:
        self._by_rarity = order is ChunkOrder.RAREST_FIRST
        self._peers = peers
        self._first = first
        self._heap: list[tuple[Rank, int]] = [((0, index), index) for index in indices]
        self._stale = True
        self._order_anew()

    def wanted_of(self, peer: FetchPeer) -> bool:
        """Whether a peer may have one of them."""
        return any(not peer.lacks(index) for _, index in self._heap)

    def push(self, index: int) -> None:
        """A chunk is to be asked for."""
        heapq.heappush(self._heap, (self._ranks([index])[0], index))

    def holders_changed(self) -> None:
        """Providers came, went, or hold something else than before: how rare a chunk is counts anew."""
        self._stale = self._by_rarity

    def take(self, peer: FetchPeer, at_most: int, fits: Fits) -> list[int]:
        """Take out what a peer is to be asked for next.

        Args:
            peer: chunks that it lacks are passed over.
            at_most: chunks.
            fits: called with each chunk in turn; counts it as asked for, or ends the list.
        """
        if self._stale:
            self._order_anew()
        chosen: list[int] = []
        passed_over: list[tuple[Rank, int]] = []
        while self._heap and len(chosen) < at_most:
            _, index = self._heap[0]
            if peer.lacks(index):
                passed_over.append(heapq.heappop(self._heap))
                continue
            if not fits(index):
                break
            heapq.heappop(self._heap)
            chosen.append(index)
        for passed in passed_over:
            heapq.heappush(self._heap, passed)
        return chosen

    def _order_anew(self) -> None:
        self._stale = False
        indices = [index for _, index in self._heap]
        self._heap = list(zip(self._ranks(indices), indices, strict=True))
        heapq.heapify(self._heap)

    def _ranks(self, indices: Sequence[int]) -> list[Rank]:
        """From the front; where rarity counts, by the number of providers that may have a chunk first of all."""
        if not self._by_rarity:
            return [(0, index) for index in indices]
        there = [peer for peer in self._peers.values() if not peer.given_up]
        # One that may have everything makes no difference between chunks.
        partial = [peer for peer in there if peer.holds is not None or peer.refused]
        return [
            (0 if index in self._first else 1 + sum(not peer.lacks(index) for peer in partial), index)
            for index in indices
        ]
