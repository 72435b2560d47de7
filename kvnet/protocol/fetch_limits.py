"""How a fetch goes about it: which chunk comes next, how much is asked for, how long is waited."""

from dataclasses import dataclass, replace
from enum import StrEnum

from kvnet.protocol.pace import Purpose

PATIENCE_S = 30.0
"""How long a copy that nobody waits for goes on with nobody left to ask: a peer that restarts, changes its network or
is busy is back by then. About as long as a single provider that says nothing is tried in any case."""


class ChunkOrder(StrEnum):
    """Which missing chunk is asked for next."""

    FRONT_FIRST = "front_first"
    """The lowest index: somebody waits, and the beginning of a prefix is of use by itself."""
    RAREST_FIRST = "rarest_first"
    """What the fewest providers hold, so that a chunk does not vanish with its last holder: nobody waits. Equally rare
    ones come from the front all the same."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Patience and appetite.

    Attributes:
        idle_s: seconds without a byte from a peer, while chunks are asked for, when nobody else could be asked.
        idle_with_others_s: the same when somebody else could be.
        min_rate_bytes_s: the least rate, over each `rate_window_s`, while somebody who was not slow could be asked.
        floor_bytes_s: the least rate of anybody: a peer may be told to send slowly, and is then better than none.
        least_share: the least rate as a share of the fastest other peer's.
        rate_window_s: seconds.
        attempts: how often one peer is tried before it is given up, without a chunk that came of it; being slow counts
            whatever came.
        retry_s: seconds before a peer that failed is tried again; doubled each time.
        patience_s: seconds since the last chunk in which a fetch with nobody left to ask goes on: providers that were
            gone, busy, silent or slow are tried every `patient_retry_s`, and others may turn up; 0: it ends.
        patient_retry_s: seconds.
        max_providers: remembered in one fetch; whoever turns up beyond them is not asked.
        active_peers: peers asked at the same time.
        trials: peers asked beyond these, one after the other, to find out how fast they are; then the slowest goes.
        start_chunks: chunks asked for at once before a peer has delivered anything; one when it failed before.
        window_s: seconds of a peer's measured rate that are kept asked for.
        max_window_bytes: bytes asked for and not yet received, a peer; what a stream must be able to buffer.
        duplicate_share: bytes that may be asked for twice, as a share of all that are needed.
        order: which chunk comes next.
    """

    idle_s: float = 10.0
    idle_with_others_s: float = 2.0
    min_rate_bytes_s: float = 16 * 1024
    floor_bytes_s: float = 256.0
    least_share: float = 0.01
    rate_window_s: float = 8.0
    attempts: int = 3
    retry_s: float = 1.0
    patience_s: float = 0.0
    patient_retry_s: float = 5.0
    max_providers: int = 256
    active_peers: int = 4
    trials: int = 1
    start_chunks: int = 2
    window_s: float = 2.0
    max_window_bytes: int = 16 * 1024 * 1024
    duplicate_share: float = 0.05
    order: ChunkOrder = ChunkOrder.FRONT_FIRST


def limits_for(purpose: Purpose, limits: FetchLimits | None = None) -> FetchLimits:
    """Patience and order by what chunks are wanted for.

    Where somebody waits, chunks come from the front, and what is late is computed. Copies and repairs begin with what
    is rarest; a copy waits for peers, a repair is tried again another day.

    Args:
        purpose: what for.
        limits: of the node; the rest of them holds.
    """
    limits = limits or FetchLimits()
    if purpose is Purpose.INTERACTIVE:
        return limits
    patience_s = PATIENCE_S if purpose is Purpose.REPLICATION else 0.0
    return replace(limits, order=ChunkOrder.RAREST_FIRST, patience_s=patience_s)
