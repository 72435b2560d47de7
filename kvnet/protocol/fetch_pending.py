"""The chunks that nobody is asked for, in the order in which they are wanted."""

import heapq
from collections.abc import Callable, Iterable, Mapping

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
        salt: varies the order among equally rare chunks, so that nodes that replicate at once begin at different ones.
    """

    def __init__(
        self, indices: Iterable[int], order: ChunkOrder, peers: Mapping[PeerId, FetchPeer], *, salt: int = 0
    ) -> None:
        self._order = order
        self._peers = peers
        self._salt = salt
        self._heap = [(self._rank(index), index) for index in indices]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def wanted_of(self, peer: FetchPeer) -> bool:
        """Whether a peer may have one of them."""
        return any(not peer.lacks(index) for _, index in self._heap)

    def push(self, index: int) -> None:
        """A chunk is to be asked for."""
        heapq.heappush(self._heap, (self._rank(index), index))

    def reorder(self) -> None:
        """What the providers hold has changed."""
        self._heap = [(self._rank(index), index) for _, index in self._heap]
        heapq.heapify(self._heap)

    def take(self, peer: FetchPeer, at_most: int, fits: Fits) -> list[int]:
        """Take out what a peer is to be asked for next.

        Args:
            peer: chunks that it lacks are passed over.
            at_most: chunks.
            fits: called with each chunk in turn; counts it as asked for, or ends the list.
        """
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

    def _rank(self, index: int) -> Rank:
        if self._order is ChunkOrder.FRONT_FIRST:
            return (0, index)
        holders = sum(1 for peer in self._peers.values() if not peer.given_up and not peer.lacks(index))
        # Knuth's multiplicative hash: neighbours end up far apart, and elsewhere for every salt.
        return (holders, (index + self._salt) * 2654435761 % 2**32)
