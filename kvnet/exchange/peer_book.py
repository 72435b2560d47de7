"""Remembered peers: members met before are reached again without anybody's help.

Only peers that proved to share a namespace are remembered, at the addresses they named themselves last. They are tried
at the start, when the network changes, when the last session has ended, and now and then while there are few; one that
does not answer waits longer each time.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import trio

from kvnet.errors import NetworkError
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import NamespaceId
from kvnet.network.dialing import MAX_ADDRESSES_PER_PEER, connect_first
from kvnet.network.interface import Network
from kvnet.network.news import News
from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often sessions are looked at."""
MAX_CLAIMED = 4
"""Addresses that a remembered peer is tried at because somebody on the local network says so."""
SAVE_S = 10.0
"""How often what changed is written down."""
SEEN_S = 300.0
"""How old "seen last" may be before a peer that is still there counts as changed."""
DIAL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BookLimits:
    """How many, and how often.

    Attributes:
        peers: remembered in all; the one seen longest ago goes first.
        wanted: members connected, beyond which no remembered peer is dialled.
        in_flight: dials at a time.
        retry_s: seconds before a peer that did not answer is tried again; doubles with each failure.
        max_retry_s: the longest of these pauses.
        forget_s: a peer that did not answer and was not seen for this long is forgotten.
    """

    peers: int = 1000
    wanted: int = 16
    in_flight: int = 4
    retry_s: float = 10.0
    max_retry_s: float = 3600.0
    forget_s: float = 90 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RememberedPeer:
    """A member met before.

    Attributes:
        peer: its peer id.
        addresses: multiaddr texts, best first.
        namespaces: ids of the namespaces it proved; hashes, not secrets.
        seen_s: when it was last connected, in seconds since 1970.
        failures: dials in a row that failed.
        due_s: not dialled before, in seconds since 1970.
    """

    peer: PeerId
    addresses: tuple[str, ...]
    namespaces: tuple[NamespaceId, ...]
    seen_s: float
    failures: int = 0
    due_s: float = 0.0


class PeerKeeper(Protocol):
    """Where remembered peers outlive a run. Its calls block, and raise nothing."""

    def load(self) -> Sequence[RememberedPeer]:
        """Everything kept."""

    def save(self, changed: Sequence[RememberedPeer], removed: Sequence[PeerId]) -> None:
        """Keep some, and keep others no longer."""


class PeerBook:
    """The remembered peers and whom to dial next; no clock and no I/O. Times are seconds since 1970.

    Args:
        limits: how many, and how often.
    """

    def __init__(self, limits: BookLimits | None = None) -> None:
        self._limits = limits or BookLimits()
        self._peers: dict[PeerId, RememberedPeer] = {}
        # What anybody on the local network may have said: never kept, and never in place of what a peer has proved.
        self._claimed: dict[PeerId, tuple[str, ...]] = {}
        self._changed: set[PeerId] = set()
        self._removed: set[PeerId] = set()

    def __len__(self) -> int:
        return len(self._peers)

    def restore(self, kept: Iterable[RememberedPeer]) -> None:
        """What an earlier run remembered."""
        for each in kept:
            self._peers.setdefault(each.peer, each)
        self._bound()

    def met(self, peer: PeerId, addresses: Sequence[str], namespaces: Iterable[NamespaceId], now_s: float) -> None:
        """A member is connected; the addresses it names replace those it had."""
        self._claimed.pop(peer, None)
        before = self._peers.get(peer)
        named = tuple(addresses[:MAX_ADDRESSES_PER_PEER]) or (before.addresses if before is not None else ())
        after = RememberedPeer(peer, named, tuple(sorted(namespaces)), now_s)
        if before is not None and replace(before, seen_s=now_s) == after and now_s - before.seen_s < SEEN_S:
            return
        self._peers[peer] = after
        self._note(peer)
        self._bound()

    def moved(self, peer: PeerId, addresses: Sequence[str], now_s: float) -> None:
        """A neighbour says where it is: if it is a remembered one it is tried there, first and at once.

        Nothing proves it yet, so the addresses it had are tried behind, and stay.
        """
        before, claimed = self._peers.get(peer), tuple(addresses[:MAX_CLAIMED])
        if before is None or self._claimed.get(peer, before.addresses[: len(claimed)]) == claimed:
            return
        self._claimed[peer] = claimed
        self._peers[peer] = replace(before, failures=0, due_s=now_s)
        self._note(peer)

    def failed(self, peer: PeerId, now_s: float) -> None:
        """It did not answer."""
        before = self._peers.get(peer)
        if before is None:
            return
        if now_s - before.seen_s > self._limits.forget_s:
            self._forget(peer)
            return
        pause_s = min(self._limits.retry_s * 2.0**before.failures, self._limits.max_retry_s)
        self._peers[peer] = replace(before, failures=min(before.failures + 1, 16), due_s=now_s + pause_s)
        self._note(peer)

    def not_a_member(self, peer: PeerId) -> None:
        """It is connected and proves no common namespace any more: it, or this node, has left."""
        if peer in self._peers:
            self._forget(peer)

    def retry_all(self, now_s: float) -> None:
        """Whatever kept them away may be over: all of them are due."""
        for peer, each in self._peers.items():
            self._peers[peer] = replace(each, failures=0, due_s=now_s)

    def due(self, connected: frozenset[PeerId], n_members: int, now_s: float) -> list[RememberedPeer]:
        """Whom to dial now, those seen last first.

        Args:
            connected: peers that are connected or dialled already.
            n_members: members connected.
            now_s: the time.
        """
        # A wall clock that was set back must not keep peers waiting longer than a pause can last.
        latest_s = now_s + self._limits.max_retry_s
        waiting = [
            each
            for each in self._peers.values()
            if each.peer not in connected and each.addresses and not now_s < each.due_s <= latest_s
        ]
        room = max(0, min(self._limits.in_flight, self._limits.wanted - n_members))
        chosen = sorted(waiting, key=lambda each: -each.seen_s)[:room]
        return [replace(each, addresses=self._to_try(each)) for each in chosen]

    def _to_try(self, remembered: RememberedPeer) -> tuple[str, ...]:
        claimed = self._claimed.get(remembered.peer, ())
        return tuple(dict.fromkeys((*claimed, *remembered.addresses)))

    def take_changes(self) -> tuple[list[RememberedPeer], list[PeerId]]:
        """What changed since the last call, and who is remembered no longer."""
        changed, removed = [self._peers[peer] for peer in self._changed], list(self._removed)
        self._changed.clear()
        self._removed.clear()
        return changed, removed

    def _note(self, peer: PeerId) -> None:
        self._changed.add(peer)
        self._removed.discard(peer)

    def _forget(self, peer: PeerId) -> None:
        self._claimed.pop(peer, None)
        del self._peers[peer]
        self._changed.discard(peer)
        self._removed.add(peer)

    def _bound(self) -> None:
        oldest = sorted(self._peers.values(), key=lambda each: each.seen_s)
        for each in oldest[: max(0, len(oldest) - self._limits.peers)]:
            self._forget(each.peer)


class PeerRemembrance:
    """Writes members down and reaches them again.

    Args:
        network: where to dial.
        sessions: the open sessions in which some namespace is proved.
        session_with: the session with a peer, whatever it has proved.
        lane: where the keeper is called.
        keeper: what outlives this run; None: nothing does.
        limits: how many, and how often.
        wall_s: seconds since 1970.
    """

    def __init__(
        self,
        network: Network,
        sessions: Callable[[], Sequence[PeerSession]],
        session_with: Callable[[PeerId], PeerSession | None],
        *,
        lane: Lane,
        keeper: PeerKeeper | None = None,
        limits: BookLimits | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._sessions = sessions
        self._session_with = session_with
        self._lane = lane
        self._keeper = keeper
        self._wall_s = wall_s
        self._dialling: set[PeerId] = set()
        self._changed = News()
        self.book = PeerBook(limits)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Remember and reconnect until cancelled."""
        if self._keeper is not None:
            self.book.restore(await self._lane.run(self._keeper.load))
        self.book.retry_all(self._wall_s())
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep)
            had_members = False
            while True:
                members = self._note_members()
                if had_members and not members:
                    _log.info("the last member is gone; trying %d remembered peers", len(self.book))
                    self.book.retry_all(self._wall_s())
                had_members = bool(members)
                self._dial_due(nursery, members)
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()

    def network_changed(self) -> None:
        """This machine is on another network, or awake again: everybody is tried at once."""
        self.book.retry_all(self._wall_s())
        self._changed.tell()

    async def greet(self, _session: PeerSession) -> None:
        """A session has opened: who is met is remembered at once, also when this node ends in the next second."""
        self._changed.tell()

    def moved(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """A neighbour says where it is."""
        self.book.moved(peer, addresses, self._wall_s())
        self._changed.tell()

    def _note_members(self) -> int:
        where = {info.peer: info.addresses for info in self._network.connected()}
        members = {session.peer: session for session in self._sessions()}
        for peer, session in members.items():
            self.book.met(peer, where.get(peer, ()), [each.id for each in session.slots], self._wall_s())
        for peer in where.keys() - members.keys():
            found = self._session_with(peer)
            if found is not None and not found.closed.is_set() and not found.slots:
                self.book.not_a_member(peer)
        return len(members)

    def _dial_due(self, nursery: trio.Nursery, members: int) -> None:
        busy = frozenset(info.peer for info in self._network.connected()) | self._dialling
        for each in self.book.due(busy, members + len(self._dialling), self._wall_s()):
            self._dialling.add(each.peer)
            nursery.start_soon(self._dial, each)

    async def _dial(self, remembered: RememberedPeer) -> None:
        try:
            await connect_first(self._network, remembered.addresses, timeout_s=DIAL_TIMEOUT_S)
        except NetworkError as error:
            self.book.failed(remembered.peer, self._wall_s())
            _log.debug("a remembered peer was not reached: %s", error)
        finally:
            self._dialling.discard(remembered.peer)
            self._changed.tell()

    async def _keep(self) -> None:
        if self._keeper is None:
            return
        try:
            while True:
                await trio.sleep(SAVE_S)
                await self._save(self._keeper)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._save(self._keeper)

    async def _save(self, keeper: PeerKeeper) -> None:
        changed, removed = self.book.take_changes()
        if changed or removed:
            await self._lane.run(keeper.save, changed, removed)
