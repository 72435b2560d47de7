"""Chunks that are late: which one an idle peer takes over, and whether as a second copy or in place of the first.

A second copy costs bytes, so there is a budget for them. Beyond it the slow peer is let go: that costs at most the part
of a chunk that it has sent.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvnet.protocol.fetch_peer import FetchPeer, ServiceTimes

HEDGE_GAIN = 2.0
"""A second copy is asked for only where it is expected this many times sooner than the first."""

TAKE_OVER_GAIN = 4.0
"""Beyond the budget for second copies, a peer is let go when another is this many times as soon done."""

LOOK_AGAIN_S = 0.25
"""How often late chunks are looked at, when the first look did not move them."""


@dataclass(frozen=True, slots=True)
class AskTwice:
    """The idle peer is to be asked for this chunk too."""

    index: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """This peer is to be let go; its chunks are asked for anew."""

    holder: FetchPeer


class LateChunks:
    """Decides what becomes of late chunks.

    Args:
        missing: the chunks that are not verified yet, as they are at any time.
        budget_bytes: what may be asked for twice.
    """

    def __init__(self, missing: Collection[int], budget_bytes: int) -> None:
        self._missing = missing
        self._budget_bytes = budget_bytes
        self._asked_twice: set[int] = set()
        self._looked_s = float("-inf")
        self.service = ServiceTimes()

    def returned(self, index: int) -> None:
        """A chunk is asked of nobody any more."""
        self._asked_twice.discard(index)

    def next_look_s(self, holders: Iterable[FetchPeer]) -> float | None:
        """When the next chunk is late, while somebody is idle; None when none will be.

        Args:
            holders: the peers that are asked for something and read from.
        """
        late_s = self.service.late_s
        if late_s is None:
            return None
        asked = [one.asked_s for each in holders for index, one in each.outstanding.items() if self._single(index)]
        return max(min(asked) + late_s, self._looked_s + LOOK_AGAIN_S) if asked else None

    def look(self, idle: FetchPeer, holders: Iterable[FetchPeer], now: float) -> AskTwice | LetGo | None:
        """A peer has nothing to do: it takes what is expected last, where that is late and it is much sooner itself.

        Args:
            idle: the peer.
            holders: those that are asked for something; while one is not read from, what it sends is late through us.
            now: the time.
        """
        self._looked_s = now
        late_s = self.service.late_s
        if late_s is None:
            return None
        rate = idle.rate.bytes_s(now) if idle.rate.known else 0.0
        found: tuple[float, int, FetchPeer] | None = None
        for holder in holders:
            for index, left_s in holder.left_s(now):
                due = now - holder.outstanding[index].asked_s >= late_s
                if due and self._single(index) and not idle.lacks(index) and (found is None or left_s > found[0]):
                    found = (left_s, index, holder)
        if found is None:
            return None
        left_s, index, holder = found
        length = holder.outstanding[index].length_bytes
        own_s = idle.seconds_for(length, rate) if rate else late_s
        if left_s >= HEDGE_GAIN * own_s and length <= self._budget_bytes:
            self._budget_bytes -= length
            self._asked_twice.add(index)
            return AskTwice(index)
        return LetGo(holder) if left_s >= TAKE_OVER_GAIN * own_s else None

    def _single(self, index: int) -> bool:
        """Whether a chunk that is asked for is missing and asked of one peer only."""
        return index in self._missing and index not in self._asked_twice
