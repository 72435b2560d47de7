"""Tell members that this node serves nothing for now, or is about to leave; and mind what they say of themselves."""

import logging
from enum import StrEnum

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.session import PeerSession
from kvnet.network.news import News
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.messages.liveness import Presence
from kvnet.protocol.messages.statements import Told

_log = logging.getLogger(__name__)


class PresenceState(StrEnum):
    """How a node is."""

    SERVING = "serving"
    PAUSED = "paused"
    """It serves nothing for now; its session stays open."""
    LEAVING = "leaving"
    """It is asleep or ended in a moment."""


class Presences:
    """How this node and its peers are.

    A peer that is paused or leaving is not asked for anything until it says that it serves, or comes back.

    Args:
        node: among its peers; not running yet.
    """

    def __init__(self, node: ExchangeNode) -> None:
        self._node = node
        self._own = PresenceState.SERVING
        self._changed = News()
        # By session: two peers that dial each other have two for a while, and one ending takes nothing from the other.
        self._states: dict[PeerSession, PresenceState] = {}
        # What each session was told last; nothing means that this node serves.
        self._told: dict[PeerSession, PresenceState] = {}
        node.offer_capability(Capability.PRESENCE)
        node.answer_with(Presence, self._answer)
        node.greet_with(self._greet)
        node.ask_only(self.askable)

    @property
    def own(self) -> PresenceState:
        """How this node says it is."""
        return self._own

    def of(self, peer: PeerId) -> PresenceState:
        """How a peer said it is; serving when it has not said."""
        said = [state for session, state in self._states.items() if session.peer == peer]
        return said[-1] if said else PresenceState.SERVING

    def askable(self, peer: PeerId) -> bool:
        """Whether asking a peer has any point."""
        return self.of(peer) is PresenceState.SERVING

    def become(self, state: PresenceState) -> None:
        """Say from now on that this node is so; peers are told at once, and new ones when they come."""
        if state is not self._own:
            self._own = state
            self._changed.tell()

    async def leave(self, timeout_s: float) -> None:
        """Tell every member that this node leaves, and wait for no longer than this until they know.

        One that wakes from sleep says with `become` that it is there again.
        """
        self._own = PresenceState.LEAVING
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for session in self._node.sessions():
                    if _minds(session):
                        nursery.start_soon(self._tell, session, PresenceState.LEAVING)

    def _answer(self, session: PeerSession, request: Request) -> Reply:
        assert isinstance(request, Presence)  # noqa: S101 - answerers are called by kind
        try:
            state = PresenceState(request.state)
        except ValueError:
            # A state that this build does not know is in any case not the ordinary one.
            state = PresenceState.PAUSED
        self._states.pop(session, None)
        self._states[session] = state
        return Told(request_id=request.request_id)

    async def _greet(self, session: PeerSession) -> None:
        """Tell a peer whenever this node is otherwise than it was told; what it said itself ends with the session."""
        # Whoever comes back has left no longer, even where the old session has not ended yet.
        for earlier in [each for each in self._states if each is not session and each.peer == session.peer]:
            del self._states[earlier]
        try:
            while True:
                changed = self._changed.next
                if self._own is not self._told.get(session, PresenceState.SERVING) and _minds(session):
                    await self._tell(session, self._own)
                await changed.wait()
        finally:
            self._states.pop(session, None)
            self._told.pop(session, None)

    async def _tell(self, session: PeerSession, state: PresenceState) -> None:
        self._told[session] = state
        try:
            await session.ask(Presence(request_id=0, state=state.value))
        except KvnetError as error:
            _log.debug("a peer was not told that this node is %s: %s", state.value, error)


def _minds(session: PeerSession) -> bool:
    """Whether a peer is told how this node is: a member that understands it."""
    return bool(session.member_slots) and Capability.PRESENCE in session.opened.capabilities
