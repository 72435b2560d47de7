"""A node on the libp2p network."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht.common import PROTOCOL_ID as DHT_PROTOCOL
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from kvnet.errors import NetworkError, PeerUnreachableError, UsageError, elsewhere
from kvnet.network.dialing import FailureMemory, dial_first, keep_connected
from kvnet.network.interface import PeerInfo, ProvideReport, ProviderHint, StreamHandler, StreamKind
from kvnet.network.libp2p.addresses import parse_peer_address
from kvnet.network.libp2p.assembly import MAX_CONNECTIONS, build_host, dht_handler, guard_handlers
from kvnet.network.libp2p.connections import abort, abort_all, is_alive, quietly, swarm_of
from kvnet.network.libp2p.identity import key_pair, peer_id_of_seed
from kvnet.network.libp2p.muxer import SafeYamux
from kvnet.network.libp2p.ports import DEFAULT_PORT, BoundSocket, open_listeners
from kvnet.network.libp2p.providers import ProviderRecords
from kvnet.network.libp2p.quiet import quieten
from kvnet.network.libp2p.streams import LibP2PStream
from kvnet.network.libp2p.translate import FOREIGN, translate_dial, translate_open
from kvnet.network.places import split_scoped
from kvnet.network.serving import serve_stream
from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus


MAX_STREAMS_PER_PEER = 32
"""Streams of our own protocols that a peer may hold open; each costs a task and up to 32 MiB of buffer."""


ADDRESS_TTL_S = 24 * 3600
"""How long the addresses of a peer we reached are kept."""

DEFAULT_REBOOTSTRAP_INTERVAL_S = 30.0


class LibP2PNetwork:
    """The `Network` contract over libp2p: TCP, Noise, Yamux, Kademlia.

    Args:
        seed: the peer key's Ed25519 seed, 32 bytes (see `kvnet.network.libp2p.identity`).
        listen: where to listen (see `kvnet.network.libp2p.ports.parse_listen`); None means everywhere on
            `default_port`, or on any free port when that one is taken.
        default_port: see `listen`.
        bootstrap: multiaddrs of peers to stay connected to; the DHT is entered through them.
        rebootstrap_interval_s: longest pause between attempts to reach a bootstrap peer that is away.
    """

    def __init__(
        self,
        seed: bytes,
        *,
        listen: Sequence[str] | None = None,
        default_port: int = DEFAULT_PORT,
        bootstrap: Sequence[str] = (),
        rebootstrap_interval_s: float = DEFAULT_REBOOTSTRAP_INTERVAL_S,
    ) -> None:
        self._key_pair = key_pair(seed)
        self._peer_id = peer_id_of_seed(seed)
        self._listen = listen
        self._default_port = default_port
        self._bootstrap = tuple(bootstrap)
        self._rebootstrap_interval_s = rebootstrap_interval_s
        self._handlers: dict[StreamKind, StreamHandler] = {}
        self._failures = FailureMemory()
        # Kept out of the peerstore, whose addresses are told to others: an interface's name is this machine's own.
        self._link_local: dict[PeerId, str] = {}
        self._inbound: Counter[PeerId] = Counter()
        self._nursery: trio.Nursery | None = None
        self._host: BasicHost | None = None
        self._providers: ProviderRecords | None = None
        for address in self._bootstrap:
            parse_peer_address(address)

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self._peer_id

    def addresses(self) -> list[str]:
        """Where we can be reached, wildcards replaced by this machine's addresses; empty before `run` has started."""
        return [] if self._host is None else [str(address) for address in self._host.get_addrs()]

    def listening(self) -> list[str]:
        """See `Network.listening`."""
        return [] if self._host is None else [str(address) for address in self._host.get_transport_addrs()]

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """See `Network.run`."""
        quieten()
        bound = {
            b.multiaddr: b
            for b in await trio.to_thread.run_sync(
                lambda: open_listeners(self._listen, default_port=self._default_port)
            )
        }
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                async with self._running_host(bound, nursery) as host, self._running_dht(host):
                    task_status.started()
                    await keep_connected(self, self._bootstrap, interval_s=self._rebootstrap_interval_s)
                    await trio.sleep_forever()
        finally:
            self._host = self._nursery = self._providers = None
            for each in bound.values():
                each.socket.close()

    @asynccontextmanager
    async def _running_host(self, bound: Mapping[str, BoundSocket], nursery: trio.Nursery) -> AsyncIterator[BasicHost]:
        host = build_host(self._key_pair, bound, nursery)
        guard_handlers(host)
        for kind, handler in self._handlers.items():
            self._register(host, kind, handler)
        async with host.run(listen_addrs=[Multiaddr(text) for text in bound]):
            if len(host.get_transport_addrs()) != len(bound):
                raise NetworkError(f"expected to listen on {', '.join(bound)}, py-libp2p did not start all of them")
            self._host = host
            try:
                yield host
            finally:
                await abort_all(swarm_of(host))

    @asynccontextmanager
    async def _running_dht(self, host: BasicHost) -> AsyncIterator[None]:
        dht = KadDHT(host, DHTMode.SERVER, strict_validation=True)
        host.set_stream_handler(DHT_PROTOCOL, dht_handler(dht))
        self._providers = ProviderRecords(self, dht, host)
        async with background_trio_service(dht):
            self.start_task(self._providers.run)
            yield

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that raises nothing, until the host stops; does nothing when it has stopped."""
        if self._nursery is not None:
            self._nursery.start_soon(task)

    # --- connections -------------------------------------------------------------------------------------------------

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """See `Network.connect`."""
        target, peer = parse_peer_address(address)
        if not self._is_connected(peer):
            await self._dial(target, peer, address, timeout_s)
            await self._enter_dht(peer)
        await trio.lowlevel.checkpoint()
        return peer

    async def connect_hint(self, hint: ProviderHint, *, timeout_s: float = 5.0) -> PeerId:
        """See `Network.connect_hint`."""
        if self._is_connected(hint.peer):
            await trio.lowlevel.checkpoint()
            return hint.peer
        usable = self._failures.usable_addresses(hint.addresses, trio.current_time())
        if not usable:
            raise PeerUnreachableError(
                f"expected an address of the peer to try, all {len(hint.addresses)} of them failed lately"
            )

        async def dial(address: str) -> PeerId:
            try:
                target, peer = parse_peer_address(address)
            except UsageError as error:
                self._failures.note_failure(address, trio.current_time())
                raise PeerUnreachableError(str(error)) from error
            if peer != hint.peer or split_scoped(address):
                raise PeerUnreachableError(f"expected an address of the peer, {address} is somebody else's")
            await self._dial(target, peer, address, timeout_s)
            return peer

        return await dial_first(usable, dial)

    async def _dial(self, target: Multiaddr, peer: PeerId, address: str, timeout_s: float) -> None:
        """Dial one address of one peer; several dials of one peer may run side by side."""
        host = self._running()
        if peer == self._peer_id:
            raise PeerUnreachableError(
                f"expected another node's address, found this node's own: {address}",
                hint=f"`{elsewhere('kvnet node status')}` on the other machine shows its addresses",
            )
        try:
            with trio.fail_after(timeout_s):
                await swarm_of(host).dial_addr(target, ID(peer))
        except trio.TooSlowError as error:
            self._note_failure(peer, address)
            raise PeerUnreachableError(f"expected an answer at {address} within {timeout_s:g} s, found none") from error
        except FOREIGN as error:
            self._note_failure(peer, address)
            raise translate_dial(error, address) from error
        self._failures.note_success(address)
        swarm_of(host).unblock_peer(ID(peer))
        if split_scoped(address):
            self._link_local[peer] = address
            while len(self._link_local) > MAX_CONNECTIONS:
                del self._link_local[next(iter(self._link_local))]
        else:
            host.get_peerstore().add_addrs(ID(peer), [target], ADDRESS_TTL_S)

    def _note_failure(self, peer: PeerId, address: str) -> None:
        self._failures.note_failure(address, trio.current_time())
        if self._link_local.get(peer) == address:
            del self._link_local[peer]

    async def _enter_dht(self, peer: PeerId) -> None:
        if self._providers is not None:
            await self._providers.note_peer(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """See `Network.disconnect`. The sockets go first: a peer that is stuck cannot hold us up."""
        host = self._host
        if host is None:
            return
        for connection in list(swarm_of(host).get_connections(ID(peer))):
            await abort(connection)
            self.start_task(quietly(connection.close))

    async def probe(self, peer: PeerId, *, timeout_s: float = 3.0) -> None:
        """See `Network.probe`."""
        if self._host is None:
            return

        async def check(connection: INetConn) -> None:
            muxed = connection.muxed_conn
            if isinstance(muxed, SafeYamux) and not await muxed.answers(timeout_s):
                await abort(connection)
                self.start_task(quietly(connection.close))

        async with trio.open_nursery() as nursery:
            for connection in filter(is_alive, list(swarm_of(self._host).get_connections(ID(peer)))):
                nursery.start_soon(check, connection)

    def _is_connected(self, peer: PeerId) -> bool:
        return any(is_alive(c) for c in swarm_of(self._running()).get_connections(ID(peer)))

    def connected(self) -> list[PeerInfo]:
        """See `Network.connected`."""
        if self._host is None:
            return []
        connections = swarm_of(self._host).get_connections_map()
        live = [peer for peer, each in connections.items() if any(is_alive(c) for c in each)]
        return [PeerInfo(PeerId(p.to_bytes()), tuple(self.known_addresses(PeerId(p.to_bytes())))) for p in live]

    def seen_at(self, peer: PeerId) -> list[str]:
        """See `Network.seen_at`."""
        if self._host is None:
            return []
        live = filter(is_alive, list(swarm_of(self._host).get_connections(ID(peer))))
        ends = [each.muxed_conn.get_remote_address() for each in live if isinstance(each.muxed_conn, SafeYamux)]
        return list(dict.fromkeys(end[0] for end in ends if end is not None))

    def known_addresses(self, peer: PeerId) -> list[str]:
        """The addresses remembered for a peer, ending in ``/p2p/<id>``."""
        suffix = f"/p2p/{ID(peer)}"
        near = [self._link_local[peer]] if peer in self._link_local else []
        try:
            stored = self._running().get_peerstore().addrs(ID(peer))
        except FOREIGN:
            return near
        return list(dict.fromkeys([*(f"{str(a).removesuffix(suffix)}{suffix}" for a in stored), *near]))

    # --- streams -----------------------------------------------------------------------------------------------------

    def set_handler(self, kind: StreamKind, handler: StreamHandler) -> None:
        """See `Network.set_handler`."""
        self._handlers[kind] = handler
        if self._host is not None:
            self._register(self._host, kind, handler)

    def _register(self, host: BasicHost, kind: StreamKind, handler: StreamHandler) -> None:
        async def serve(raw: INetStream) -> None:
            await self._serve(raw, kind, handler)

        host.set_stream_handler(TProtocol(kind.value), serve)

    async def _serve(self, raw: INetStream, kind: StreamKind, handler: StreamHandler) -> None:
        """Run a handler on a stream a peer opened. Nothing it raises leaves here: it would end the process."""
        peer = PeerId(raw.muxed_conn.peer_id.to_bytes())
        if self._inbound[peer] >= MAX_STREAMS_PER_PEER:
            await raw.reset()
            return
        self._inbound[peer] += 1
        stream = LibP2PStream(raw, peer, kind, self)
        stream.start()
        try:
            await serve_stream(handler, stream)
        finally:
            self._inbound[peer] -= 1
            if not self._inbound[peer]:
                del self._inbound[peer]

    async def open_stream(self, peer: PeerId, kind: StreamKind, *, timeout_s: float = 10.0) -> LibP2PStream:
        """See `Network.open_stream`."""
        if not self._is_connected(peer):
            raise PeerUnreachableError("expected a connection to the peer, there is none")
        raw = await self.open_raw(peer, kind.value, timeout_s=timeout_s)
        stream = LibP2PStream(raw, peer, kind, self)
        stream.start()
        return stream

    async def open_raw(self, peer: PeerId, protocol: str, *, timeout_s: float) -> INetStream:
        """Open a py-libp2p stream to a connected peer.

        It is opened in a task of its own that nobody cancels, because a cancelled opening would leave a stream half
        open and one of the connection's 256 places taken for good; when the caller has gone it is reset.

        Raises:
            PeerUnreachableError: no answer within `timeout_s`, or the connection was lost.
            PeerRefusedError: the peer does not speak `protocol`.
        """
        host = self._running()
        opened: list[INetStream] = []
        failed: list[NetworkError] = []
        done = trio.Event()
        gone = False

        async def opening() -> None:
            try:
                raw = await host.new_stream(ID(peer), [TProtocol(protocol)])
            except FOREIGN as error:
                failed.append(translate_open(error, protocol))
            else:
                opened.append(raw)
                if gone:
                    await quietly(raw.reset)()
            done.set()

        self.start_task(opening)
        try:
            with trio.move_on_after(timeout_s):
                await done.wait()
        except trio.Cancelled:
            gone = True
            if opened:
                self.start_task(quietly(opened[0].reset))
            raise
        gone = not opened
        if failed:
            raise failed[0]
        if not opened:
            raise PeerUnreachableError(f"expected the peer to answer a new stream within {timeout_s:g} s, it did not")
        return opened[0]

    # --- DHT ---------------------------------------------------------------------------------------------------------

    async def provide(self, key32: bytes, *, report: ProvideReport | None = None) -> None:
        """See `Network.provide`."""
        if self._providers is None:
            raise NetworkError("expected a running network to announce on, it has not started")
        self._providers.provide_soon(key32, report)
        await trio.lowlevel.checkpoint()

    async def find_providers(self, key32: bytes, *, limit: int = 20, timeout_s: float = 10.0) -> list[ProviderHint]:
        """See `Network.find_providers`."""
        if self._providers is None:
            raise NetworkError("expected a running network to look up on, it has not started")
        found = await self._providers.find(key32, limit=limit, timeout_s=timeout_s)
        now_s = trio.current_time()

        def rank(hint: ProviderHint) -> tuple[bool, bool]:
            return not self._is_connected(hint.peer), not self._failures.usable_addresses(hint.addresses, now_s)

        return sorted(found, key=rank)

    async def is_announced(self, key32: bytes, *, timeout_s: float = 10.0) -> bool | None:
        """See `Network.is_announced`."""
        return None if self._providers is None else await self._providers.is_announced(key32, timeout_s=timeout_s)

    def routing_peers(self) -> int:
        """See `Network.routing_peers`."""
        return 0 if self._providers is None else self._providers.routing_peers()

    def _running(self) -> BasicHost:
        if self._host is None:
            raise NetworkError("expected a running network, it has not started or has stopped")
        return self._host
