"""Neighbours on the local network: who is there, who of them is dialled when, and what came of it.

Anybody on a network can claim to be many neighbours. So what is kept and what is dialled is bounded and paced, failures
are remembered, and connections to neighbours that prove nothing are let go when their places are needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvnet.errors import NetworkError
from kvnet.exchange.session import PeerSession
from kvnet.network.dialing import connect_first
from kvnet.network.interface import Network
from kvnet.network.lan.records import Sighting
from kvnet.network.news import News
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.handshake import PROTOCOL_VERSION

if TYPE_CHECKING:
    from trio_typing import TaskStatus

DIAL_TIMEOUT_S = 5.0
LOOK_S = 1.0
"""How often what came of dials is looked at."""


@dataclass(frozen=True, slots=True)
class NeighbourLimits:
    """How many, and how often.

    Attributes:
        neighbours: kept in all; those never reached go first, the one seen longest ago before the others.
        names: service instances kept of one peer; restarts leave some behind.
        dials_per_s: on average, of all neighbours together.
        burst: dials at once.
        in_flight: dials under way.
        strangers: connections to neighbours that have proved nothing.
        stranger_s: seconds that such a connection lasts at least.
        retry_s: seconds before a neighbour that failed is dialled again; doubles with each failure.
        max_retry_s: the longest of these pauses, and the pause after one that proved nothing.
        yield_s: seconds by which the peer with the larger id lets the other one dial first.
    """

    neighbours: int = 128
    names: int = 4
    dials_per_s: float = 4.0
    burst: int = 8
    in_flight: int = 8
    strangers: int = 16
    stranger_s: float = 30.0
    retry_s: float = 5.0
    max_retry_s: float = 600.0
    yield_s: float = 1.5


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A neighbour, for people to read.

    Attributes:
        peer: its peer id.
        addresses: as it says.
        state: "member" (a session with a common namespace), "stranger" (a session without one), "connected",
            "other version", "unreachable", or "found" when it has not been tried.
        reason: why it is unreachable.
    """

    peer: PeerId
    addresses: tuple[str, ...]
    state: str
    reason: str = ""


@dataclass(slots=True)
class _Row:
    sighting: Sighting
    seen: float
    due_s: float
    names: dict[str, None] = field(default_factory=dict)
    failures: int = 0
    dialling: bool = False
    reached: bool = False
    reason: str = ""


class NeighbourTable:
    """Who is there and whom to dial next; no clock and no I/O.

    Args:
        own: this node.
        limits: how many, and how often.
    """

    def __init__(self, own: PeerId, limits: NeighbourLimits | None = None) -> None:
        self._own = own
        self._limits = limits or NeighbourLimits()
        self._rows: dict[PeerId, _Row] = {}
        self._budget = float(self._limits.burst)
        self._budget_at = float("-inf")

    def sighted(self, sighting: Sighting, now_s: float) -> bool:
        """A neighbour is there. One that says something new of itself is tried anew; whether it is such a one."""
        row = self._rows.pop(sighting.peer, None)
        known = row
        if row is None or row.sighting.addresses != sighting.addresses or row.sighting.version != sighting.version:
            yields = self._limits.yield_s if self._own > sighting.peer else 0.0
            names = row.names if row is not None else {}
            row = _Row(sighting, now_s, now_s + yields, names)
            if known is not None:
                row.dialling, row.reached = known.dialling, known.reached
        row.seen = now_s
        row.names.pop(sighting.name, None)
        row.names[sighting.name] = None
        while len(row.names) > self._limits.names:
            del row.names[next(iter(row.names))]
        self._rows[sighting.peer] = row
        while len(self._rows) > self._limits.neighbours:
            unproved = (peer for peer, each in self._rows.items() if not each.reached)
            del self._rows[next(unproved, next(iter(self._rows)))]
        return row is not known

    def gone(self, name: str) -> None:
        """A service instance has gone; a neighbour without any is no longer one."""
        for peer, row in list(self._rows.items()):
            row.names.pop(name, None)
            if not row.names:
                del self._rows[peer]

    def retry_all(self, now_s: float) -> None:
        """Whatever kept neighbours away may be over: all of them are due."""
        for row in self._rows.values():
            row.due_s, row.failures = now_s, 0

    def next_dials(self, connected: frozenset[PeerId], now_s: float) -> list[Sighting]:
        """Whom to dial now; each is under way until `dialled` is called."""
        self._refill(now_s)
        for peer in connected & self._rows.keys():
            self._rows[peer].reached = True
        busy = sum(row.dialling for row in self._rows.values())
        chosen: list[Sighting] = []
        for peer, row in sorted(self._rows.items(), key=lambda item: item[1].due_s):
            if busy + len(chosen) >= self._limits.in_flight or self._budget < 1.0 or row.due_s > now_s:
                break
            if peer in connected or row.dialling or row.sighting.version < PROTOCOL_VERSION:
                continue
            row.dialling = True
            self._budget -= 1.0
            chosen.append(row.sighting)
        return chosen

    def _refill(self, now_s: float) -> None:
        passed = max(0.0, now_s - self._budget_at)
        self._budget = min(float(self._limits.burst), self._budget + passed * self._limits.dials_per_s)
        self._budget_at = now_s

    def dialled(self, peer: PeerId, failure: str, now_s: float) -> None:
        """What came of a dial; `failure` is "" when it is connected."""
        row = self._rows.get(peer)
        if row is None:
            return
        row.dialling = False
        row.reason = failure
        if failure:
            row.due_s = now_s + min(self._limits.retry_s * 2.0**row.failures, self._limits.max_retry_s)
            row.failures = min(row.failures + 1, 16)
        else:
            row.failures = 0
            row.due_s = now_s + self._limits.retry_s

    def too_many(self, strangers: Sequence[tuple[PeerId, float]], now_s: float) -> list[PeerId]:
        """Which connections to neighbours that prove nothing to let go; they are tried again much later.

        Args:
            strangers: neighbours with a session without a common namespace, and since when.
            now_s: the time, on any monotonic clock.
        """
        known = [(since, peer) for peer, since in strangers if peer in self._rows]
        excess = max(0, len(known) - self._limits.strangers)
        gone = [peer for since, peer in sorted(known)[:excess] if now_s - since >= self._limits.stranger_s]
        for peer in gone:
            self._rows[peer].due_s = now_s + self._limits.max_retry_s
        return gone

    def neighbours(self, state_of: Callable[[PeerId], str]) -> list[Neighbour]:
        """All of them, the one seen last first.

        Args:
            state_of: how a peer is connected: "member", "stranger", "connected", or "" when it is not.
        """
        return [
            Neighbour(peer, row.sighting.addresses, state_of(peer) or _unconnected(row), row.reason)
            for peer, row in reversed(self._rows.items())
        ]


def _unconnected(row: _Row) -> str:
    if row.sighting.version < PROTOCOL_VERSION:
        return "other version"
    return "unreachable" if row.reason else "found"


class Neighbours:
    """Dials neighbours, so that members among them become sessions.

    Args:
        network: where to dial.
        session_with: the open session with a peer, if any.
        limits: how many, and how often.
        keep: peers whose connection is not let go whatever they prove, such as bootstrap peers.
    """

    def __init__(
        self,
        network: Network,
        session_with: Callable[[PeerId], PeerSession | None],
        limits: NeighbourLimits | None = None,
        *,
        keep: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._network = network
        self._session_with = session_with
        self._keep = keep
        self._table = NeighbourTable(network.peer_id, limits)
        self._since: dict[PeerId, float] = {}
        self._to_probe: set[PeerId] = set()
        self._changed = News()

    def sighted(self, sighting: Sighting) -> None:
        """A neighbour is there. If it is connected from where it no longer is, that connection may be dead."""
        moved = self._table.sighted(sighting, trio.current_time())
        if moved and any(info.peer == sighting.peer for info in self._network.connected()):
            self._to_probe.add(sighting.peer)
        self._changed.tell()

    def gone(self, name: str) -> None:
        """A service instance has gone."""
        self._table.gone(name)

    def retry_all(self) -> None:
        """This machine is on another network, awake again, or in other namespaces: try everybody anew."""
        self._table.retry_all(trio.current_time())
        self._changed.tell()

    def list(self) -> list[Neighbour]:
        """Who is there, and how it stands with them."""
        connected = frozenset(info.peer for info in self._network.connected())

        def state_of(peer: PeerId) -> str:
            session = self._session_with(peer) if peer in connected else None
            if session is not None and not session.closed.is_set():
                return "member" if session.slots else "stranger"
            return "connected" if peer in connected else ""

        return self._table.neighbours(state_of)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Dial until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                now_s = trio.current_time()
                connected = frozenset(info.peer for info in self._network.connected())
                for sighting in self._table.next_dials(connected, now_s):
                    nursery.start_soon(self._dial, sighting)
                for peer in self._to_probe:
                    nursery.start_soon(self._network.probe, peer)
                self._to_probe.clear()
                for peer in self._table.too_many(self._strangers(now_s), now_s):
                    nursery.start_soon(self._network.disconnect, peer)
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()

    async def _dial(self, sighting: Sighting) -> None:
        failure = ""
        try:
            await connect_first(self._network, sighting.addresses, timeout_s=DIAL_TIMEOUT_S)
        except NetworkError as error:
            failure = str(error)
        self._table.dialled(sighting.peer, failure, trio.current_time())

    def _strangers(self, now_s: float) -> Sequence[tuple[PeerId, float]]:
        """Neighbours with a session in which nothing is proved, and since when."""
        strangers = [each.peer for each in self.list() if each.state == "stranger" and each.peer not in self._keep]
        self._since = {peer: self._since.get(peer, now_s) for peer in strangers}
        return list(self._since.items())
