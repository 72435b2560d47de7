"""Get to know members that one has only heard of: their addresses come with what other members tell."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.told_dialing import ToldDialer
from kvnet.network.interface import Network
from kvnet.protocol.ids import PeerId
from kvnet.protocol.tables import KnownMember

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

YIELD_S = 2.0
"""Head start of the node with the lower peer id: two that hear of each other together need not both dial."""

MOVED_S = 10.0
"""Seconds between two dials of a member that is said to be somewhere else each time."""

LOOK_S = 1.0
"""How often members that nobody is connected to are looked for."""


@dataclass(frozen=True, slots=True)
class MeetLimits:
    """Members one has only heard of, and how they are dialled.

    Attributes:
        wanted: members connected, beyond which nobody is dialled unasked.
        in_flight: dials at a time.
        timeout_s: of one dial.
        retry_s: seconds before one that did not answer is tried again; doubles with each failure.
        max_retry_s: the longest of these pauses.
    """

    wanted: int = 32
    in_flight: int = 4
    timeout_s: float = 5.0
    retry_s: float = 30.0
    max_retry_s: float = 1800.0


@dataclass(slots=True)
class _Tried:
    """How dialling a member went."""

    addresses: tuple[str, ...]
    failures: int = 0
    due_s: float = 0.0
    dialled_s: float = float("-inf")


class Meetings:
    """Dials members in the background, few at a time.

    Args:
        network: to dial with.
        members: whoever somebody has told of.
        open_session: opens the session with a connected peer.
        limits: how many, and how often.
        dialer: what else is dialled on others' word goes through the same.
    """

    def __init__(
        self,
        network: Network,
        members: Callable[[], Mapping[PeerId, KnownMember]],
        open_session: Callable[[PeerId], Awaitable[object]],
        limits: MeetLimits | None = None,
        dialer: ToldDialer | None = None,
    ) -> None:
        self._network = network
        self._dialer = dialer or ToldDialer(network)
        self._members = members
        self._open_session = open_session
        self._limits = limits or MeetLimits()
        self._tried: dict[PeerId, _Tried] = {}

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Dial until cancelled."""
        slots = trio.Semaphore(self._limits.in_flight)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                for member in self._unmet():
                    await slots.acquire()
                    tried = self._tried[member.peer]
                    tried.due_s, tried.dialled_s = float("inf"), trio.current_time()
                    nursery.start_soon(self._meet, member, tried, slots)
                await trio.sleep(LOOK_S)

    def _unmet(self) -> list[KnownMember]:
        connected = {info.peer for info in self._network.connected()}
        known = self._members()
        self._tried = {peer: tried for peer, tried in self._tried.items() if peer in known}
        unmet: list[KnownMember] = []
        now_s = trio.current_time()
        for peer, member in known.items():
            tried = self._tried.get(peer)
            if tried is None or tried.addresses != member.addresses:
                # Somewhere else than before: that it was not there says nothing about that.
                tried = self._tried[peer] = self._begun(member, tried, now_s)
            if peer not in connected and member.addresses and tried.due_s <= now_s:
                unmet.append(member)
        # Whoever never answers, wherever it is said to be, keeps nobody waiting.
        unmet.sort(key=lambda member: self._tried[member.peer].failures)
        return unmet[: max(0, self._limits.wanted - len(connected))]

    def _begun(self, member: KnownMember, before: _Tried | None, now_s: float) -> _Tried:
        due_s = now_s + (YIELD_S if self._network.peer_id > member.peer else 0.0)
        if before is None:
            return _Tried(member.addresses, due_s=due_s)
        due_s = max(due_s, before.dialled_s + MOVED_S)
        return _Tried(member.addresses, before.failures, due_s, before.dialled_s)

    async def _meet(self, member: KnownMember, tried: _Tried, slots: trio.Semaphore) -> None:
        limits = self._limits
        try:
            await self._open_session(
                await self._dialer.connect(member.peer, member.addresses, member.signer, timeout_s=limits.timeout_s)
            )
            tried.failures = 0
        except KvnetError as error:
            tried.failures = min(tried.failures + 1, 16)
            _log.debug("a member could not be reached: %s", error)
        finally:
            slots.release()
        tried.due_s = trio.current_time() + min(limits.retry_s * 2.0**tried.failures, limits.max_retry_s)
