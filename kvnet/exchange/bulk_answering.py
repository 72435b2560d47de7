"""Answering peers that want bulk connections: what is agreed on with each, and the connections over which they ask.

The peer that asks for a connection (`OpenBulk`) dials us as a rule; where it cannot, it has us dial it (`DialBulk`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from kvnet.errors import NetworkError
from kvnet.exchange.bulk_serving import StoreSource
from kvnet.exchange.session import PeerSession
from kvnet.network.bulk.certificates import make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.sending import Sender
from kvnet.network.bulk.sessions import CIPHER_NONE, TLS_HANDSHAKE, BulkSession
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.bulk import BulkCipher, BulkDialled, BulkOffer, DialBulk
from kvnet.protocol.messages.control import BulkRequest, Reply
from kvnet.protocol.messages.refusals import RefusalReason, Refused

MAX_PER_PEER: Final = 4
"""Connections that one peer may have for asking us, agreed ones included."""

DIAL_S: Final = 2.5
"""Seconds for dialling a peer. Who fetches waits meanwhile."""

DIALLED_S: Final = 5.0
"""Seconds for the peer to dial back."""

RandomBytes = Callable[[int], bytes]

HostsOf = Callable[[PeerId], Sequence[str]]
"""Where a peer can be dialled."""


class BulkAnswering:
    """The answering side of one node's bulk connections.

    Args:
        endpoint: where connections come from.
        hosts_of: where to dial a peer back.
        limiter: of all bulk connections; each has a thread.
        random: names connections.
    """

    def __init__(
        self, endpoint: BulkEndpoint, hosts_of: HostsOf, limiter: trio.CapacityLimiter, *, random: RandomBytes
    ) -> None:
        self._endpoint = endpoint
        self._hosts_of = hosts_of
        self._limiter = limiter
        self._random = random
        self._senders: dict[Sender, PeerId] = {}
        self._agreed: dict[bytes, tuple[PeerId, float]] = {}
        self._nursery: trio.Nursery | None = None
        self._source: StoreSource | None = None

    def begin(self, source: StoreSource, nursery: trio.Nursery) -> None:
        """Answer from now on; before, and after `end`, everybody is told that we are busy.

        Args:
            source: what peers get.
            nursery: where peers are dialled back.
        """
        self._source, self._nursery = source, nursery

    def end(self) -> list[Sender]:
        """Answer nobody any more; returns the connections there are, for the caller to stop."""
        self._nursery = None
        return list(self._senders)

    @property
    def n_connections(self) -> int:
        """Connections over which peers ask us."""
        return len(self._senders)

    def sweep(self, now_s: float) -> None:
        """Forget what was agreed on and has not come in time."""
        self._agreed = {name: (peer, until) for name, (peer, until) in self._agreed.items() if until > now_s}

    def answer(self, session: PeerSession, request: BulkRequest) -> Reply:
        """The reply to a peer that may have a bulk connection."""
        if isinstance(request, DialBulk):
            return self._answer_dial(session, request)
        busy = Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        now_s = trio.current_time()
        waiting = sum(1 for peer, until_s in self._agreed.values() if peer == session.peer and until_s > now_s)
        in_use = Counter(self._senders.values())[session.peer]
        if self._nursery is None or waiting + in_use >= MAX_PER_PEER or not self._limiter.available_tokens:
            return busy
        own = make_certificate()
        wanted = (request.cipher, self._endpoint.cipher)
        cipher = BulkCipher.NONE if wanted == (CIPHER_NONE, CIPHER_NONE) else BulkCipher.TLS13
        agreed = BulkSession(self._new_name(), session.peer, own, request.certificate, cipher)
        try:
            self._endpoint.expect(agreed, lambda link: self._start_sender(link, agreed))
        except NetworkError:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        self._agreed[agreed.name] = (session.peer, now_s + DIALLED_S + DIAL_S)
        return BulkOffer(
            request_id=request.request_id,
            name=agreed.name,
            certificate=own.der,
            port=self._endpoint.port,
            cipher=cipher,
        )

    def _new_name(self) -> bytes:
        """16 random bytes that no TLS record begins with: without encryption, a peer begins with them."""
        name = self._random(16)
        return name if not name.startswith(TLS_HANDSHAKE) else b"\0" + name[1:]

    def end_senders(self, peer: PeerId) -> None:
        """End the connections over which a peer gets chunks, in the middle of a request too, and expect none."""
        for name in [name for name, (other, _) in self._agreed.items() if other == peer]:
            del self._agreed[name]
            self._endpoint.forget(name)
        for sender in [sender for sender, other in self._senders.items() if other == peer]:
            sender.stop()

    def _answer_dial(self, session: PeerSession, request: DialBulk) -> Reply:
        agreed = self._endpoint.forget(request.name)
        if agreed is None or agreed.peer != session.peer or self._nursery is None:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        self._nursery.start_soon(self._dial_back, agreed, request.port)
        return BulkDialled(request_id=request.request_id)

    async def _dial_back(self, agreed: BulkSession, port: int) -> None:
        with suppress(NetworkError):
            hosts = self._hosts_of(agreed.peer)
            link = await self._endpoint.dial(agreed, hosts, port, timeout_s=DIAL_S)
            self._start_sender(link, agreed)

    def _start_sender(self, link: Link, agreed: BulkSession) -> None:
        self._agreed.pop(agreed.name, None)
        # Agreed on one after the other, they may all come at once.
        too_many = Counter(self._senders.values())[agreed.peer] >= MAX_PER_PEER
        if self._source is None or self._nursery is None or too_many:
            link.close()
            return
        sender = Sender(link, agreed.peer, self._source)
        try:
            self._limiter.acquire_on_behalf_of_nowait(sender)
        except trio.WouldBlock:
            link.close()
            return

        def ended() -> None:
            del self._senders[sender]
            self._limiter.release_on_behalf_of(sender)

        self._senders[sender] = agreed.peer
        sender.start(trio.lowlevel.current_trio_token(), ended)
