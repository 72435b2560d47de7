"""A simulated network: many nodes in one process, links with latency, rate and faults, under any trio clock.

Nothing here sleeps except on trio's clock, uses threads, or draws random numbers: under a `MockClock` a run is
repeatable and costs no real time. A `World` holds the nodes and the links between them::

    world = World(default_link=Link(latency_s=0.01))
    a, b = world.network("a"), world.network("b")

Faults are methods of the world: `partition`, `heal`, `hang` (a stopped process: everything waits), `kill` (a dead
process: its streams end as if it had closed them, dials fail), `lose_records`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import trio

from kvnet.errors import NetworkError, PeerRefusedError, PeerUnreachableError, UsageError
from kvnet.format.hashes import dht_key
from kvnet.network.dialing import FailureMemory, dial_first, keep_connected
from kvnet.network.interface import (
    STREAM_WINDOW_BYTES,
    ByteStream,
    PeerInfo,
    ProvideReport,
    ProviderHint,
    StreamHandler,
    StreamKind,
)
from kvnet.network.serving import serve_stream
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text

if TYPE_CHECKING:
    from trio_typing import TaskStatus

SLOW_READER_LIMIT_S = 5.0
"""How long a sender waits for a reader that takes nothing; the value of the real multiplexer (Yamux in py-libp2p)."""

MAX_STREAMS_PER_PEER = 32
"""Streams of one peer served at a time."""

DHT_RECORDS_PER_WINDOW = 10
DHT_WINDOW_S = 10.0
"""A real DHT server keeps this many records per sender in this time and silently drops the rest."""

DHT_SERVERS_PER_KEY = 20
"""Kademlia's k: how many servers a provider record is sent to."""

_SEGMENT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes.

    Attributes:
        latency_s: one-way delay in seconds.
        rate_bytes_per_s: capacity shared by all streams of this direction; None is unlimited.
    """

    latency_s: float = 0.0
    rate_bytes_per_s: float | None = None


Watch = Callable[[str, PeerId, PeerId, bytes], None]
"""Told of everything that leaves a node: on which stream (or ``dht``), from whom, to whom, and the bytes."""


class World:
    """The nodes of one simulation and what connects them.

    Args:
        default_link: what joins two nodes unless `set_link` says otherwise.
        dial_timeout_s: after how long a dial that nobody answers fails by itself.
        record_ttl_s: how long DHT servers keep a provider record.

    Attributes:
        watch: sees all that is sent, as somebody would who had broken the transport's encryption.
    """

    def __init__(
        self, *, default_link: Link = Link(), dial_timeout_s: float = 10.0, record_ttl_s: float = 48 * 3600.0
    ) -> None:
        self.default_link = default_link
        self.dial_timeout_s = dial_timeout_s
        self.record_ttl_s = record_ttl_s
        self._networks: dict[PeerId, MemoryNetwork] = {}
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._groups: list[frozenset[PeerId]] = []
        self._hung: set[PeerId] = set()
        self._changed = trio.Event()
        self.numbers = count()
        self.watch: Watch = lambda _stream, _source, _target, _data: None

    def network(
        self, name: str, *, bootstrap: Iterable[str] = (), rebootstrap_interval_s: float = 30.0
    ) -> "MemoryNetwork":
        """Add a node; its peer id follows from `name`. It is reachable while its `run` is."""
        added = MemoryNetwork(self, name, tuple(bootstrap), rebootstrap_interval_s)
        if added.peer_id in self._networks:
            raise UsageError(f"expected a new node name, found {name!r} twice")
        self._networks[added.peer_id] = added
        return added

    def set_link(self, a: "MemoryNetwork", b: "MemoryNetwork", link: Link, *, both_ways: bool = True) -> None:
        """Say what joins `a` to `b`."""
        self._links[a.peer_id, b.peer_id] = link
        if both_ways:
            self._links[b.peer_id, a.peer_id] = link

    def partition(self, *groups: Iterable["MemoryNetwork"]) -> None:
        """Let only nodes of the same group reach each other; nodes in no group reach nobody."""
        self._groups = [frozenset(n.peer_id for n in group) for group in groups]
        self._wake()

    def heal(self) -> None:
        """End any partition."""
        self._groups = []
        self._wake()

    def hang(self, network: "MemoryNetwork") -> None:
        """Stop a node as SIGSTOP would: nothing it sends leaves, nothing it is sent arrives, nothing is reset."""
        self._hung.add(network.peer_id)
        self._wake()

    def resume(self, network: "MemoryNetwork") -> None:
        """Undo `hang`."""
        self._hung.discard(network.peer_id)
        self._wake()

    def kill(self, network: "MemoryNetwork") -> None:
        """End a node as SIGKILL would: its streams end, its `run` is cancelled, dials to it fail at once."""
        network._stop()
        self._wake()

    def lose_records(self, network: "MemoryNetwork") -> None:
        """Empty a node's DHT tables, as a restart with an empty data directory would."""
        network._records.clear()
        network._routing.clear()

    def find(self, peer: PeerId) -> "MemoryNetwork | None":
        """The running node with this peer id."""
        found = self._networks.get(peer)
        return found if found is not None and found._running else None

    def link(self, a: PeerId, b: PeerId) -> Link:
        """What joins `a` to `b`."""
        return self._links.get((a, b), self.default_link)

    def passes(self, a: PeerId, b: PeerId) -> bool:
        """Whether bytes move between `a` and `b` now."""
        if a in self._hung or b in self._hung:
            return False
        return not self._groups or any(a in group and b in group for group in self._groups)

    async def wait_until_passes(self, a: PeerId, b: PeerId) -> None:
        """Wait until bytes move between `a` and `b`."""
        while not self.passes(a, b):
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@dataclass(slots=True)
class _Wire:
    """The shared capacity of one direction: when it is free again."""

    free_at_s: float = 0.0


@dataclass(slots=True)
class _Pipe:
    """One direction of one stream: what was sent and when it arrives."""

    world: World
    source: PeerId
    target: PeerId
    wire: _Wire
    name: str
    in_flight: deque[tuple[float, bytes]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    ended_at_s: float | None = None
    broken: str | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def end(self) -> None:
        if self.ended_at_s is None:
            self.ended_at_s = max(trio.current_time(), self.wire.free_at_s) + self._latency_s()
            self.wake()

    def break_off(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
            self.in_flight.clear()
            self.in_flight_bytes = 0
            self.wake()

    def _latency_s(self) -> float:
        return self.world.link(self.source, self.target).latency_s

    async def send(self, segment: bytes) -> None:
        await self._wait_for_room()
        self.world.watch(self.name, self.source, self.target, segment)
        rate = self.world.link(self.source, self.target).rate_bytes_per_s
        now_s = trio.current_time()
        leaves_at_s = now_s if rate is None else max(now_s, self.wire.free_at_s) + len(segment) / rate
        self.wire.free_at_s = leaves_at_s
        self.in_flight.append((leaves_at_s + self._latency_s(), segment))
        self.in_flight_bytes += len(segment)
        self.wake()
        await trio.sleep(leaves_at_s - now_s)

    async def _wait_for_room(self) -> None:
        while self.broken is None and self.in_flight_bytes >= 2 * STREAM_WINDOW_BYTES:
            before = self.in_flight_bytes
            with trio.move_on_after(SLOW_READER_LIMIT_S):
                await self.changed.wait()
            if self.in_flight_bytes >= before and self.world.passes(self.source, self.target):
                self.break_off(f"expected the reader to take something within {SLOW_READER_LIMIT_S:g} s, it did not")
        if self.broken is not None:
            raise NetworkError(f"the stream was reset: {self.broken}")
        if self.ended_at_s is not None:
            raise NetworkError("the stream is closed for sending")

    async def receive(self, max_bytes: int) -> bytes:
        """Between 1 and `max_bytes` bytes, or ``b""`` at the end."""
        while True:
            await self.world.wait_until_passes(self.source, self.target)
            if self.broken is not None:
                raise NetworkError(f"the stream was reset: {self.broken}")
            arrives_at_s = self.in_flight[0][0] if self.in_flight else self.ended_at_s
            if arrives_at_s is None:
                await self.changed.wait()
            elif arrives_at_s > trio.current_time():
                with trio.move_on_at(arrives_at_s):
                    await self.changed.wait()
            elif self.in_flight:
                return self._take(max_bytes)
            else:
                return b""

    def _take(self, max_bytes: int) -> bytes:
        due_s, segment = self.in_flight.popleft()
        if len(segment) > max_bytes:
            self.in_flight.appendleft((due_s, segment[max_bytes:]))
            segment = segment[:max_bytes]
        self.in_flight_bytes -= len(segment)
        self.wake()
        return segment


class MemoryStream(ByteStream):
    """One end of a simulated stream."""

    def __init__(
        self, owner: "MemoryNetwork", peer: PeerId, kind: StreamKind, outgoing: _Pipe, incoming: _Pipe
    ) -> None:
        self.idle_timeout_s = kind.default_idle_timeout_s
        self._owner = owner
        self._peer = peer
        self._kind = kind
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    @property
    def peer(self) -> PeerId:
        """The other node."""
        return self._peer

    @property
    def kind(self) -> StreamKind:
        """Which protocol the stream speaks."""
        return self._kind

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream.send_all`."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _SEGMENT_BYTES):
                await self._outgoing.send(bytes(view[start : start + _SEGMENT_BYTES]))
        except trio.Cancelled:
            self._break_off("sending was cancelled")
            raise

    async def receive_exactly(self, n_bytes: int) -> bytes:
        """See `ByteStream.receive_exactly`."""
        received = bytearray()
        while len(received) < n_bytes:
            part = await self.receive_some(n_bytes - len(received))
            if not part:
                raise NetworkError(f"expected {n_bytes} bytes, the stream ended after {len(received)}")
            received += part
        return bytes(received)

    async def receive_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.receive_some`."""
        if self._closed:
            raise NetworkError("the stream is closed")
        limit_s = self.idle_timeout_s
        part = b""
        with trio.move_on_after(float("inf") if limit_s is None else limit_s) as scope:
            part = await self._incoming.receive(max_bytes)
        if scope.cancelled_caught:
            await self._owner.disconnect(self._peer)
            raise PeerUnreachableError(f"expected something from the peer within {limit_s:g} s, found silence")
        return part

    async def aclose(self) -> None:
        """See `ByteStream.aclose`."""
        self._closed = True
        self._outgoing.end()
        self._owner._streams.discard(self)
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `ByteStream.reset`."""
        self._break_off("given up by one side")
        await trio.lowlevel.checkpoint()

    def _break_off(self, reason: str) -> None:
        self._closed = True
        self._outgoing.break_off(reason)
        self._incoming.break_off(reason)
        self._owner._streams.discard(self)

    def _end_with_process(self) -> None:
        """What the other side sees of a killed process: a clean end, and nobody who reads."""
        self._closed = True
        self._outgoing.end()
        self._incoming.break_off("the peer is gone")
        self._owner._streams.discard(self)


class MemoryNetwork:
    """A node of a `World`; the `Network` contract. Made by `World.network`."""

    def __init__(self, world: World, name: str, bootstrap: tuple[str, ...], rebootstrap_interval_s: float) -> None:
        self.name = name
        self._world = world
        digest = hashlib.sha256(b"memory peer " + name.encode()).digest()
        # The shape of a real Ed25519 peer id: identity multihash of a protobuf with a 32-byte key.
        self._peer_id = PeerId(bytes.fromhex("002408011220") + digest)
        self._bootstrap = bootstrap
        self._rebootstrap_interval_s = rebootstrap_interval_s
        self._running = False
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._handlers: dict[StreamKind, StreamHandler] = {}
        self._connections: set[PeerId] = set()
        self._streams: set[MemoryStream] = set()
        self._wires: dict[PeerId, _Wire] = {}
        self._failures = FailureMemory()
        self._routing: dict[PeerId, None] = {}
        self._records: dict[bytes, dict[PeerId, tuple[float, tuple[str, ...]]]] = {}
        self._arrivals: dict[PeerId, tuple[float, int]] = {}

    @property
    def peer_id(self) -> PeerId:
        """Who this node is."""
        return self._peer_id

    def addresses(self) -> list[str]:
        """One simulated address while the node runs."""
        return [self.address] if self._running else []

    def listening(self) -> list[str]:
        """The same: nothing simulated listens on several addresses."""
        return self.addresses()

    @property
    def address(self) -> str:
        """Where the node is reached while it runs; known beforehand, for bootstrap lists."""
        return f"/memory/{self.name}/p2p/{peer_text(self._peer_id)}"

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """See `Network.run`. May run again after it ended: a restarted node."""
        self._scope = trio.CancelScope()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._running = True
                    self._world._wake()
                    task_status.started()
                    await keep_connected(self, self._bootstrap, interval_s=self._rebootstrap_interval_s)
                    await trio.sleep_forever()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        self._nursery = None
        self._scope.cancel()
        for peer in list(self._connections):
            self._forget_connection(peer)

    def _forget_connection(self, peer: PeerId) -> None:
        self._connections.discard(peer)
        for stream in [s for s in self._streams if s.peer == peer]:
            stream._end_with_process()
        other = self._world._networks.get(peer)
        if other is not None and self._peer_id in other._connections:
            other._connections.discard(self._peer_id)

    def set_handler(self, kind: StreamKind, handler: StreamHandler) -> None:
        """See `Network.set_handler`."""
        self._handlers[kind] = handler

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """See `Network.connect`."""
        peer = parse_memory_address(address)
        if not self._running:
            raise PeerUnreachableError("expected a running network to dial from, it has ended or not begun")
        if peer not in self._connections:
            await self._reach(peer, timeout_s, "an answer to the dial")
            other = self._world.find(peer)
            if other is None or peer == self._peer_id:
                raise PeerUnreachableError(f"expected a node at {address}, nobody listens there")
            self._failures.note_success(address)
            for one, another in ((self, other), (other, self)):
                one._connections.add(another._peer_id)
                one._routing[another._peer_id] = None
        await trio.lowlevel.checkpoint()
        return peer

    async def connect_hint(self, hint: ProviderHint, *, timeout_s: float = 5.0) -> PeerId:
        """See `Network.connect_hint`."""
        if hint.peer in self._connections:
            return hint.peer
        usable = self._failures.usable_addresses(hint.addresses, trio.current_time())
        if not usable:
            raise PeerUnreachableError(f"expected an address to try, all {len(hint.addresses)} failed lately")

        async def dial(address: str) -> PeerId:
            try:
                if parse_memory_address(address) != hint.peer:
                    raise PeerUnreachableError(f"expected an address of the peer, {address} is somebody else's")
                return await self.connect(address, timeout_s=timeout_s)
            except (NetworkError, UsageError) as error:
                self._failures.note_failure(address, trio.current_time())
                raise PeerUnreachableError(str(error)) from error

        return await dial_first(usable, dial)

    async def disconnect(self, peer: PeerId) -> None:
        """See `Network.disconnect`."""
        self._forget_connection(peer)
        for stream in [s for s in self._streams if s.peer == peer]:
            stream._break_off("disconnected")
        await trio.lowlevel.checkpoint()

    async def probe(self, peer: PeerId, *, timeout_s: float = 3.0) -> None:
        """See `Network.probe`."""
        if peer not in self._connections:
            return
        try:
            await self._reach(peer, timeout_s, "an answer to a ping")
        except NetworkError:
            await self.disconnect(peer)

    async def open_stream(self, peer: PeerId, kind: StreamKind, *, timeout_s: float = 10.0) -> MemoryStream:
        """See `Network.open_stream`."""
        if peer not in self._connections:
            raise PeerUnreachableError("expected a connection to the peer, there is none")
        await self._reach(peer, timeout_s, "an answer to the new stream")
        other = self._world.find(peer)
        if other is None or other._nursery is None or peer not in self._connections:
            raise PeerUnreachableError("expected the peer to answer, it is gone")
        handler = other._handlers.get(kind)
        if handler is None:
            raise PeerRefusedError(f"expected the peer to speak {kind.value}, it does not", reason="protocol")
        if sum(1 for s in other._streams if s.peer == self._peer_id) >= MAX_STREAMS_PER_PEER:
            raise PeerRefusedError(
                f"expected fewer than {MAX_STREAMS_PER_PEER} streams to the peer", reason="too_many_streams"
            )
        name = f"{kind.value} {next(self._world.numbers)}"
        there = _Pipe(self._world, self._peer_id, peer, self._wires.setdefault(peer, _Wire()), name)
        back = _Pipe(self._world, peer, self._peer_id, other._wires.setdefault(self._peer_id, _Wire()), name)
        ours = MemoryStream(self, peer, kind, there, back)
        theirs = MemoryStream(other, self._peer_id, kind, back, there)
        self._streams.add(ours)
        other._streams.add(theirs)
        other._nursery.start_soon(serve_stream, handler, theirs)
        return ours

    async def _reach(self, peer: PeerId, timeout_s: float, expected: str) -> None:
        """Spend the round trip to a peer, or the time until it is clear that there is none."""
        link, back = self._world.link(self._peer_id, peer), self._world.link(peer, self._peer_id)
        limit_s = min(timeout_s, self._world.dial_timeout_s)
        with trio.move_on_after(limit_s) as scope:
            await trio.sleep(link.latency_s + back.latency_s)
            await self._world.wait_until_passes(self._peer_id, peer)
        if scope.cancelled_caught:
            raise PeerUnreachableError(f"expected {expected} within {limit_s:g} s, found silence")

    def connected(self) -> list[PeerInfo]:
        """See `Network.connected`."""
        known = self._world._networks
        return [PeerInfo(p, (known[p].address,)) for p in sorted(self._connections)]

    async def provide(self, key32: bytes, *, report: ProvideReport | None = None) -> None:
        """See `Network.provide`. Records go to the nodes found from our routing table, like a small real DHT."""
        dht_key(key32)
        if self._nursery is None:
            raise NetworkError("expected a running network to announce on, it has not started")
        self._nursery.start_soon(self._provide, key32, report)
        await trio.lowlevel.checkpoint()

    async def _provide(self, key32: bytes, report: ProvideReport | None) -> None:
        now_s = trio.current_time()
        self._records.setdefault(key32, {})[self._peer_id] = (now_s, (self.address,))
        sent_to = 0
        for server in self._dht_servers()[:DHT_SERVERS_PER_KEY]:
            with suppress(NetworkError):
                await self._reach(server._peer_id, 10.0, "an answer from a DHT server")
                self._world.watch("dht", self._peer_id, server._peer_id, key32)
                sent_to += server._keep_record(key32, self._peer_id, self.address)
        if report is not None:
            report(key32, sent_to)

    def _keep_record(self, key32: bytes, provider: PeerId, address: str) -> bool:
        now_s = trio.current_time()
        started_s, count = self._arrivals.get(provider, (now_s, 0))
        if now_s - started_s >= DHT_WINDOW_S:
            started_s, count = now_s, 0
        if count >= DHT_RECORDS_PER_WINDOW:
            return False
        self._arrivals[provider] = started_s, count + 1
        self._records.setdefault(key32, {})[provider] = (now_s, (address,))
        return True

    def _dht_servers(self) -> list["MemoryNetwork"]:
        """Running nodes reachable through routing tables, ourselves excluded."""
        seen: dict[PeerId, MemoryNetwork] = {}
        front = [self]
        while front:
            for peer in front.pop()._routing:
                node = self._world.find(peer)
                if node is not None and peer != self._peer_id and peer not in seen:
                    seen[peer] = node
                    front.append(node)
        return list(seen.values())

    async def find_providers(self, key32: bytes, *, limit: int = 20, timeout_s: float = 10.0) -> list[ProviderHint]:
        """See `Network.find_providers`."""
        found: dict[PeerId, tuple[str, ...]] = {}
        with trio.move_on_after(timeout_s):
            self._collect(self, key32, found)
            for server in self._dht_servers():
                with suppress(NetworkError):
                    await self._reach(server._peer_id, 10.0, "an answer from a DHT server")
                    self._world.watch("dht", self._peer_id, server._peer_id, key32)
                    self._collect(server, key32, found)
        await trio.lowlevel.checkpoint_if_cancelled()
        now_s = trio.current_time()

        def rank(peer: PeerId) -> tuple[bool, bool]:
            return peer not in self._connections, not self._failures.usable_addresses(found[peer], now_s)

        return [ProviderHint(p, found[p]) for p in sorted(found, key=rank)][:limit]

    async def is_announced(self, key32: bytes, *, timeout_s: float = 10.0) -> bool | None:
        """See `Network.is_announced`."""
        answered = False
        with trio.move_on_after(timeout_s):
            for server in self._dht_servers():
                with suppress(NetworkError):
                    await self._reach(server._peer_id, 10.0, "an answer from a DHT server")
                    answered = True
                    kept = server._records.get(key32, {}).get(self._peer_id)
                    if kept is not None and kept[0] > trio.current_time() - self._world.record_ttl_s:
                        return True
        await trio.lowlevel.checkpoint_if_cancelled()
        return False if answered else None

    def _collect(self, server: "MemoryNetwork", key32: bytes, found: dict[PeerId, tuple[str, ...]]) -> None:
        oldest_s = trio.current_time() - self._world.record_ttl_s
        for provider, (kept_at_s, addresses) in server._records.get(key32, {}).items():
            if provider != self._peer_id and kept_at_s > oldest_s:
                found[provider] = addresses

    def routing_peers(self) -> int:
        """See `Network.routing_peers`."""
        return len(self._routing)


def parse_memory_address(address: str) -> PeerId:
    """The peer id of a simulated address.

    Raises:
        UsageError: it is not one.
    """
    parts = address.split("/")
    if len(parts) != 5 or parts[1] != "memory" or parts[3] != "p2p":
        raise UsageError(f"expected an address like /memory/NAME/p2p/ID, found {address!r}")
    return parse_peer_text(parts[4])
