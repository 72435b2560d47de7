"""Bulk connections at rest: kept for the next fetch from the same peer, for a while."""

from dataclasses import dataclass
from typing import Final

import trio

from kvnet.network.bulk.receiving import Receiver
from kvnet.protocol.ids import PeerId

WARM_S: Final = 60.0
"""Seconds an unused connection is kept; shorter than the answering side's patience."""

TAKEN_BACK_S: Final = 2.0
"""Seconds in which what a fetch left unanswered must be through, for the connection to be kept."""


@dataclass(slots=True)
class _Warm:
    receiver: Receiver
    since_s: float


class WarmConnections:
    """Those of one node.

    Attributes:
        discarded_bytes: of chunks that came after a fetch had taken them back.
    """

    def __init__(self) -> None:
        self._kept: dict[PeerId, list[_Warm]] = {}
        self.discarded_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, peer: PeerId) -> Receiver | None:
        """A connection to a peer, to be kept again after use; ``None``: there is none."""
        kept = self._kept.get(peer, [])
        while kept:
            receiver = kept.pop().receiver
            if receiver.usable:
                return receiver
            receiver.stop()
        return None

    def keep(self, peer: PeerId, receiver: Receiver) -> None:
        """Keep a connection that is usable."""
        receiver.rest()
        self._kept.setdefault(peer, []).append(_Warm(receiver, trio.current_time()))

    async def keep_when_through(self, peer: PeerId, receiver: Receiver) -> None:
        """Nobody wants what was asked for any more: keep the connection if it is soon free of it, or end it."""
        before_bytes = receiver.discarded_bytes
        with trio.move_on_after(TAKEN_BACK_S):
            await receiver.cancel()
        self.discarded_bytes += receiver.discarded_bytes - before_bytes
        if receiver.usable:
            self.keep(peer, receiver)
        else:
            receiver.stop()

    def sweep(self, now_s: float) -> None:
        """End those that were not used for too long."""
        for peer, kept in list(self._kept.items()):
            for old in [each for each in kept if each.since_s + WARM_S <= now_s]:
                kept.remove(old)
                old.receiver.stop()
            if not kept:
                del self._kept[peer]
