"""The control sessions of a node with all its peers: opened, accepted, kept ready for a lookup, and tried again."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError, NetworkError
from kvnet.exchange.identity import Identity
from kvnet.exchange.session import Answer, Answered, PeerSession
from kvnet.network.interface import ByteStream, Network, StreamKind
from kvnet.network.news import News
from kvnet.network.serving import serve_stream
from kvnet.protocol.clock import clock_of
from kvnet.protocol.handshake import SessionConfig
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import NONCE_SIZE_BYTES, PADDING_SIZE_BYTES, PROOF_ENTRIES, Role
from kvnet.protocol.session import ControlSession
from kvnet.trust.namespace import Namespace

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

SESSION_OPEN_S = 5.0
"""Seconds in which a session with a connected peer must be open when somebody waits for it."""

SESSION_POLL_S = 1.0
"""How often connected peers without a session are looked for."""

SESSION_RETRY_S = 30.0
"""Seconds before another session is tried with a peer whose last one failed."""

LEFT_S = 5.0
"""Seconds in which a peer whose session has ended may prove again what it had proved, as all do when a namespace
changes; then what it gets chunks over ends."""

RandomBytes = Callable[[int], bytes]
"""Fresh random bytes, from the operating system."""

Greeting = Callable[[PeerSession], Awaitable[None]]
"""What to do with every session that opens; cancelled when the session ends."""


@dataclass(frozen=True, slots=True)
class SessionUses:
    """What sessions are for: who is told of what happens in them. All are fast, and never raise.

    Attributes:
        answer: decides the reply to a request.
        answered: told how many seconds a peer took to answer.
        ended: told when the last session with a peer has ended.
        left: told of a peer that has not proved again in time what it had proved.
    """

    answer: Answer
    answered: Answered
    ended: Callable[[], None]
    left: Callable[[PeerId], None]


class PeerSessions:
    """The control sessions of one node.

    Args:
        network: where peers are connected.
        identity: the namespaces that sessions prove.
        uses: what they are for.
        random: source of nonces.
        agent: program and version told to peers.
        capabilities: what this node can do, as every new session tells it.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        uses: SessionUses,
        *,
        random: RandomBytes,
        agent: str,
        capabilities: Callable[[], tuple[str, ...]],
    ) -> None:
        self._network = network
        self._identity = identity
        self._uses = uses
        self._random = random
        self._agent = agent
        self._capabilities = capabilities
        self._by_peer: dict[PeerId, PeerSession] = {}
        self._by_id: dict[tuple[PeerId, bytes], PeerSession] = {}
        self._opening: dict[PeerId, trio.Event] = {}
        self._failed_until: dict[PeerId, float] = {}
        self._errors: dict[PeerId, KvnetError] = {}
        self._skews: dict[PeerId, int | None] = {}
        self._greetings: list[Greeting] = []
        self._opened = News()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a session with every connected peer, so that a lookup finds them ready, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                self._open_missing(nursery)
                await trio.sleep(SESSION_POLL_S)

    def _open_missing(self, nursery: trio.Nursery) -> None:
        now_s = trio.current_time()
        self._failed_until = {peer: until_s for peer, until_s in self._failed_until.items() if until_s > now_s}
        self._errors = {peer: error for peer, error in self._errors.items() if peer in self._failed_until}
        for info in self._network.connected():
            peer = info.peer
            if peer not in self._by_peer and peer not in self._opening and peer not in self._failed_until:
                done = self._opening[peer] = trio.Event()
                nursery.start_soon(self._dial, peer, done)

    # --- what there is ------------------------------------------------------------------------------------------------

    def members(self) -> Sequence[PeerSession]:
        """The open sessions in which some namespace is proved."""
        return [session for session in self._by_peer.values() if session.slots and not session.closed.is_set()]

    async def wait_for_members(self, timeout_s: float) -> None:
        """Return as soon as a session with a member is open, at the latest after ``timeout_s`` seconds."""
        with trio.move_on_after(timeout_s):
            while not self.members():
                await self._opened.wait()

    def with_peer(self, peer: PeerId) -> PeerSession | None:
        """The session with a peer, whether or not it has proved anything."""
        return self._by_peer.get(peer)

    def find(self, peer: PeerId, session_id: bytes) -> PeerSession | None:
        """The open session of that id: what requests for chunks name."""
        return self._by_id.get((peer, session_id))

    def error(self, peer: PeerId) -> KvnetError | None:
        """Why the last session this node tried with a peer did not open; None when none failed lately."""
        return self._errors.get(peer)

    def clock_skew_s(self, peer: PeerId) -> int | None:
        """By how many seconds a peer's clock is ahead of ours; None when it has not said."""
        return self._skews.get(peer)

    # --- what others do -----------------------------------------------------------------------------------------------

    def greet_with(self, greeting: Greeting) -> None:
        """Say what else is done with every session that opens; it ends with the session."""
        self._greetings.append(greeting)

    def try_again(self, peer: PeerId | None = None) -> None:
        """Try a peer, or everybody, again whose last session failed, without waiting."""
        if peer is None:
            self._failed_until.clear()
        else:
            self._failed_until.pop(peer, None)

    def close_all(self) -> None:
        """End every session; peers that are connected are soon asked for new ones."""
        for session in list(self._by_id.values()):
            session.close()

    async def open(self, peer: PeerId) -> PeerSession | None:
        """The open session with a connected peer, opened if there is none; ``None`` when that fails.

        Raises:
            NetworkError: the node does not run.
        """
        session = self._by_peer.get(peer)
        if session is not None and not session.closed.is_set():
            return session
        waiting = self._opening.get(peer)
        if waiting is None:
            if self._nursery is None:
                raise NetworkError("expected a node that is running, found one that is not")
            waiting = self._opening[peer] = trio.Event()
            self._nursery.start_soon(self._dial, peer, waiting)
        with trio.move_on_after(SESSION_OPEN_S):
            await waiting.wait()
        return self._by_peer.get(peer)

    async def accept(self, _peer: PeerId, stream: ByteStream) -> None:
        """Hold the session that a peer opens; the handler of control streams."""
        await self._hold(stream, Role.RESPONDER, trio.Event())

    # --- the life of one ----------------------------------------------------------------------------------------------

    async def _dial(self, peer: PeerId, done: trio.Event) -> None:
        """Open the session and hold it; ``done`` when it is open or has failed."""
        try:
            stream = await self._network.open_stream(peer, StreamKind.CONTROL)
            # As with a session that the peer has opened: a bug that it finds in a handler does not end the node.
            await serve_stream(partial(self._dialled, done), stream)
        except KvnetError as error:
            self._failed(peer, error)
        finally:
            done.set()
            if self._opening.get(peer) is done:
                del self._opening[peer]

    async def _dialled(self, opened: trio.Event, peer: PeerId, stream: ByteStream) -> None:
        try:
            await self._hold(stream, Role.INITIATOR, opened)
        except KvnetError as error:
            self._failed(peer, error)
        except Exception:
            self._failed_until[peer] = trio.current_time() + SESSION_RETRY_S
            raise

    def _failed(self, peer: PeerId, error: KvnetError) -> None:
        self._failed_until[peer] = trio.current_time() + SESSION_RETRY_S
        self._errors[peer] = error

    async def _hold(self, stream: ByteStream, role: Role, opened: trio.Event) -> None:
        namespaces = self._proved()
        config = SessionConfig(
            role=role,
            own=self._network.peer_id,
            other=stream.peer,
            namespaces=namespaces,
            nonce=self._random(NONCE_SIZE_BYTES),
            padding=self._random(PADDING_SIZE_BYTES),
            agent=self._agent,
            capabilities=self._capabilities(),
        )
        machine = ControlSession(config, trio.current_time())
        session = PeerSession(stream, machine, namespaces, self._uses.answer, self._uses.answered)
        failure: KvnetError | None = None
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(session.run)
            except KvnetError as error:
                # Out of here it goes as itself: inside a nursery it would come out in a group, past every handler.
                failure = error
            else:
                if namespaces != self._proved():
                    # They changed during the handshake: what it has shown counts no more.
                    session.close()
                for greeting in self._greetings:
                    nursery.start_soon(_greet, greeting, session)
                await self._keep(session, opened)
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _proved(self) -> tuple[Namespace, ...]:
        """The namespaces that a new session proves: those of now, then former ones as far as there is room."""
        current = self._identity.namespaces()
        return (*current, *self._identity.former()[: PROOF_ENTRIES - len(current)])

    async def _keep(self, session: PeerSession, opened: trio.Event) -> None:
        """Have an open session among those to use, until it ends."""
        peer = session.peer
        self._errors.pop(peer, None)
        if peer in self._by_peer and self._nursery is not None:
            # Somebody who is there twice may have come back another way, and left a connection that is dead.
            self._nursery.start_soon(self._network.probe, peer)
        clock_s = clock_of(session.opened.capabilities)
        self._skews[peer] = None if clock_s is None else clock_s - int(time.time())
        # Two peers that dial each other have two sessions for a while; a chunk request may name either.
        key = (peer, session.opened.session_id)
        self._by_peer[peer] = self._by_id[key] = session
        opened.set()
        self._opened.tell()
        if self._opening.get(peer) is opened:
            del self._opening[peer]
        await session.closed.wait()
        del self._by_id[key]
        if session.slots and self._nursery is not None:
            self._nursery.start_soon(self._end_what_is_not_proved_again, session)
        if self._by_peer.get(peer) is session:
            del self._by_peer[peer]
            self._skews.pop(peer, None)
            self._uses.ended()

    async def _end_what_is_not_proved_again(self, ended: PeerSession) -> None:
        """Whoever has gone, or was removed, gets nothing more over connections that it had before."""
        await trio.sleep(LEFT_S)
        peer, had = ended.peer, {namespace.id for namespace in ended.slots}
        has = {namespace.id for (other, _), each in self._by_id.items() if other == peer for namespace in each.slots}
        if not had <= has:
            self._uses.left(peer)


async def _greet(greeting: Greeting, session: PeerSession) -> None:
    """A greeting that fails ends with the session, or before; it never ends the session."""
    try:
        await greeting(session)
    except KvnetError as error:
        _log.debug("a greeting ended: %s", error)
