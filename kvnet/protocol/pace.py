"""Shares of a limited rate: who may have how many bytes a second of it, decided byte by byte. Pure.

Every peer with a purpose is a flow. The flows that are under way share the rate by the weights of their purposes, so
that somebody who waits for an answer is not held up by a copy for later, and no peer gets more by asking more; what
nobody uses is shared among the rest. Shares in the manner of generalised processor sharing, each flow kept to its own
by the generic cell rate algorithm (ITU-T I.371): a time until which it has been served, which may lag behind by a
little.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvnet.protocol.ids import PeerId


class Purpose(StrEnum):
    """What chunks are wanted for; stands in chunk requests. A peer treats one it does not know like the last."""

    INTERACTIVE = "interactive"
    """Somebody waits for an answer that needs them."""
    REPLICATION = "replication"
    """A copy, asked for by name or made in advance."""
    SCRUB = "scrub"
    """In place of chunks that went bad: it has time."""


WEIGHTS: Final[Mapping[Purpose, float]] = {Purpose.INTERACTIVE: 16.0, Purpose.REPLICATION: 4.0, Purpose.SCRUB: 1.0}
"""Their shares, while they compete."""

BURST_S: Final = 0.25
"""Seconds of its share that a flow may be ahead."""

UNDER_WAY_S: Final = 1.0
"""A flow counts as under way for so long after its last byte was due."""


def purpose_of(word: str) -> Purpose:
    """The purpose a peer names; the least pressing one when it is not known."""
    return next((purpose for purpose in Purpose if purpose.value == word), Purpose.SCRUB)


@dataclass(slots=True)
class _Flow:
    weight: float
    until_s: float


class Pace:
    """Spreads bytes over time.

    Args:
        rate_bytes_s: of all flows together; 0 for no limit.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._flows: dict[tuple[PeerId, Purpose], _Flow] = {}

    @property
    def limited(self) -> bool:
        """Whether `spread_s` ever says anything but 0."""
        return self._rate_bytes_s > 0

    @property
    def n_flows(self) -> int:
        """Flows remembered."""
        return len(self._flows)

    def spread_s(self, peer: PeerId, purpose: Purpose, n_bytes: int, now: float) -> float:
        """Seconds over which so many bytes are to be spread, beginning now; they count as moved.

        Args:
            peer: to or from whom.
            purpose: what for.
            n_bytes: how many.
            now: the time in seconds of any clock that does not go backwards.
        """
        if not self.limited:
            return 0.0
        self._flows = {key: flow for key, flow in self._flows.items() if flow.until_s + UNDER_WAY_S > now}
        flow = self._flows.setdefault((peer, purpose), _Flow(WEIGHTS[purpose], now - BURST_S))
        share = self._rate_bytes_s * flow.weight / sum(each.weight for each in self._flows.values())
        flow.until_s = max(flow.until_s, now - BURST_S) + n_bytes / share
        return max(0.0, flow.until_s - now)
