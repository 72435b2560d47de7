"""Fetches as fluid: bytes flow at the rates that shared spans give, from all providers together.

What the fetch machine does chunk by chunk is the same in sum as long as nothing goes wrong: everybody is kept busy, the
fast ones do most of the work. `simulations.world.chunked` runs the machine itself; a test holds the two together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvnet.exchange.race import GRACE_S, SILENCE_FACTOR
from kvnet.format.limits import MAX_GROUPED_TILE_BYTES
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.cost import EvenOffer, best_cut
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet.protocol.speeds import Link
from simulations.world.clock import Clock
from simulations.world.node import Node
from simulations.world.spans import Flow, Span, connected, share, start, stop

NOBODY = PeerId(b"")

SpansOf = Callable[[Node, Node], tuple[Span, ...]]
"""What bytes from one node to another run over."""

RttOf = Callable[[Node, Node], float]
"""Seconds of a round trip between two nodes."""


@dataclass(slots=True)
class Brought:
    """What a fetch brought.

    Attributes:
        n_tokens: of the prompt, what can be used now without a gap; no more than before when nothing came.
        n_bytes: verified bytes that came, those that are of no use included.
        provider: whom most of them came from; none when nothing came.
        ended_early: it was given up, because computing the rest was sooner by then.
    """

    n_tokens: int
    n_bytes: int
    provider: Node | None
    ended_early: bool


@dataclass(slots=True, eq=False)
class Wanted:
    """What is to be fetched.

    Attributes:
        node: for whom.
        providers: from whom, the best first.
        n_prompt: tokens of the prompt it is for.
        held_tokens: of these, what is held in whole or in part.
        n_tokens: up to where to fetch.
        offer: the rest of what the decision was made from.
        local_s: seconds to the first token without it.
        rtt_s: of the nearest provider.
        done: told what came, unless the node itself goes first.
        urgent: somebody waits for it, and it is given up where computing is sooner.
    """

    node: Node
    providers: Sequence[Node]
    n_prompt: int
    held_tokens: int
    n_tokens: int
    offer: EvenOffer
    local_s: float
    rtt_s: float
    done: Callable[[Brought], None]
    urgent: bool = True

    @property
    def n_bytes(self) -> int:
        """Stored bytes that are missing."""
        return self.offer.stored_bytes(self.n_tokens)

    @property
    def n_blocks(self) -> int:
        """Blocks that are missing."""
        return -(-self.n_tokens // BLOCK_TOKENS) - self.offer.first_block

    @property
    def chunk_bytes(self) -> int:
        """Of the chunks that a block is stored in."""
        return -(-self.offer.block_bytes // -(-self.offer.block_bytes // MAX_GROUPED_TILE_BYTES))

    def tokens_after(self, n_blocks: int) -> int:
        """Tokens that can be used when so many of the missing blocks are here."""
        reached = (self.offer.first_block + n_blocks) * BLOCK_TOKENS
        return max(self.held_tokens, min(self.n_tokens, reached)) if n_blocks else self.held_tokens

    def rest_s(self, n_tokens: int) -> float:
        """Seconds from when so many tokens of state are here to the first token."""
        machine = self.node.machine
        return machine.restore_s(self.node.raw_bytes(n_tokens)) + machine.prefill.seconds(n_tokens, self.n_prompt)

    def worth_going_on(self, n_tokens: int, left_bytes: int, bytes_s: float) -> bool:
        """Whether anything that is still to come is sooner here than computed: the node's decision while it waits.

        Args:
            n_tokens: what can be used already.
            left_bytes: of the next block, what has not come.
            bytes_s: what arrives of late.
        """
        if bytes_s <= 0:
            return False
        offer = self.offer
        first_block = max(offer.first_block, n_tokens // BLOCK_TOKENS)
        ahead = left_bytes - offer.block_bytes
        rest = EvenOffer(
            Link(NOBODY, max(0.0, ahead / bytes_s), bytes_s, self.node.decode_bytes_s),
            self.n_tokens, first_block, offer.block_bytes, 0, offer.raw_bytes_per_token,
        )  # fmt: skip
        cut, _ = best_cut(self.node.machine, self.n_prompt, n_tokens, rest, self.rest_s(n_tokens), margin_s=0.0)
        return cut > n_tokens

    def silence_s(self) -> float:
        """How long a provider that says nothing is waited for, as `kvnet.exchange.race` has it."""
        share_of_all = min(1.0, self.chunk_bytes * len(self.providers) / max(1, self.n_bytes))
        spared_s = max(0.0, self.local_s - self.rest_s(self.n_tokens))
        return GRACE_S + SILENCE_FACTOR * spared_s * share_of_all


class Ledger:
    """Every byte that was sent, and what became of it.

    Attributes:
        sent, received, lost: bytes that left a node; that arrived and matched; that were under way when a transfer
            ended, or did not match.
        accepted_lies: chunks of liars that were taken; must stay 0.
        transfers, running: fetches in all, and those under way.
    """

    def __init__(self) -> None:
        self.sent = self.received = self.lost = self.accepted_lies = self.transfers = self.running = 0


class Transfers(Protocol):
    """A way of fetching."""

    ledger: Ledger

    def begin(self, wanted: Wanted) -> None:
        """Fetch; the end is told to `wanted.done`."""
        ...

    def node_gone(self, node: Node) -> None:
        """A node is there no more: what it fetched ends untold, what it sent stops."""
        ...


class FluidFetch:
    """One fetch under way."""

    __slots__ = ("began_s", "bytes_s", "flows", "last_s", "left", "sent", "silent", "version", "wanted")

    def __init__(self, wanted: Wanted, now_s: float) -> None:
        self.wanted = wanted
        self.began_s = self.last_s = now_s
        self.left = float(wanted.n_bytes)
        self.bytes_s = 0.0
        self.flows: dict[Flow, Node] = {}
        self.sent: dict[Node, float] = {}
        self.version = 0
        self.silent = 0

    def settle(self, now_s: float) -> None:
        """Count what came since the last time."""
        elapsed = now_s - self.last_s
        self.last_s = now_s
        if elapsed > 0 and self.bytes_s > 0:
            came = min(self.left, elapsed * self.bytes_s)
            self.left -= came
            for flow, node in self.flows.items():
                self.sent[node] = self.sent.get(node, 0.0) + came * flow.bytes_s / self.bytes_s


class FluidTransfers:
    """See the module.

    Args:
        clock: of the world.
        spans: between two nodes.
    """

    def __init__(self, clock: Clock, spans: SpansOf) -> None:
        self.ledger = Ledger()
        self._clock = clock
        self._spans = spans
        self._running: dict[FluidFetch, None] = {}

    def begin(self, wanted: Wanted) -> None:
        """See `Transfers`. The first byte comes after a round trip."""
        fetch = FluidFetch(wanted, self._clock.now)
        self._running[fetch] = None
        self.ledger.transfers += 1
        self.ledger.running += 1
        self._clock.at(self._clock.now + wanted.rtt_s, self._flow, fetch)

    def node_gone(self, node: Node) -> None:
        """See `Transfers`."""
        for fetch in list(self._running):
            if fetch.wanted.node is node:
                self._end(fetch, told=False, ended_early=True)
            else:
                gone = [flow for flow, provider in fetch.flows.items() if provider is node]
                for flow in gone:
                    fetch.wanted.node.scores.dropped(node.peer, DropReason.GONE, self._clock.now)
                    self._stop(fetch, flow)

    def _flow(self, fetch: FluidFetch) -> None:
        if fetch not in self._running:
            return
        now_s, wanted = self._clock.now, fetch.wanted
        fetch.last_s = now_s
        honest = [each for each in wanted.providers if each.present]
        for liar in [each for each in honest if each.setup.liar]:
            # Its first chunk does not match; the others do the rest.
            honest.remove(liar)
            self._lie(fetch, liar)
        if not honest:
            # A chunk's time was spent to find that out.
            spent_s = wanted.chunk_bytes / wanted.node.down.bytes_s
            self._clock.at(now_s + spent_s, self._give_up, fetch, fetch.version)
            return
        affected: dict[Flow, None] = {}
        for provider in honest:
            flow = Flow(self._spans(provider, wanted.node), fetch)
            fetch.flows[flow] = provider
            affected |= dict.fromkeys(start(flow))
        self._share(list(affected))
        self._clock.at(max(now_s, fetch.began_s + GRACE_S), self._judge, fetch)

    def _lie(self, fetch: FluidFetch, liar: Node) -> None:
        n_bytes = fetch.wanted.chunk_bytes
        liar.counted.served_bytes += n_bytes
        self.ledger.sent += n_bytes
        self.ledger.lost += n_bytes
        fetch.wanted.node.scores.dropped(liar.peer, DropReason.BAD_CHUNK, self._clock.now)

    def _share(self, flows: list[Flow]) -> None:
        """Rates change: count by the old ones, then see when who is done by the new ones."""
        now_s = self._clock.now
        fetches = dict.fromkeys(flow.owner for flow in flows if isinstance(flow.owner, FluidFetch))
        for fetch in fetches:
            fetch.settle(now_s)
        share(flows)
        for fetch in fetches:
            before = fetch.bytes_s
            fetch.bytes_s = sum(flow.bytes_s for flow in fetch.flows)
            fetch.version += 1
            if fetch.bytes_s > 0:
                self._clock.at(now_s + fetch.left / fetch.bytes_s, self._finish, fetch, fetch.version)
            if fetch.bytes_s < before:
                self._judge(fetch)

    def _judge(self, fetch: FluidFetch) -> None:
        """As the race does once it has heard enough: stop where what is to come takes longer than computing it."""
        now_s = self._clock.now
        if not fetch.wanted.urgent or not fetch.flows:
            return
        if fetch not in self._running or now_s < fetch.began_s + GRACE_S:
            return
        fetch.settle(now_s)
        n_blocks, left = self._arrived(fetch)
        if not fetch.wanted.worth_going_on(fetch.wanted.tokens_after(n_blocks), left, fetch.bytes_s):
            self._end(fetch, told=True, ended_early=True)

    @staticmethod
    def _arrived(fetch: FluidFetch) -> tuple[int, int]:
        """Whole blocks that came, and how many bytes of the next are missing."""
        offer = fetch.wanted.offer
        came = max(0.0, fetch.wanted.n_bytes - fetch.left - offer.head_bytes)
        n_blocks = int((came + 0.5) // offer.block_bytes)
        return n_blocks, int((n_blocks + 1) * offer.block_bytes - came)

    def _stop(self, fetch: FluidFetch, flow: Flow) -> None:
        """A provider has gone: the others go on, or it is waited for as long as a race waits."""
        fetch.settle(self._clock.now)
        del fetch.flows[flow]
        fetch.bytes_s = sum(each.bytes_s for each in fetch.flows)
        fetch.version += 1
        others = stop(flow)
        if others:
            self._share(others)
        if not fetch.flows:
            self._clock.at(self._clock.now + fetch.wanted.silence_s(), self._give_up, fetch, fetch.version)
        elif fetch in self._running and fetch.bytes_s > 0:
            self._clock.at(self._clock.now + fetch.left / fetch.bytes_s, self._finish, fetch, fetch.version)

    def _give_up(self, fetch: FluidFetch, version: int) -> None:
        if fetch in self._running and fetch.version == version:
            self._end(fetch, told=True, ended_early=True)

    def _finish(self, fetch: FluidFetch, version: int) -> None:
        if fetch in self._running and fetch.version == version:
            fetch.settle(self._clock.now)
            fetch.left = 0.0
            self._end(fetch, told=True, ended_early=False)

    def _end(self, fetch: FluidFetch, *, told: bool, ended_early: bool) -> None:
        now_s, wanted = self._clock.now, fetch.wanted
        fetch.settle(now_s)
        del self._running[fetch]
        flows, fetch.flows = fetch.flows, {}
        affected: dict[Flow, None] = {}
        for flow in flows:
            affected |= dict.fromkeys(stop(flow))
        n_blocks = wanted.n_blocks if not ended_early else min(wanted.n_blocks, self._arrived(fetch)[0])
        brought = self._account(fetch, n_blocks, now_s)
        if affected:
            self._share(connected(flow for flow in affected if flow not in flows))
        if told:
            tokens = wanted.tokens_after(n_blocks)
            most = max(fetch.sent, key=lambda node: fetch.sent[node], default=None)
            wanted.done(Brought(tokens, brought, most, ended_early))

    def _account(self, fetch: FluidFetch, n_blocks: int, now_s: float) -> int:
        """Who sent what; whole blocks were received, what was under way is lost."""
        wanted, sent_bytes = fetch.wanted, 0
        for node, n_bytes in fetch.sent.items():
            whole = round(n_bytes)
            node.counted.served_bytes += whole
            sent_bytes += whole
            self.ledger.accepted_lies += node.setup.liar
            seconds = now_s - fetch.began_s
            wanted.node.scores.delivered(node.peer, whole, seconds, now_s)
        for node in wanted.providers:
            if node not in fetch.sent and not node.setup.liar:
                wanted.node.scores.waited(node.peer, wanted.chunk_bytes, now_s - fetch.began_s, now_s)
        received = min(sent_bytes, wanted.offer.head_bytes + n_blocks * wanted.offer.block_bytes) if sent_bytes else 0
        self.ledger.sent += sent_bytes
        self.ledger.received += received
        self.ledger.lost += sent_bytes - received
        self.ledger.running -= 1
        return received
