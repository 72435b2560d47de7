"""Fetch or compute: the plan with the smallest expected time to first token.

A prefix may be computed here, or fetched as far as a block's end and computed from there. What each costs follows from
what was measured: prefill speed by position, the rate of restoring, round trip and rate of the peer. Fetching wins when
the link carries more bytes per second than K/V bytes per token times prefill tokens per second.

A plan is a sequence of steps, and more kinds of steps can come: computing while blocks arrive from the back, or having
a faster machine compute. Pure arithmetic; all times are seconds, all rates bytes or tokens per second.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from kvnet.format.codecs import Codec
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.ids import PeerId

MIN_GAIN_S = 0.010
"""A fetch that would win by less is not begun: what is measured is not that exact."""


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """At `position` tokens, prefill runs at `tokens_s`."""

    position: int
    tokens_s: float


class PrefillSpeed:
    """Prefill speed by position: later tokens attend to more, and take longer.

    Between two measured positions the seconds per token are taken to grow evenly, which is what attention does; before
    the first and after the last one they are those measured there.

    Args:
        points: measured; at least one, speeds above 0.

    Raises:
        ValueError: no point, or a speed that is not above 0.
    """

    def __init__(self, points: Iterable[SpeedPoint]) -> None:
        ordered = sorted({point.position: point for point in points}.values(), key=lambda point: point.position)
        if not ordered or any(not 0 < point.tokens_s < math.inf for point in ordered):
            raise ValueError("expected at least one measured speed above 0")
        self._positions = [point.position for point in ordered]
        self._seconds = [1.0 / point.tokens_s for point in ordered]
        self._before = [self._positions[0] * self._seconds[0]]
        for at in range(1, len(ordered)):
            width = self._positions[at] - self._positions[at - 1]
            self._before.append(self._before[-1] + width * (self._seconds[at - 1] + self._seconds[at]) / 2)

    def seconds(self, first_token: int, end_token: int) -> float:
        """Seconds of prefilling tokens `first_token` up to `end_token`, the state before them being there."""
        if end_token <= first_token:
            return 0.0
        return self._until(end_token) - (self._until(first_token) if first_token else 0.0)

    def _until(self, end_token: int) -> float:
        """Seconds of all tokens before one."""
        at = bisect_left(self._positions, end_token)
        if at == 0:
            return end_token * self._seconds[0]
        before, width = self._seconds[at - 1], end_token - self._positions[at - 1]
        last = before
        if at < len(self._positions):
            share = width / (self._positions[at] - self._positions[at - 1])
            last += share * (self._seconds[at] - before)
        return self._before[at - 1] + width * (before + last) / 2

    def tokens_s(self, position: int) -> float:
        """Tokens per second at a position."""
        return 1.0 / self._per_token(position)

    def turns(self, token_s: float) -> list[float]:
        """Positions where it was measured, and those between them where a token takes `token_s` seconds."""
        found: list[float] = list(self._positions)
        for (left, right), (before_s, after_s) in zip(pairwise(self._positions), pairwise(self._seconds), strict=True):
            if min(before_s, after_s) < token_s < max(before_s, after_s):
                found.append(left + (right - left) * (token_s - before_s) / (after_s - before_s))
        return found

    def _per_token(self, position: int) -> float:
        at = bisect_left(self._positions, position)
        if at == 0:
            return self._seconds[0]
        if at == len(self._positions):
            return self._seconds[-1]
        left, right = self._positions[at - 1], self._positions[at]
        share = (position - left) / (right - left)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does with one model.

    Attributes:
        prefill: its speed.
        restore_bytes_s: raw K/V bytes restored per second.
        restore_fixed_s: seconds of any restore, however small.
        decode_bytes_s: raw bytes decoded per second, by codec; one that is not named takes no time.
        calibrated: all of it was measured for its own sake, and not only guessed from a request or two.
    """

    prefill: PrefillSpeed
    restore_bytes_s: float
    restore_fixed_s: float = 0.0
    decode_bytes_s: Mapping[Codec, float] = field(default_factory=dict)
    calibrated: bool = True

    def restore_s(self, n_bytes: int) -> float:
        """Seconds until so many raw bytes of K/V are in the model's caches."""
        return self.restore_fixed_s + n_bytes / self.restore_bytes_s if n_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """How chunks get here from one peer, in one codec.

    Attributes:
        peer: whom from.
        rtt_s: seconds of a round trip.
        bytes_s: stored bytes per second.
        decode_bytes_s: raw bytes decoded per second; infinite for a codec that needs none.
    """

    peer: PeerId
    rtt_s: float
    bytes_s: float
    decode_bytes_s: float = math.inf

    def seconds(self, stored_bytes: int, raw_bytes: int) -> float:
        """Seconds until so many bytes are here and decoded."""
        if not stored_bytes:
            return 0.0
        return self.rtt_s + stored_bytes / self.bytes_s + raw_bytes / self.decode_bytes_s


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


def reconsider(machine: Machine, n_prompt: int, underway: Underway) -> int:
    """Up to how many tokens to go on fetching: `arrived_tokens` to stop now and compute the rest.

    Asked again whenever the rate changes: what has been fetched is paid for, so that only what is still to come counts
    on both sides.
    """
    offer = underway.offer
    sums = list(accumulate(offer.block_bytes, initial=offer.head_bytes))
    best_tokens, best_s = underway.arrived_tokens, _rest_s(machine, n_prompt, underway, underway.arrived_tokens, 0)
    for n_blocks in range(underway.arrived_tokens // BLOCK_TOKENS + 1, len(offer.block_bytes) + 1):
        n_tokens = min(underway.wanted_tokens, n_blocks * BLOCK_TOKENS)
        if n_tokens <= underway.arrived_tokens:
            continue
        left_bytes = max(0, sums[n_blocks] - underway.arrived_bytes)
        seconds = _rest_s(machine, n_prompt, underway, n_tokens, left_bytes)
        if seconds < best_s:
            best_tokens, best_s = n_tokens, seconds
    return best_tokens


def worth_going_on(machine: Machine, n_prompt: int, underway: Underway) -> bool:
    """Whether `reconsider` would go on: asked after every chunk, and as a rule answered by the last block alone."""
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
