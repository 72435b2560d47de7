"""Talking with members about statements: ask for what is not known, answer, and tell of what is new."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvnet.errors import KvnetError, PeerRefusedError
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import blake3_hash
from kvnet.protocol import gossip
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.messages.statements import MAX_TOLD_BYTES, GetStatements, Tell, Told
from kvnet.protocol.messages.statements import Statements as StatementsReply
from kvnet.trust.namespace import Namespace

_log = logging.getLogger(__name__)

TELL_PAUSES_S = (0.0, 1.0, 5.0)
"""Seconds before each attempt to tell a member something."""
TELL_AGAIN_S = 20.0
"""Seconds after which what it could not be told is tried again, as long as the session lasts."""
MAX_WAITING_TO_SEND = 4096
"""Statements waiting for one peer; what does not fit it gets when it asks."""
MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Bytes of them."""
MAX_PEERS_REMEMBERED = 1024
"""Peers whose allowances outlast their sessions."""
MEMBERS_ASKED = 2
"""Members asked at each look for what did not arrive."""


@dataclass(slots=True, eq=False)
class Talk:
    """What goes on with one session.

    Attributes:
        session: with whom.
        told: what it may still tell.
        asks: how often it may still ask.
        exchanged: what it is known to know.
        waiting: what it is to be told.
        waiting_bytes: bytes of that.
        queued_bytes: bytes it has told that are not checked yet.
    """

    session: PeerSession
    told: gossip.Allowance
    asks: gossip.Allowance
    exchanged: gossip.Exchanged = field(default_factory=gossip.Exchanged)
    waiting: deque[tuple[Namespace, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0
    wanted: trio.Event = field(default_factory=trio.Event)
    ask: trio.Event = field(default_factory=trio.Event)
    queued_bytes: int = 0


class Shelf(Protocol):
    """Where the statements are: what one talks about."""

    @property
    def n_counted(self) -> int:
        """Statements that were new and counted, so far."""
        ...

    def namespaces(self) -> tuple[Namespace, ...]:
        """Those this node is in now."""
        ...

    def held(self, namespace: Namespace) -> dict[bytes, bytes]:
        """Everything that may be told in a namespace, by short name, the most important first."""
        ...

    def refused(self, namespace: Namespace) -> Iterable[bytes]:
        """Short names of what was found to be no good in a namespace."""
        ...

    def take(
        self,
        envelopes: Iterable[bytes],
        namespace: Namespace,
        session: PeerSession | None = None,
        *,
        asked: bool = False,
    ) -> int:
        """Queue what has come."""
        ...

    async def settled(self) -> None:
        """Wait until what was queued so far is checked."""
        ...


class Talks:
    """All sessions in which statements are talked about.

    Args:
        shelf: where the statements are.
        limits: what one peer may cost.
        random: source of random bytes, for who is asked when.
    """

    def __init__(self, shelf: Shelf, limits: gossip.GossipLimits, random: Callable[[int], bytes]) -> None:
        self._shelf = shelf
        self._limits = limits
        self._random = random
        self._talks: dict[PeerSession, Talk] = {}
        self._allowances: dict[PeerId, tuple[gossip.Allowance, gossip.Allowance]] = {}

    def of(self, session: PeerSession | None) -> Talk | None:
        """The talk with a session that is open; begun with the peer's first word, or with the greeting."""
        if session is None or session.closed.is_set() or Capability.STATEMENTS not in session.opened.capabilities:
            return None
        talk = self._talks.get(session)
        if talk is None:
            talk = self._talks[session] = Talk(session, *self._allowances_of(session.peer))
        return talk

    def _allowances_of(self, peer: PeerId) -> tuple[gossip.Allowance, gossip.Allowance]:
        """What a peer may tell and ask: a new session is no new allowance."""
        known = self._allowances.pop(peer, None)
        if known is None:
            now, limits = trio.current_time(), self._limits
            known = (
                gossip.Allowance(limits.statements_per_s, limits.statements_burst, now),
                gossip.Allowance(limits.asks_per_s, limits.asks_burst, now),
            )
        self._allowances[peer] = known
        if len(self._allowances) > MAX_PEERS_REMEMBERED:
            del self._allowances[next(iter(self._allowances))]
        return known

    def listeners(self, namespaces: Collection[Namespace]) -> int:
        """Peers that are told of what is new in any of these namespaces, each counted once."""
        return len({session.peer for session in self._talks if any(each in session.slots for each in namespaces)})

    # --- answering ----------------------------------------------------------------------------------------------------

    def answer_tell(self, session: PeerSession, request: Request) -> Reply:
        """Take what a member tells."""
        assert isinstance(request, Tell)  # noqa: S101 - the node hands out requests by their kind
        namespace = self._shared(session, request.slot)
        if namespace is None:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        if gossip.size_bytes(request) > MAX_TOLD_BYTES:
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        self._shelf.take(request.statements, namespace, session)
        return Told(request_id=request.request_id)

    def answer_ask(self, session: PeerSession, request: Request) -> Reply:
        """Give a member a page of what it does not know."""
        assert isinstance(request, GetStatements)  # noqa: S101 - the node hands out requests by their kind
        namespace = self._shared(session, request.slot)
        if namespace is None or not gossip.is_ordered(request):
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        talk = self.of(session)
        if talk is not None and not talk.asks.take(1, trio.current_time()):
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        reply = gossip.answer(request, self._shelf.held(namespace))
        if talk is not None:
            for name in [*request.known, *map(name_of, reply.statements)]:
                talk.exchanged.add(name)
        return reply

    def _shared(self, session: PeerSession, slot: int) -> Namespace | None:
        """The namespace of a slot, if this node is still in it, under that lookup secret."""
        namespace = session.opened.namespaces.get(slot)
        return namespace if namespace in self._shelf.namespaces() else None

    # --- asking and telling -------------------------------------------------------------------------------------------

    def spread(self, namespace: Namespace, envelopes: Iterable[bytes], but: PeerSession | None) -> None:
        """Have every member told that is not known to know; all are sent at once, in order."""
        named = [(name_of(envelope), envelope) for envelope in envelopes]
        for session, talk in self._talks.items():
            if session is but or namespace not in session.slots:
                continue
            for name, envelope in named:
                has_room = talk.waiting_bytes + len(envelope) <= MAX_WAITING_BYTES
                if has_room and len(talk.waiting) < MAX_WAITING_TO_SEND and talk.exchanged.add(name):
                    talk.waiting.append((namespace, envelope))
                    talk.waiting_bytes += len(envelope)
            if talk.waiting:
                talk.wanted.set()

    def ask_everybody(self) -> None:
        """Ask all members for what is not known here."""
        for talk in self._talks.values():
            talk.ask.set()

    def ask_some(self) -> None:
        """Ask a few members, picked at random."""
        talks = list(self._talks.values())
        for _ in range(min(MEMBERS_ASKED, len(talks))):
            talks.pop(int.from_bytes(self._random(4), "big") % len(talks)).ask.set()

    async def greet(self, session: PeerSession) -> None:
        """Ask for everything that is not known, and tell of what is new, as long as the session lasts."""
        talk = self.of(session) if session.slots else None
        if talk is None:
            return
        talk.ask.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_telling, talk)
                nursery.start_soon(self._keep_asking, talk)
        finally:
            self._talks.pop(session, None)

    async def _keep_asking(self, talk: Talk) -> None:
        while True:
            await talk.ask.wait()
            talk.ask = trio.Event()
            for namespace in talk.session.slots:
                try:
                    await self._ask_for_all(talk, namespace)
                except KvnetError as error:
                    _log.debug("a member did not tell its statements: %s", error)

    async def _ask_for_all(self, talk: Talk, namespace: Namespace) -> None:
        slot = talk.session.slots[namespace]
        asking = gossip.Asking({*self._shelf.held(namespace), *self._shelf.refused(namespace)})
        again = True
        while again:
            again = False
            for known in gossip.windows(asking.known):
                reply = await talk.session.ask(GetStatements(request_id=0, slot=slot, known=known))
                assert isinstance(reply, StatementsReply)  # noqa: S101 - the session lets only fitting replies through
                names = [name_of(envelope) for envelope in reply.statements]
                for name in names:
                    talk.exchanged.add(name)
                # Asked for: it costs the peer nothing of what it may tell, and we ask no faster than we check.
                before = self._shelf.n_counted
                self._shelf.take(reply.statements, namespace, talk.session, asked=True)
                await self._shelf.settled()
                again |= asking.learned(names, more=reply.more, counted=self._shelf.n_counted > before)

    async def _keep_telling(self, talk: Talk) -> None:
        while True:
            await talk.wanted.wait()
            talk.wanted = trio.Event()
            while talk.waiting:
                namespace, page = _next_page(talk.waiting)
                if await _tell(talk.session, Tell(request_id=0, slot=talk.session.slots[namespace], statements=page)):
                    talk.waiting_bytes -= sum(len(talk.waiting.popleft()[1]) for _ in page)
                    continue
                # It stays known to be untold: what is told on is told once, and nobody else may be there to ask.
                with trio.move_on_after(TELL_AGAIN_S):
                    await talk.wanted.wait()
                talk.wanted = trio.Event()


async def _tell(session: PeerSession, told: Tell) -> bool:
    """Tell a member, again a little later when it was too busy; whether that is settled, one way or the other."""
    for pause_s in TELL_PAUSES_S:
        await trio.sleep(pause_s)
        try:
            await session.ask(told)
        except PeerRefusedError as error:
            if error.reason != RefusalReason.BUSY:
                return True
        except KvnetError as error:
            _log.debug("a member could not be told: %s", error)
        else:
            return True
        if session.closed.is_set():
            return True
    return False


def name_of(envelope: bytes) -> bytes:
    """The short name of a statement."""
    return gossip.short(blake3_hash(envelope))


def _next_page(waiting: Iterable[tuple[Namespace, bytes]]) -> tuple[Namespace, tuple[bytes, ...]]:
    """What comes first, and as much behind it that is of the same namespace as one message takes."""
    namespace = next(iter(waiting))[0]
    run = (envelope for _, envelope in itertools.takewhile(lambda each: each[0] == namespace, waiting))
    return namespace, next(gossip.pages(run))
