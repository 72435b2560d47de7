"""A simulated network: many nodes in one process, links with latency, rate and faults, under any trio clock.

Nothing here sleeps except on trio's clock, uses threads, or draws random numbers: under a `MockClock` a run is
repeatable and costs no real time. A `World` holds the nodes and the links between them::

    world = World(default_link=Link(latency_s=0.01))
    a, b = world.network("a"), world.network("b")

Faults are methods of the world: `partition`, `heal`, `hang` (a stopped process: everything waits), `kill` (a dead
process: its streams end as if it had closed them, dials fail), `lose_records`.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import trio

from kvnet.errors import NetworkError, PeerRefusedError, PeerUnreachableError, UsageError
from kvnet.format.hashes import dht_key
from kvnet.network.dialing import FailureMemory, dial_first, keep_connected
from kvnet.network.interface import PeerInfo, ProvideReport, ProviderHint, StreamHandler, StreamKind
from kvnet.network.memory_links import UNLIMITED, Link, Links
from kvnet.network.memory_records import ProviderTable
from kvnet.network.memory_streams import MemoryStream, Pipe, Wire
from kvnet.network.serving import serve_stream
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text

if TYPE_CHECKING:
    from trio_typing import TaskStatus

MAX_STREAMS_PER_PEER = 32
"""Streams of one peer served at a time."""

DHT_SERVERS_PER_KEY = 20
"""Kademlia's k: how many servers a provider record is sent to."""


class World:
    """The nodes of one simulation and what connects them.

    Args:
        default_link: what joins two nodes unless `set_link` says otherwise.
        dial_timeout_s: after how long a dial that nobody answers fails by itself.
        record_ttl_s: how long DHT servers keep a provider record.

    Attributes:
        links: what joins them; its `watch` sees all that is sent.
    """

    def __init__(
        self, *, default_link: Link = UNLIMITED, dial_timeout_s: float = 10.0, record_ttl_s: float = 48 * 3600.0
    ) -> None:
        self.dial_timeout_s = dial_timeout_s
        self.record_ttl_s = record_ttl_s
        self._networks: dict[PeerId, MemoryNetwork] = {}
        self.numbers = count()
        self.links = Links(default_link)

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
        self.links.join(a.peer_id, b.peer_id, link)
        if both_ways:
            self.links.join(b.peer_id, a.peer_id, link)

    def partition(self, *groups: Iterable["MemoryNetwork"]) -> None:
        """Let only nodes of the same group reach each other; nodes in no group reach nobody."""
        self.links.part(frozenset(n.peer_id for n in group) for group in groups)

    def heal(self) -> None:
        """End any partition."""
        self.links.part([])

    def hang(self, network: "MemoryNetwork") -> None:
        """Stop a node as SIGSTOP would: nothing it sends leaves, nothing it is sent arrives, nothing is reset."""
        self.links.hang(network.peer_id)

    def resume(self, network: "MemoryNetwork") -> None:
        """Undo `hang`."""
        self.links.resume(network.peer_id)

    def kill(self, network: "MemoryNetwork") -> None:
        """End a node as SIGKILL would: its streams end, its `run` is cancelled, dials to it fail at once."""
        network._stop()
        self.links.wake()

    def lose_records(self, network: "MemoryNetwork") -> None:
        """Empty a node's DHT tables, as a restart with an empty data directory would."""
        network._records.clear()
        network._routing.clear()

    def find(self, peer: PeerId) -> "MemoryNetwork | None":
        """The running node with this peer id."""
        found = self._networks.get(peer)
        return found if found is not None and found._running else None


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
        self._wires: dict[PeerId, Wire] = {}
        self._failures = FailureMemory()
        self._routing: dict[PeerId, None] = {}
        self._records = ProviderTable()

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
                    self._world.links.wake()
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
            stream.end_with_process()
        other = self._world._networks.get(peer)
        if other is not None and self._peer_id in other._connections:
            other._connections.discard(self._peer_id)

    def forget_stream(self, stream: MemoryStream) -> None:
        """See `StreamOwner.forget_stream`."""
        self._streams.discard(stream)

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
            stream.break_off("disconnected")
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
        there = Pipe(self._world.links, self._peer_id, peer, self._wires.setdefault(peer, Wire()), name)
        back = Pipe(self._world.links, peer, self._peer_id, other._wires.setdefault(self._peer_id, Wire()), name)
        ours = MemoryStream(self, peer, kind, there, back)
        theirs = MemoryStream(other, self._peer_id, kind, back, there)
        self._streams.add(ours)
        other._streams.add(theirs)
        other._nursery.start_soon(serve_stream, handler, theirs)
        return ours

    async def _reach(self, peer: PeerId, timeout_s: float, expected: str) -> None:
        """Spend the round trip to a peer, or the time until it is clear that there is none."""
        links = self._world.links
        link, back = links.of(self._peer_id, peer), links.of(peer, self._peer_id)
        limit_s = min(timeout_s, self._world.dial_timeout_s)
        with trio.move_on_after(limit_s) as scope:
            await trio.sleep(link.latency_s + back.latency_s)
            await links.wait_until_passes(self._peer_id, peer)
        if scope.cancelled_caught:
            raise PeerUnreachableError(f"expected {expected} within {limit_s:g} s, found silence")

    def connected(self) -> list[PeerInfo]:
        """See `Network.connected`."""
        known = self._world._networks
        return [PeerInfo(p, (known[p].address,)) for p in sorted(self._connections)]

    def seen_at(self, peer: PeerId) -> list[str]:  # noqa: ARG002 - simulated peers have no IP address
        """See `Network.seen_at`."""
        return []

    async def provide(self, key32: bytes, *, report: ProvideReport | None = None) -> None:
        """See `Network.provide`. Records go to the nodes found from our routing table, like a small real DHT."""
        dht_key(key32)
        if self._nursery is None:
            raise NetworkError("expected a running network to announce on, it has not started")
        self._nursery.start_soon(self._provide, key32, report)
        await trio.lowlevel.checkpoint()

    async def _provide(self, key32: bytes, report: ProvideReport | None) -> None:
        self._records.put(key32, self._peer_id, self.address)
        sent_to = 0
        for server in self._dht_servers()[:DHT_SERVERS_PER_KEY]:
            with suppress(NetworkError):
                await self._reach(server._peer_id, 10.0, "an answer from a DHT server")
                self._world.links.watch("dht", self._peer_id, server._peer_id, key32)
                sent_to += server._records.take(key32, self._peer_id, self.address)
        if report is not None:
            report(key32, sent_to)

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
        dht_key(key32)
        ttl_s = self._world.record_ttl_s
        found: dict[PeerId, tuple[str, ...]] = {}
        with trio.move_on_after(timeout_s):
            found |= self._records.find(key32, ttl_s)
            for server in self._dht_servers():
                with suppress(NetworkError):
                    await self._reach(server._peer_id, 10.0, "an answer from a DHT server")
                    self._world.links.watch("dht", self._peer_id, server._peer_id, key32)
                    found |= server._records.find(key32, ttl_s)
        await trio.lowlevel.checkpoint_if_cancelled()
        found.pop(self._peer_id, None)
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
                    if self._peer_id in server._records.find(key32, self._world.record_ttl_s):
                        return True
        await trio.lowlevel.checkpoint_if_cancelled()
        return False if answered else None

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
