"""Weigh what peers offer for a prompt against computing it here, before anything is fetched, and say what came of it.

The arithmetic is :mod:`kvnet.protocol.cost`'s. Here are the figures it needs: what the machine was measured to do, how
peers have answered and delivered so far, and which chunks of an artifact are still to come.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvnet.format.chunks import ChunkEntry, ChunkPlan
from kvnet.format.codecs import Codec
from kvnet.format.prefix import BLOCK_TOKENS, TOKEN_SIZE_BYTES
from kvnet.protocol.cost import MIN_GAIN_S, Offer, Plan, PrefillStep, RestoreStep, best_plan, local_plan, whole_plan
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate
from kvnet.protocol.scoring import PeerScores
from kvnet.protocol.speeds import Link, Machine

LEAST_STORED_SHARE = 0.25
"""No codec stores K/V in less than this share of its bytes; what a prefix costs at least, before its size is known."""

LOOKUP_ROUND_TRIPS = 4
"""Round trips before the first chunk is asked for: the lookup, the manifest, the chunk list and the token ids."""

SHOWING_ROUND_TRIPS = LOOKUP_ROUND_TRIPS - 1
"""Those that are left once a peer has made a claim."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What became of the fetch of a plan.

    Attributes:
        n_tokens: tokens that could be used afterwards, those held before included.
        n_bytes: stored bytes that came.
        seconds: from the decision to the last of them.
        ended_early: it was ended before all had come, because computing the rest was sooner by then.
    """

    n_tokens: int
    n_bytes: int
    seconds: float
    ended_early: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was weighed for a prompt.

    Attributes:
        plan: what was decided, with the time that each step was expected to take.
        alternatives: what else was considered, the soonest first.
        words: the decision, for people.
        bytes_s: the rate that the peers were expected to deliver at; infinite when unknown, 0 when none offered.
        happened: what became of its fetch; ``None`` when it has none, or that brought nothing.
    """

    plan: Plan
    alternatives: tuple[Plan, ...] = ()
    words: str = ""
    bytes_s: float = 0.0
    happened: Happened | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Which chunks of an artifact are to come for a prompt.

    Attributes:
        tiles: block and stored bytes of each missing tile, by chunk index.
        heads: stored bytes of each missing context chunk, by chunk index.
    """

    tiles: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)

    def sizes(self) -> dict[int, int]:
        """Stored bytes of each, by chunk index."""
        return {**self.heads, **{index: n_bytes for index, (_, n_bytes) in self.tiles.items()}}


def missing_chunks(plan: ChunkPlan, entries: Sequence[ChunkEntry], n_tokens: int, absent: Iterable[int]) -> Missing:
    """What the first ``n_tokens`` tokens of an artifact need that is among the ``absent`` chunks."""
    absent = set(absent)
    tiles = {
        index: (plan[index].block, entries[index].length_bytes)
        for index in plan.needed_for(n_tokens)
        if index in absent and index >= plan.first_tile
    }
    heads = {index: entries[index].length_bytes for index in plan.context_chunks if index in absent}
    return Missing(tiles, heads)


def link_to(peers: Iterable[PeerId], scores: PeerScores, now_s: float, decode_bytes_s: float = math.inf) -> Link:
    """What some peers together may be expected to do: their rates add up, and the nearest begins.

    A peer whose rate is unknown is taken for as fast as can be: the fetch finds out, and is ended when it is not.
    """
    known = [peer for peer in peers if not scores.banned(peer, now_s)]
    rates = {peer: scores.expected_bytes_s(peer, now_s) for peer in known}
    best = max(known, key=lambda peer: rates[peer], default=PeerId(b""))
    rtt_s = min((scores.rtt_s(peer) for peer in known), default=0.0)
    return Link(best, rtt_s, sum(rates.values()) or math.inf, decode_bytes_s)


def asking_could_win(
    machine: Machine, n_prompt: int, held_tokens: int, local_s: float, *, raw_bytes_per_token: int, link: Link
) -> bool:
    """Whether a prefix that covers all of a prompt, from over this link, could be here sooner than it is computed.

    Args:
        machine: what this machine does.
        n_prompt: tokens of the prompt.
        held_tokens: of these, what is held here.
        local_s: seconds to the first token without peers.
        raw_bytes_per_token: of the model's K/V.
        link: to all who could be asked.
    """
    n_tokens = n_prompt - 1
    least_bytes = (n_tokens - held_tokens) * raw_bytes_per_token * LEAST_STORED_SHARE
    fetch_s = LOOKUP_ROUND_TRIPS * link.rtt_s + link.seconds(int(least_bytes), 0)
    rest_s = machine.restore_s(n_tokens * raw_bytes_per_token) + machine.prefill.seconds(n_tokens, n_prompt)
    return fetch_s + rest_s + MIN_GAIN_S < local_s


class Weigher:
    """Weighs what is offered for one prompt.

    Args:
        machine: what this machine does with the model.
        n_prompt: tokens of the prompt.
        held_tokens: of these, from the start, what is held here.
        live_tokens: of these, what is in RAM and needs no restore.
        raw_bytes_per_token: of the model's K/V.
    """

    def __init__(
        self, machine: Machine, n_prompt: int, held_tokens: int, live_tokens: int, raw_bytes_per_token: int
    ) -> None:
        self.machine = machine
        self.n_prompt = n_prompt
        self.held_tokens = held_tokens
        self.raw_bytes_per_token = raw_bytes_per_token
        self.local = local_plan(machine, n_prompt, held_tokens, raw_bytes_per_token)
        if live_tokens and live_tokens >= held_tokens:
            rest_s = machine.prefill.seconds(live_tokens, n_prompt)
            self.local = Plan((RestoreStep(live_tokens, 0.0), PrefillStep(live_tokens, n_prompt, rest_s)))

    def rest_s(self, n_tokens: int) -> float:
        """Seconds from when ``n_tokens`` tokens of state are here to the first token."""
        restore_s = self.machine.restore_s(n_tokens * self.raw_bytes_per_token)
        return restore_s + self.machine.prefill.seconds(n_tokens, self.n_prompt)

    def could_win(self, link: Link) -> bool:
        """Whether asking over this link can make the first token come sooner, were all of the prompt to be had."""
        return asking_could_win(
            self.machine,
            self.n_prompt,
            self.held_tokens,
            self.local.seconds,
            raw_bytes_per_token=self.raw_bytes_per_token,
            link=self._believed(link),
        )

    def alone(self, words: str) -> PlanReport:
        """Nothing was offered."""
        return PlanReport(self.local, words=words)

    def offer(self, link: Link, n_tokens: int, missing: Missing) -> Offer:
        """An artifact of which ``n_tokens`` tokens are the prompt's, as an offer."""
        block_bytes = [0] * -(-n_tokens // BLOCK_TOKENS)
        for block, n_bytes in missing.tiles.values():
            block_bytes[block] += n_bytes
        return Offer(link, n_tokens, tuple(block_bytes), sum(missing.heads.values()), self.raw_bytes_per_token)

    def claim(self, link: Link, claimed: Candidate) -> PlanReport:
        """Decide by what a peer says of an artifact, before it has shown anything of it.

        Blocks that are held count as they may be the same; the claim is seen through as soon as it is shown.
        """
        n_tokens = claimed.reusable_tokens
        block_bytes = claimed.size_bytes * BLOCK_TOKENS // claimed.n_tokens
        held = min(self.held_tokens // BLOCK_TOKENS, -(-n_tokens // BLOCK_TOKENS))
        blocks = (*([0] * held), *([block_bytes] * (-(-n_tokens // BLOCK_TOKENS) - held)))
        shown = replace(link, rtt_s=link.rtt_s * (1 + SHOWING_ROUND_TRIPS))
        head_bytes = claimed.n_tokens * TOKEN_SIZE_BYTES
        return self.weigh(Offer(shown, n_tokens, blocks, head_bytes, self.raw_bytes_per_token))

    def decode_bytes_s(self, codec: Codec) -> float:
        """Raw bytes decoded per second; infinite when that was not measured."""
        return self.machine.decode_bytes_s.get(codec, math.inf)

    def _believed(self, link: Link) -> Link:
        """Beside a prefill that was only guessed, round trips decide nothing: small requests measure both badly."""
        return link if self.machine.calibrated else replace(link, rtt_s=0.0)

    def weigh(self, offer: Offer) -> PlanReport:
        """Decide about an offer."""
        offer = replace(offer, link=self._believed(offer.link))
        plan = best_plan(self.machine, self.n_prompt, self.held_tokens, [offer], self.local)
        whole = whole_plan(self.machine, self.n_prompt, self.held_tokens, offer)
        everything = local_plan(self.machine, self.n_prompt, 0, self.raw_bytes_per_token)
        others = dict.fromkeys(each for each in (self.local, whole, everything) if each is not None and each != plan)
        alternatives = tuple(sorted(others, key=lambda each: each.seconds))
        return PlanReport(plan, alternatives, _words(plan, self.local, whole, offer), offer.link.bytes_s)


def rate_words(bytes_s: float) -> str:
    """A rate for people."""
    return f"{bytes_s / 1e6:,.3g} MB/s" if math.isfinite(bytes_s) else "a rate not measured yet"


def _words(plan: Plan, local: Plan, whole: Plan | None, offer: Offer) -> str:
    fetch, rate = plan.fetch, rate_words(offer.link.bytes_s)
    if fetch is None:
        than = f" {whole.seconds:,.2f} s with {offer.n_tokens:,} tokens" if whole is not None else " anything"
        return (
            f"computing was expected to be sooner than fetching: {local.seconds:,.2f} s, against{than} from a peer "
            f"at {rate}"
        )
    gain = f"{plan.seconds:,.2f} s, against {local.seconds:,.2f} s without"
    if fetch.n_tokens < min(offer.n_tokens, plan.prefilled_tokens + fetch.n_tokens - 1):
        return f"of {offer.n_tokens:,} tokens a peer offered, the first {fetch.n_tokens:,} pay at {rate}: {gain}"
    return f"fetching {fetch.n_tokens:,} tokens at {rate} was expected to pay: {gain}"
