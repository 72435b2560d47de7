"""Fetches chunk by chunk: the node's own fetch machine asks, over the same shared spans as the fluid model.

Each peer sends one chunk after another over one flow. A request and the last byte of a chunk take half a round trip.
What a race against computing decides while chunks arrive is `kvnet.protocol.underway.worth_going_on`, as in
`kvnet.exchange.race`.
"""

from collections import deque
from typing import Final, cast

from kvnet.exchange.race import GRACE_S, RATE_WINDOW_S, SILENCE_FACTOR
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import BytesLike, ChunkHash
from kvnet.protocol.cost import Offer
from kvnet.protocol.fetch import ChunkVerified, Completed, DropPeer, Failed, FetchMachine, Instruction, RequestChunks
from kvnet.protocol.ids import PeerId
from kvnet.protocol.underway import Underway, worth_going_on
from simulations.world.clock import Clock
from simulations.world.node import Node
from simulations.world.spans import Flow, connected, share, start, stop
from simulations.world.transfers import Brought, Ledger, RttOf, SpansOf, Wanted

WRONG: Final = ChunkHash(b"\xff" * 32)


class Sized:
    """Bytes of which only the number matters: what is in them is said by the hash that comes with them."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class Channel:
    """One peer sends chunks to one fetch, in the order in which they were asked for.

    Attributes:
        queue: chunks to send; the first is being sent.
        left: bytes of the first that have not been sent.
        version: grows with every change of the rate.
    """

    __slots__ = ("closed", "fetch", "flow", "last_s", "left", "node", "queue", "rtt_s", "version")

    def __init__(self, fetch: "ChunkFetch", node: Node, flow: Flow, rtt_s: float) -> None:
        self.fetch = fetch
        self.node = node
        self.flow = flow
        self.rtt_s = rtt_s
        self.queue: deque[int] = deque()
        self.left = 0.0
        self.last_s = 0.0
        self.version = 0
        self.closed = False

    def settle(self, now_s: float) -> None:
        """Count what was sent since the last time."""
        self.left = max(0.0, self.left - self.flow.bytes_s * (now_s - self.last_s))
        self.last_s = now_s


class ChunkFetch:
    """One fetch under way: the machine, and what has come of each block."""

    def __init__(self, wanted: Wanted, now_s: float) -> None:
        self.wanted = wanted
        self.began_s = self.heard_s = now_s
        self.sizes = _sizes(wanted)
        entries = [ChunkEntry(size, ChunkHash((at + 1).to_bytes(32, "big"))) for at, (size, _) in enumerate(self.sizes)]
        self.entries = entries
        self.nodes = {node.peer: node for node in wanted.providers}
        self.machine = FetchMachine(entries, range(len(entries)), list(self.nodes))
        self.channels: dict[PeerId, Channel] = {}
        self.brought: dict[PeerId, int] = {}
        self.missing = [0] * wanted.n_blocks
        for size, block in self.sizes:
            if block >= 0:
                self.missing[block] += size
        offer = wanted.offer
        blocks = (*([0] * offer.first_block), *([offer.block_bytes] * wanted.n_blocks))
        self.plain = Offer(offer.link, wanted.n_tokens, blocks, offer.head_bytes, offer.raw_bytes_per_token)
        self.total = sum(size for size, _ in self.sizes)
        self.arrived = 0
        self.arrivals: deque[tuple[float, int]] = deque()
        self.since_s = now_s
        self.ended = False
        self.version = 0
        self._whole = 0

    @property
    def whole_blocks(self) -> int:
        """Missing blocks that are here, from the first on."""
        while self._whole < len(self.missing) and not self.missing[self._whole]:
            self._whole += 1
        return self._whole

    def rate(self, now_s: float) -> float:
        """What arrives of late, as the race has it."""
        while len(self.arrivals) > 2 and self.arrivals[0][0] < now_s - RATE_WINDOW_S:
            self.since_s, _ = self.arrivals.popleft()
        return sum(n_bytes for _, n_bytes in self.arrivals) / max(1e-9, now_s - self.since_s)


def _sizes(wanted: Wanted) -> list[tuple[int, int]]:
    """Size and block of every chunk that is missing; what comes before the first block belongs to none."""
    offer = wanted.offer
    sizes = [(offer.head_bytes, -1)] if offer.head_bytes else []
    per_block = -(-offer.block_bytes // wanted.chunk_bytes)
    for block in range(wanted.n_blocks):
        sizes += [(wanted.chunk_bytes, block)] * (per_block - 1)
        sizes.append((offer.block_bytes - wanted.chunk_bytes * (per_block - 1), block))
    return sizes


class ChunkTransfers:
    """See the module.

    Args:
        clock: of the world.
        spans: between two nodes.
        rtt_s: seconds of a round trip between two nodes.
    """

    def __init__(self, clock: Clock, spans: SpansOf, rtt_s: RttOf) -> None:
        self.ledger = Ledger()
        self._clock = clock
        self._spans = spans
        self._rtt_s = rtt_s
        self._running: dict[ChunkFetch, None] = {}

    def begin(self, wanted: Wanted) -> None:
        """See `Transfers`."""
        fetch = ChunkFetch(wanted, self._clock.now)
        self._running[fetch] = None
        self.ledger.transfers += 1
        self.ledger.running += 1
        self._apply(fetch, fetch.machine.start(self._clock.now))
        self._watch(fetch)

    def node_gone(self, node: Node) -> None:
        """See `Transfers`. Whoever fetches from it finds out by its silence."""
        for fetch in list(self._running):
            if fetch.wanted.node is node:
                self._end(fetch, told=False, ended_early=True)
            elif node.peer in fetch.channels:
                self._close(fetch.channels[node.peer])

    # --- what the machine says ---

    def _apply(self, fetch: ChunkFetch, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RequestChunks(peer, indices):
                    self._request(fetch, peer, indices)
                case ChunkVerified(index, _, peer):
                    self._verified(fetch, index, peer)
                case DropPeer(peer, reason):
                    fetch.wanted.node.scores.dropped(peer, reason, self._clock.now)
                    channel = fetch.channels.pop(peer, None)
                    if channel is not None:
                        self._close(channel)
                case Completed():
                    self._end(fetch, told=True, ended_early=False)
                case Failed():
                    self._end(fetch, told=True, ended_early=True)
        if not fetch.ended:
            deadline = fetch.machine.next_deadline()
            fetch.version += 1
            if deadline is not None:
                self._clock.at(max(deadline, self._clock.now), self._on_time, fetch, fetch.version)

    def _on_time(self, fetch: ChunkFetch, version: int) -> None:
        if not fetch.ended and fetch.version == version:
            self._apply(fetch, fetch.machine.on_time(self._clock.now))

    def _request(self, fetch: ChunkFetch, peer: PeerId, indices: tuple[int, ...]) -> None:
        channel = fetch.channels.get(peer)
        if channel is None or channel.closed:
            node = fetch.nodes[peer]
            flow = Flow(self._spans(node, fetch.wanted.node), None)
            channel = Channel(fetch, node, flow, self._rtt_s(node, fetch.wanted.node))
            flow.owner = channel
            fetch.channels[peer] = channel
        self._clock.at(self._clock.now + channel.rtt_s / 2, self._asked, channel, indices)

    def _verified(self, fetch: ChunkFetch, index: int, peer: PeerId) -> None:
        size, block = fetch.sizes[index]
        self.ledger.received += size
        self.ledger.accepted_lies += fetch.nodes[peer].setup.liar
        fetch.brought[peer] = fetch.brought.get(peer, 0) + size
        fetch.arrived += size
        if block >= 0:
            fetch.missing[block] -= size
        fetch.arrivals.append((self._clock.now, size))
        fetch.heard_s = self._clock.now

    # --- what travels ---

    def _asked(self, channel: Channel, indices: tuple[int, ...]) -> None:
        """A request has reached a peer."""
        if channel.closed or not channel.node.present:
            return
        idle = not channel.queue
        channel.queue.extend(indices)
        if idle:
            channel.last_s = self._clock.now
            channel.left = float(channel.fetch.sizes[channel.queue[0]][0])
            self._share(start(channel.flow))

    def _share(self, flows: list[Flow]) -> None:
        now_s = self._clock.now
        channels = [flow.owner for flow in flows if isinstance(flow.owner, Channel)]
        for channel in channels:
            channel.settle(now_s)
        share(flows)
        for channel in channels:
            self._schedule(channel)

    def _schedule(self, channel: Channel) -> None:
        channel.version += 1
        if channel.flow.bytes_s > 0:
            due_s = self._clock.now + channel.left / channel.flow.bytes_s
            self._clock.at(due_s, self._sent, channel, channel.version)

    def _sent(self, channel: Channel, version: int) -> None:
        """The last byte of a chunk has left."""
        if channel.closed or channel.version != version:
            return
        channel.settle(self._clock.now)
        index = channel.queue.popleft()
        size = channel.fetch.sizes[index][0]
        channel.node.counted.served_bytes += size
        self.ledger.sent += size
        self._clock.at(self._clock.now + channel.rtt_s / 2, self._arrived, channel, index)
        if channel.queue:
            channel.left = float(channel.fetch.sizes[channel.queue[0]][0])
            self._schedule(channel)
        else:
            others = stop(channel.flow)
            if others:
                self._share(others)

    def _arrived(self, channel: Channel, index: int) -> None:
        fetch, size = channel.fetch, channel.fetch.sizes[index][0]
        received = self.ledger.received
        if not fetch.ended:
            digest = WRONG if channel.node.setup.liar else fetch.entries[index].hash
            data = cast("BytesLike", Sized(size))
            self._apply(
                fetch, fetch.machine.chunk_arrived(channel.node.peer, index, data, self._clock.now, digest=digest)
            )
            self._judge(fetch)
        if self.ledger.received == received:
            self.ledger.lost += size

    def _close(self, channel: Channel) -> None:
        """Nothing more comes over it; what was being sent is lost."""
        if channel.closed:
            return
        channel.closed = True
        if channel.queue:
            channel.settle(self._clock.now)
            partial = int(channel.fetch.sizes[channel.queue[0]][0] - channel.left)
            channel.node.counted.served_bytes += partial
            self.ledger.sent += partial
            self.ledger.lost += partial
            channel.queue.clear()
            others = stop(channel.flow)
            if others:
                self._share(connected(others))

    # --- the race against computing ---

    def _judge(self, fetch: ChunkFetch) -> None:
        """After each chunk: is what is to come worth waiting for?"""
        now_s, wanted = self._clock.now, fetch.wanted
        if fetch.ended or not wanted.urgent:
            return
        arrived = wanted.tokens_after(fetch.whole_blocks)
        if now_s - fetch.began_s >= GRACE_S and arrived < wanted.n_tokens:
            underway = Underway(fetch.plain, wanted.n_tokens, arrived, fetch.arrived, fetch.rate(now_s))
            if not worth_going_on(wanted.node.machine, wanted.n_prompt, underway):
                self._end(fetch, told=True, ended_early=True)
                return
        self._watch(fetch)

    def _watch(self, fetch: ChunkFetch) -> None:
        """Wait no longer than what will have arrived with the next chunks spares."""
        wanted = fetch.wanted
        if fetch.ended or not wanted.urgent:
            return
        underway = wanted.chunk_bytes * len(wanted.providers)
        reached = min(1.0, (fetch.arrived + underway) / max(1, fetch.total))
        spared_s = max(0.0, wanted.local_s - wanted.rest_s(wanted.n_tokens))
        limit_s = min(
            fetch.began_s + GRACE_S + spared_s * reached,
            fetch.heard_s + GRACE_S + SILENCE_FACTOR * spared_s * min(1.0, underway / max(1, fetch.total)),
        )
        self._clock.at(max(self._clock.now, limit_s), self._too_late, fetch, fetch.arrived)

    def _too_late(self, fetch: ChunkFetch, arrived: int) -> None:
        if not fetch.ended and fetch.arrived == arrived:
            self._end(fetch, told=True, ended_early=True)

    def _end(self, fetch: ChunkFetch, *, told: bool, ended_early: bool) -> None:
        if fetch.ended:
            return
        fetch.ended = True
        del self._running[fetch]
        self.ledger.running -= 1
        for channel in list(fetch.channels.values()):
            self._close(channel)
        now_s, wanted = self._clock.now, fetch.wanted
        scores = wanted.node.scores
        for peer in fetch.nodes:
            if fetch.brought.get(peer):
                scores.delivered(peer, fetch.brought[peer], now_s - fetch.began_s, now_s)
            elif not fetch.nodes[peer].setup.liar:
                scores.waited(peer, wanted.chunk_bytes, now_s - fetch.began_s, now_s)
        if told:
            tokens = wanted.tokens_after(fetch.whole_blocks)
            most = max(fetch.brought, key=lambda peer: fetch.brought[peer], default=None)
            provider = None if most is None else fetch.nodes[most]
            wanted.done(Brought(tokens, sum(fetch.brought.values()), provider, ended_early))
