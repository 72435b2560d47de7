"""Fetch or compute: the plan with the smallest expected time to first token.

A prefix may be computed here, or fetched as far as a block's end and computed from there. What each costs follows from
what was measured: prefill speed by position, the rate of restoring, round trip and rate of the peer. Fetching wins when
the link carries more bytes per second than K/V bytes per token times prefill tokens per second.

A plan is a sequence of steps, and more kinds of steps can come: computing while blocks arrive from the back, or having
a faster machine compute. Pure arithmetic; all times are seconds, all rates bytes or tokens per second.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.ids import PeerId
from kvnet.protocol.speeds import Link, Machine

MIN_GAIN_S = 0.010
"""A fetch that would win by less is not begun: what is measured is not that exact."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A prefix that can be fetched.

    Attributes:
        link: to whoever has it.
        n_tokens: how many tokens of the prompt it covers, from the start.
        block_bytes: stored bytes to fetch for each block, in order; 0 for one that is held.
        head_bytes: stored bytes to fetch before the first block: token ids and context.
        raw_bytes_per_token: of its K/V.
    """

    link: Link
    n_tokens: int
    block_bytes: Sequence[int]
    head_bytes: int
    raw_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """Continue from the first `n_tokens` tokens of state held here or fetched before."""

    n_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchStep:
    """Fetch what is missing of the first `n_tokens` tokens: `n_bytes` stored bytes from `peer`."""

    peer: PeerId
    n_tokens: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Compute tokens `first_token` up to `end_token`."""

    first_token: int
    end_token: int
    seconds: float


Step = RestoreStep | FetchStep | PrefillStep


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do until the first token, in order, and how long it is expected to take."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Expected seconds in all."""
        return sum(step.seconds for step in self.steps)

    @property
    def fetch(self) -> FetchStep | None:
        """Its fetch, if it has one."""
        return next((step for step in self.steps if isinstance(step, FetchStep)), None)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(step.end_token - step.first_token for step in self.steps if isinstance(step, PrefillStep))


def local_plan(machine: Machine, n_prompt: int, held_tokens: int, raw_bytes_per_token: int) -> Plan:
    """Continue from what is held, or compute everything where that is sooner."""
    computed = Plan((PrefillStep(0, n_prompt, machine.prefill.seconds(0, n_prompt)),))
    if held_tokens == 0:
        return computed
    restored = Plan(
        (
            RestoreStep(held_tokens, machine.restore_s(held_tokens * raw_bytes_per_token)),
            PrefillStep(held_tokens, n_prompt, machine.prefill.seconds(held_tokens, n_prompt)),
        )
    )
    return min(computed, restored, key=lambda plan: plan.seconds)


def best_plan(machine: Machine, n_prompt: int, held_tokens: int, offers: Iterable[Offer], local: Plan) -> Plan:
    """The plan with the smallest expected time to first token.

    Every offer is considered whole, and cut at each block: a shorter prefix is still a gain where the rest is computed
    sooner than it arrives.

    Args:
        machine: what it can do.
        n_prompt: tokens of the prompt.
        held_tokens: of these, what is held here.
        offers: what can be fetched.
        local: what would be done without peers; it stands unless a fetch is sooner by `MIN_GAIN_S`.
    """
    best = local
    for offer in offers:
        for plan in _plans(machine, n_prompt, held_tokens, offer):
            margin_s = MIN_GAIN_S if best is local else 0.0
            if plan.seconds + margin_s < best.seconds:
                best = plan
    return best


@dataclass(frozen=True, slots=True)
class EvenOffer:
    """A prefix that can be fetched, all of whose missing blocks are stored in equally many bytes.

    Attributes:
        link: to whoever has it.
        n_tokens: how many tokens of the prompt it covers, from the start.
        first_block: of the prompt, the first that is missing here; all from it on are.
        block_bytes: stored bytes of each, above 0.
        head_bytes: stored bytes to fetch before the first block.
        raw_bytes_per_token: of its K/V.
    """

    link: Link
    n_tokens: int
    first_block: int
    block_bytes: int
    head_bytes: int
    raw_bytes_per_token: int

    def stored_bytes(self, n_tokens: int) -> int:
        """Stored bytes to fetch for the first `n_tokens` tokens, whole blocks of them."""
        return self.head_bytes + max(0, -(-n_tokens // BLOCK_TOKENS) - self.first_block) * self.block_bytes


def best_cut(
    machine: Machine,
    n_prompt: int,
    held_tokens: int,
    offer: EvenOffer,
    local_s: float,
    *,
    margin_s: float = MIN_GAIN_S,
) -> tuple[int, float]:
    """Up to where to fetch an offer of equal blocks: what `best_plan` decides, without trying every block.

    Seconds by tokens fetched bend one way only between two positions at which prefill was measured. So the best is at
    an end, beside such a position, or where a token takes as long to fetch as to compute.

    Args:
        machine: what it can do.
        n_prompt: tokens of the prompt.
        held_tokens: of these, what is held here.
        offer: what can be fetched.
        local_s: seconds to the first token without it.
        margin_s: a fetch that would win by less is not begun.

    Returns:
        Tokens, and seconds to the first token; 0 and `local_s` where computing is sooner.
    """
    covered = min(offer.n_tokens, n_prompt - 1)
    first, last = held_tokens // BLOCK_TOKENS + 1, -(-covered // BLOCK_TOKENS)
    best_tokens, best_s = 0, local_s - margin_s
    whole_s = machine.prefill.seconds(0, n_prompt)
    for n_blocks in _turning_blocks(machine, offer, first, last):
        n_tokens = min(covered, n_blocks * BLOCK_TOKENS)
        if n_tokens <= held_tokens:
            continue
        raw_bytes = n_tokens * offer.raw_bytes_per_token
        seconds = (
            offer.link.seconds(offer.stored_bytes(n_blocks * BLOCK_TOKENS), raw_bytes)
            + machine.restore_s(raw_bytes)
            + whole_s
            - machine.prefill.seconds(0, n_tokens)
        )
        if seconds < best_s:
            best_tokens, best_s = n_tokens, seconds
    return (best_tokens, best_s) if best_tokens else (0, local_s)


def _turning_blocks(machine: Machine, offer: EvenOffer, first: int, last: int) -> list[int]:
    """Block counts from `first` to `last` among which the best one is, ascending."""
    token_s = offer.block_bytes / BLOCK_TOKENS / offer.link.bytes_s
    token_s += offer.raw_bytes_per_token * (1 / offer.link.decode_bytes_s + 1 / machine.restore_bytes_s)
    turns = {first, offer.first_block, offer.first_block + 1, last - 1, last}
    for position in machine.prefill.turns(token_s):
        turns |= {int(position) // BLOCK_TOKENS, int(position) // BLOCK_TOKENS + 1}
    return sorted(turn for turn in turns if first <= turn <= last)


def whole_plan(machine: Machine, n_prompt: int, held_tokens: int, offer: Offer) -> Plan | None:
    """Fetch all that an offer covers and compute the rest; None when it covers no more than is held."""
    plans = deque(_plans(machine, n_prompt, held_tokens, offer), maxlen=1)
    return plans[0] if plans else None


def _plans(machine: Machine, n_prompt: int, held_tokens: int, offer: Offer) -> Iterable[Plan]:
    sums = list(accumulate(offer.block_bytes, initial=offer.head_bytes))
    covered = min(offer.n_tokens, n_prompt - 1)
    for n_blocks in range(held_tokens // BLOCK_TOKENS + 1, len(offer.block_bytes) + 1):
        n_tokens = min(covered, n_blocks * BLOCK_TOKENS)
        if n_tokens <= held_tokens:
            continue
        n_bytes, raw_bytes = sums[n_blocks], n_tokens * offer.raw_bytes_per_token
        yield Plan(
            (
                FetchStep(offer.link.peer, n_tokens, n_bytes, offer.link.seconds(n_bytes, raw_bytes)),
                RestoreStep(n_tokens, machine.restore_s(raw_bytes)),
                PrefillStep(n_tokens, n_prompt, machine.prefill.seconds(n_tokens, n_prompt)),
            )
        )


def break_even_bytes_s(
    machine: Machine,
    stored_bytes_per_token: float,
    position: int,
    *,
    raw_bytes_per_token: int = 0,
    decode_bytes_s: float = math.inf,
) -> float:
    """The link rate from which fetching a token at a position is sooner than computing it.

    Args:
        machine: what it can do.
        stored_bytes_per_token: K/V bytes of a token as they travel.
        position: where in the prompt.
        raw_bytes_per_token: K/V bytes of a token as they are decoded and restored; 0 to leave that out.
        decode_bytes_s: raw bytes decoded per second.

    Returns:
        Bytes per second; infinite where decoding and restoring a token take longer than computing it.
    """
    left_s = 1.0 / machine.prefill.tokens_s(position)
    left_s -= raw_bytes_per_token / machine.restore_bytes_s + raw_bytes_per_token / decode_bytes_s
    return stored_bytes_per_token / left_s if left_s > 0 else math.inf
