"""Who may be asked for the chunks of one artifact: now, and as peers come, come back, or get it while it is fetched."""

from collections.abc import Callable, Container

import trio

from kvnet.errors import KvnetError, NotFoundError
from kvnet.exchange.chunk_fetch import Join
from kvnet.exchange.locating import Located, Locator
from kvnet.exchange.provider import Provider
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import LookupKey
from kvnet.network.news import News
from kvnet.protocol.have import HeldChunks
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import GetHave, Have
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.scoring import PeerScores
from kvnet.trust.namespace import Namespace

LOOK_S = 1.0
"""How often it is looked who may be asked by now; a session that opens is seen at once."""

Tells = Callable[[Namespace, PeerId, LookupKey], bool]
"""Whether a peer tells members that it has what ends with this key."""


class ChunkSources:
    """The providers of one artifact.

    Args:
        located: the artifact.
        n_chunks: it has.
        locator: knows the sessions.
        scores: who sent something wrong is not asked.
        tells: whether a peer tells that it has an artifact.
        news: told of sessions that open.
    """

    def __init__(
        self, located: Located, n_chunks: int, locator: Locator, scores: PeerScores, *, tells: Tells, news: News
    ) -> None:
        self._located = located
        self._n_chunks = n_chunks
        self._locator = locator
        self._scores = scores
        self._tells = tells
        self._news = news
        self._last_key = located.namespace.lookup_key(located.signed.manifest.last_prefix_key)
        self._known: dict[PeerId, bytes] = {}
        self._telling: set[PeerId] = set()

    def begin(self) -> list[Provider]:
        """Whom to ask, the best first by what they did before; none that sent wrong bytes of late.

        Raises:
            NotFoundError: everybody who could be asked did.
        """
        sessions = self._sessions()
        allowed = self._scores.order(sessions, trio.current_time())
        if sessions and not allowed:
            raise NotFoundError(
                f"{len(sessions)} peers could be asked, and each of them sent wrong chunks before",
                hint="Try again when another peer that has it is up, or in a few minutes.",
            )
        return self._note([self._provider(sessions[peer]) for peer in allowed])

    async def arriving(self, join: Join) -> None:
        """Have providers join that were not there before, are in another session, or tell that they have it by now."""
        opens = self._news.next
        while True:
            with trio.move_on_after(LOOK_S):
                await opens.wait()
            # Taken before the look, which lets others run while it has providers join.
            opens = self._news.next
            known, telling, now_s = self._known, self._telling, trio.current_time()
            sessions = self._sessions()
            there = [self._provider(each) for peer, each in sessions.items() if not self._scores.banned(peer, now_s)]
            for each in self._note(there):
                if known.get(each.peer) != each.session or each.peer in self._telling - telling:
                    await join(each)

    async def have(self, peer: PeerId) -> Container[int] | None:
        """Which chunks a peer says that it has; None when it does not say."""
        session = self._sessions().get(peer)
        if session is None or Capability.HAVE not in session.opened.capabilities:
            return None
        ask = GetHave(request_id=0, slot=session.slots[self._located.namespace], artifact=self._located.keyed)
        try:
            reply = await session.ask(ask)
            assert isinstance(reply, Have)  # noqa: S101 - the session machine lets no other reply through
            return HeldChunks(reply.runs, self._n_chunks)
        except KvnetError:
            return None

    def _sessions(self) -> dict[PeerId, PeerSession]:
        return {session.peer: session for session in self._locator.in_namespace(self._located)}

    def _provider(self, session: PeerSession) -> Provider:
        slot = session.slots[self._located.namespace]
        return Provider(session.peer, session.opened.session_id, slot, self._located.keyed)

    def _note(self, there: list[Provider]) -> list[Provider]:
        namespace = self._located.namespace
        self._known = {each.peer: each.session for each in there}
        self._telling = {peer for peer in self._known if self._tells(namespace, peer, self._last_key)}
        return there
