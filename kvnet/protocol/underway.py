"""A fetch that has begun: whether to go on, as its rate changes.

What has been fetched is paid for, so only what is still to come counts on both sides.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.cost import Offer
from kvnet.protocol.speeds import Machine


@dataclass(frozen=True, slots=True)
class Underway:
    """A fetch that has begun.

    Attributes:
        offer: what is fetched; `block_bytes` as they were at the beginning.
        wanted_tokens: up to where.
        arrived_tokens: how many tokens, from the start, are here without a gap.
        arrived_bytes: stored bytes that are here.
        rate_bytes_s: what arrives of late, from all peers; 0 when nothing does.
    """

    offer: Offer
    wanted_tokens: int
    arrived_tokens: int
    arrived_bytes: int
    rate_bytes_s: float


def worth_going_on(machine: Machine, n_prompt: int, underway: Underway) -> bool:
    """Whether to fetch on, up to some later token, is sooner done than to compute from `arrived_tokens` now.

    Asked after every chunk, and as a rule answered by the last block alone.

    Args:
        machine: how fast this one computes and restores.
        n_prompt: tokens of the prompt.
        underway: the fetch, as it stands.
    """
    offer, arrived = underway.offer, underway.arrived_tokens
    sums = list(accumulate(offer.block_bytes, initial=offer.head_bytes))
    stop_s = _rest_s(machine, n_prompt, underway, arrived, 0)
    for n_blocks in range(len(offer.block_bytes), arrived // BLOCK_TOKENS, -1):
        n_tokens = min(underway.wanted_tokens, n_blocks * BLOCK_TOKENS)
        left_bytes = max(0, sums[n_blocks] - underway.arrived_bytes)
        if n_tokens > arrived and _rest_s(machine, n_prompt, underway, n_tokens, left_bytes) < stop_s:
            return True
    return False


def _rest_s(machine: Machine, n_prompt: int, underway: Underway, n_tokens: int, left_bytes: int) -> float:
    raw_bytes = n_tokens * underway.offer.raw_bytes_per_token
    if not left_bytes:
        arriving_s = 0.0
    else:
        arriving_s = left_bytes / underway.rate_bytes_s if underway.rate_bytes_s > 0 else math.inf
    return arriving_s + machine.restore_s(raw_bytes) + machine.prefill.seconds(n_tokens, n_prompt)
