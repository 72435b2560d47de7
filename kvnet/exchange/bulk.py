"""The data plane in use: agree on a connection over the control session, and fetch chunks over it.

Whoever wants chunks asks for a connection (`OpenBulk`), dials the peer, and when that fails has the peer dial back
(`DialBulk`). When neither works, chunks come over a stream of the control connection: slower, and always there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from kvnet.errors import KvnetError, NetworkError, ProtocolViolationError
from kvnet.exchange.bulk_answering import DIAL_S, DIALLED_S, BulkAnswering, RandomBytes
from kvnet.exchange.bulk_serving import StoreSource
from kvnet.exchange.bulk_warm import WarmConnections
from kvnet.exchange.serving import ChunkServer
from kvnet.exchange.session import PeerSession
from kvnet.exchange.transport import ChunkChannel, ChunkTransport
from kvnet.format.hashes import BytesLike
from kvnet.network.arrivals import ChunkEvent
from kvnet.network.bulk.certificates import make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.receiving import Receiver
from kvnet.network.bulk.sending import Sender
from kvnet.network.bulk.sessions import CIPHER_NONE, BulkSession
from kvnet.network.interface import Network
from kvnet.network.places import hosts_of
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.bulk import BulkCipher, BulkOffer, DialBulk, OpenBulk
from kvnet.protocol.messages.chunks import GetChunks
from kvnet.protocol.messages.handshake import Capability
from kvnet.store.interface import Store

if TYPE_CHECKING:
    from trio_typing import TaskStatus

MAX_THREADS: Final = 64
"""Bulk connections in all; each has a thread."""

SWEEP_S: Final = 15.0
"""How often unused connections are looked at."""

MAX_WINDOW_BYTES: Final = 64 * 1024 * 1024
"""Bytes asked for and on their way, a connection. Nothing is kept for them on either side: what is read ahead of the
store is bounded by the receiver, and what is sent ahead of it by TCP."""

RETRY_S: Final = 300.0
"""Seconds before a bulk connection is tried again with a peer where it failed."""

FindPeerSession = Callable[[PeerId], PeerSession | None]
"""The session to ask a peer in."""


@dataclass(slots=True)
class _Way:
    """How chunks come from a peer."""

    words: str
    retry_s: float = float("-inf")


@dataclass(slots=True)
class _Arrival:
    arrived: trio.Event = field(default_factory=trio.Event)
    link: Link | None = None
    given_up: bool = False

    def take(self, link: Link) -> None:
        if self.given_up:
            link.close()
            return
        self.link = link
        self.arrived.set()


class BulkTransport:
    """Chunks over connections of their own, or over streams where that does not work.

    Args:
        endpoint: not running yet.
        network: knows the peers' addresses.
        fallback: used when a bulk connection cannot be had.
        find_session: the session to ask a peer in.
        server: decides what peers get.
        store: where that is read.
        random: names connections.
    """

    def __init__(
        self,
        endpoint: BulkEndpoint,
        network: Network,
        fallback: ChunkTransport,
        find_session: FindPeerSession,
        server: ChunkServer,
        store: Store,
        *,
        random: RandomBytes,
    ) -> None:
        self._endpoint = endpoint
        self._network = network
        self._fallback = fallback
        self._find_session = find_session
        self._server = server
        self._store = store
        self._limiter = trio.CapacityLimiter(MAX_THREADS)
        self._receivers: set[Receiver] = set()
        self._answering = BulkAnswering(endpoint, self._hosts_of, self._limiter, random=random)
        self._warm = WarmConnections()
        self._ways: dict[PeerId, _Way] = {}
        self._nursery: trio.Nursery | None = None
        server.answer_bulk_with(self._answering.answer)

    # --- life ---

    @property
    def endpoint(self) -> BulkEndpoint:
        """Where connections come from."""
        return self._endpoint

    @property
    def n_connections(self) -> int:
        """Bulk connections now, each with its thread."""
        return len(self._receivers) + self._answering.n_connections

    @property
    def n_at_rest(self) -> int:
        """Those of them that wait for the next fetch."""
        return len(self._warm)

    @property
    def discarded_bytes(self) -> int:
        """Bytes of chunks that came after a fetch had taken them back."""
        return self._warm.discarded_bytes

    def way_of(self, peer: PeerId) -> str:
        """How chunks come from a peer, in words; "" when none have been fetched from it."""
        way = self._ways.get(peer)
        return way.words if way else ""

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, then end every connection.

        Raises:
            PortInUseError: a port that was asked for is taken.
        """
        source = StoreSource(self._server, self._store, trio.lowlevel.current_trio_token())
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._answering.begin(source, nursery)
                await nursery.start(self._endpoint.run)
                nursery.start_soon(self._sweep)
                task_status.started()
        finally:
            self._nursery = None
            ending: list[Receiver | Sender] = [*self._receivers, *self._answering.end()]
            for each in ending:
                each.stop()
            with trio.CancelScope(shield=True):
                for each in ending:
                    await each.done.wait()

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(SWEEP_S)
            now_s = trio.current_time()
            self._warm.sweep(now_s)
            self._answering.sweep(now_s)

    def end_senders(self, peer: PeerId) -> None:
        """See `BulkAnswering.end_senders`."""
        self._answering.end_senders(peer)

    # --- asking ---

    async def open(self, peer: PeerId) -> ChunkChannel:
        """A channel to a connected peer: a warm connection, a new one, or a stream.

        Raises:
            NetworkError: not even a stream can be opened.
        """
        receiver = self._warm.take(peer)
        if receiver is None:
            receiver = await self._connect_or_say_why(peer)
        if receiver is None:
            return await self._fallback.open(peer)
        return _BulkChannel(receiver, lambda used: self._put_back(peer, used))

    def _put_back(self, peer: PeerId, receiver: Receiver) -> bool:
        """Keep a connection for the next fetch; False when it is of no more use."""
        if self._nursery is None:
            return False
        if receiver.usable:
            self._warm.keep(peer, receiver)
            return True
        session = self._find_session(peer)
        if not receiver.stands or session is None or Capability.BULK_CANCEL not in session.opened.capabilities:
            return False
        self._nursery.start_soon(self._warm.keep_when_through, peer, receiver)
        return True

    async def _connect_or_say_why(self, peer: PeerId) -> Receiver | None:
        session = self._find_session(peer)
        if session is None or self._nursery is None:
            return None
        way = self._ways.get(peer)
        if Capability.BULK not in session.opened.capabilities:
            self._ways[peer] = _Way("stream: the peer has no bulk connections")
            return None
        if way is not None and way.retry_s > trio.current_time():
            return None
        if not self._limiter.available_tokens:
            self._ways[peer] = _Way(f"stream: all {MAX_THREADS} bulk connections are in use")
            return None
        try:
            link, cipher = await self._connect(session)
        except KvnetError as error:
            why = f"stream: {error}" + (f" ({error.hint})" if error.hint else "")
            self._ways[peer] = _Way(why, trio.current_time() + RETRY_S)
            return None
        plain = " without encryption" if cipher == CIPHER_NONE else ""
        self._ways[peer] = _Way(f"bulk{plain}")
        return self._start_receiver(link)

    async def _connect(self, session: PeerSession) -> tuple[Link, str]:
        own = make_certificate()
        offer = await session.ask(OpenBulk(request_id=0, certificate=own.der, cipher=self._endpoint.cipher))
        assert isinstance(offer, BulkOffer)  # noqa: S101 - the session machine lets no other reply through
        if offer.cipher not in {BulkCipher.TLS13, self._endpoint.cipher}:
            raise ProtocolViolationError("expected a cipher that this node allows, found another one")
        agreed = BulkSession(offer.name, session.peer, own, offer.certificate, offer.cipher)
        try:
            link = await self._endpoint.dial(agreed, self._hosts_of(session.peer), offer.port, timeout_s=DIAL_S)
        except NetworkError as error:
            if not self._endpoint.port:
                raise
            link = await self._have_it_dialled(session, agreed, error)
        return link, offer.cipher

    async def _have_it_dialled(self, session: PeerSession, agreed: BulkSession, first: NetworkError) -> Link:
        """The peer cannot be reached: let it reach us.

        Raises:
            NetworkError: that does not work either; why dialling failed is what it says.
        """
        arrival = _Arrival()
        self._endpoint.expect(agreed, arrival.take)
        try:
            with trio.move_on_after(DIALLED_S):
                await session.ask(DialBulk(request_id=0, name=agreed.name, port=self._endpoint.port))
                await arrival.arrived.wait()
        except NetworkError as error:
            raise first from error
        except BaseException:
            if arrival.link is not None:
                arrival.link.close()
            raise
        finally:
            arrival.given_up = arrival.link is None
            self._endpoint.forget(agreed.name)
        if arrival.link is None:
            raise first
        return arrival.link

    def _start_receiver(self, link: Link) -> Receiver | None:
        receiver = Receiver(link, trio.lowlevel.current_trio_token())
        try:
            self._limiter.acquire_on_behalf_of_nowait(receiver)
        except trio.WouldBlock:
            link.close()
            return None

        def ended() -> None:
            self._receivers.discard(receiver)
            self._limiter.release_on_behalf_of(receiver)

        self._receivers.add(receiver)
        receiver.start(ended)
        return receiver

    def _hosts_of(self, peer: PeerId) -> list[str]:
        """Where a peer is seen; what it says of itself adds the interface alone, or it could have us dial anybody."""
        seen = self._network.seen_at(peer)
        said = hosts_of([each for info in self._network.connected() if info.peer == peer for each in info.addresses])
        scoped = [host for host in said if "%" in host and host.partition("%")[0] in seen]
        return list(dict.fromkeys([*scoped, *seen]))


class _BulkChannel:
    path = "bulk"
    window_bytes = MAX_WINDOW_BYTES

    def __init__(self, receiver: Receiver, put_back: Callable[[Receiver], bool]) -> None:
        self._receiver = receiver
        self._put_back = put_back

    async def request(self, request: GetChunks, lengths: Mapping[int, int]) -> None:
        self._receiver.request(request, lengths)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def next_events(self) -> Sequence[ChunkEvent]:
        return await self._receiver.next_events()

    def finished(self, data: BytesLike) -> None:
        self._receiver.finished(data)

    async def aclose(self) -> None:
        if not self._put_back(self._receiver):
            self._receiver.stop()
            with trio.CancelScope(shield=True):
                await self._receiver.done.wait()
