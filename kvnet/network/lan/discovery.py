"""Neighbours on the local network, for trio: what mDNS hears comes through a bounded queue and is checked here.

The interfaces are looked at every few seconds. When they change, and when the machine has slept, mDNS is begun anew
under new names and whoever wants to know is told.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvnet.network.lan.interfaces import list_interfaces
from kvnet.network.lan.records import (
    NAME_SIZE_BYTES,
    Announcement,
    ClockWatch,
    Heard,
    LanInterface,
    Sighting,
    announce,
    places,
    private_interfaces,
    read_heard,
)
from kvnet.network.lan.responder import OnGone, OnHeard, Responder
from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

QUEUE = 256
"""What was heard and not looked at yet; the oldest of more is dropped, and heard again when it is said again."""


class Responding(Protocol):
    """One run of mDNS; see `Responder`."""

    failure: str
    heard_itself: bool

    @property
    def alive(self) -> bool:
        """Whether it still runs."""

    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End; may block for a moment."""


Respond = Callable[[Announcement, Sequence[str], OnHeard, OnGone], Responding]
"""Makes a run of mDNS: what to say, on which addresses, and whom to tell, from another thread."""


@dataclass(frozen=True, slots=True)
class LanPace:
    """How often.

    Attributes:
        look_s: seconds from one look at the interfaces and the clocks to the next.
        first_pause_s: how long mDNS is left alone after it failed; doubles with each failure.
        max_pause_s: the longest of these pauses.
    """

    look_s: float = 3.0
    first_pause_s: float = 5.0
    max_pause_s: float = 300.0


@dataclass(frozen=True, slots=True)
class LanSystem:
    """What discovery needs of the machine.

    Attributes:
        interfaces: its addresses, now.
        respond: makes a run of mDNS.
        clocks: seconds of its wall clock and of its monotonic one, now.
    """

    interfaces: Callable[[], list[LanInterface]] = list_interfaces
    respond: Respond = Responder
    clocks: Callable[[], tuple[float, float]] = lambda: (time.time(), time.monotonic())


@dataclass(frozen=True, slots=True)
class LanEvents:
    """Who is told what; all are called on the trio loop and must not block.

    Attributes:
        sighted: somebody is there.
        gone: the named instance is not there any more.
        changed: this machine is on another network, or awake again.
    """

    sighted: Callable[[Sighting], None]
    gone: Callable[[str], None]
    changed: Callable[[], None]


class LanDiscovery:
    """Says that this node is here, and hears who else is.

    Args:
        peer: this node.
        listening: where it takes connections, multiaddr texts, ``0.0.0.0`` and ``::`` as they are; asked anew whenever
            mDNS begins.
        events: who is told.
        random: fresh random bytes, for names.
        pace: how often.
        system: the machine.
    """

    def __init__(
        self,
        peer: PeerId,
        listening: Callable[[], list[str]],
        events: LanEvents,
        *,
        random: Callable[[int], bytes],
        pace: LanPace | None = None,
        system: LanSystem | None = None,
    ) -> None:
        self._peer = peer
        self._listening = listening
        self._events = events
        self._random = random
        self._pace = pace or LanPace()
        self._system = system or LanSystem()
        self._interfaces: list[LanInterface] = []
        self._announcement: Announcement | None = None
        self._responder: Responding | None = None
        self._queue: deque[Heard | str] = deque(maxlen=QUEUE)
        self._arrived = trio.Event()
        self._failures = 0
        self._pause_until_s = 0.0
        self.status = "not started"

    @property
    def hears_itself(self) -> bool | None:
        """Whether what this node said came back to it over the network; None while it says nothing."""
        return self._responder.heard_itself if self._responder is not None else None

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Discover until cancelled; `started` when the first announcement is on its way."""
        token = trio.lowlevel.current_trio_token()
        clocks = ClockWatch()
        clocks.jumped(*self._system.clocks())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                self._interfaces = self._interfaces_now()
                await self._begin(token)
                task_status.started()
                while True:
                    await trio.sleep(self._pace.look_s)
                    await self._look(token, clocks)
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def _look(self, token: trio.lowlevel.TrioToken, clocks: ClockWatch) -> None:
        interfaces = self._interfaces_now()
        moved = places(interfaces) != places(self._interfaces)
        woke = clocks.jumped(*self._system.clocks())
        self._interfaces = interfaces
        if moved or woke:
            _log.info("the network changed" if moved else "awake again, or the clock was set")
            self._failures, self._pause_until_s = 0, 0.0
            await self._end()
            await self._begin(token)
            self._events.changed()
        elif self._responder is not None and not self._responder.alive:
            self._note_failure(self._responder.failure)
            self._responder = None
        elif self._responder is None and self._failures and trio.current_time() >= self._pause_until_s:
            await self._begin(token)

    def _interfaces_now(self) -> list[LanInterface]:
        """Those of before when the system cannot say, as when this program has too many files open."""
        try:
            return self._system.interfaces()
        except OSError as error:
            _log.warning("the network interfaces are not known: %s", error.strerror or error)
            return self._interfaces

    def _note_failure(self, reason: str) -> None:
        pause_s = min(self._pace.first_pause_s * 2.0**self._failures, self._pace.max_pause_s)
        self._failures = min(self._failures + 1, 16)
        self._pause_until_s = trio.current_time() + pause_s
        self.status = f"failed: {reason}"
        _log.warning("no discovery on the local network for %.0f s: %s", pause_s, reason)

    async def _begin(self, token: trio.lowlevel.TrioToken) -> None:
        """Start mDNS on the interfaces there are; nothing to do is no failure."""
        near = private_interfaces(self._interfaces)
        self._announcement = announce(self._peer, self._listening(), near, self._random(2 * NAME_SIZE_BYTES))
        if self._announcement is None:
            self.status = "off: this node listens on no address of a private network"
            return

        def deliver(arrived: Heard | str) -> None:
            """In mDNS's thread. Appending to a deque is atomic; one wake-up is enough for all that is in it."""
            self._queue.append(arrived)
            try:
                token.run_sync_soon(self._wake, idempotent=True)
            except trio.RunFinishedError:
                return

        speaking = [each for each in near if each.ip.version == 4 or each.ip.is_link_local]
        addresses = [str(each.ip) for each in speaking]
        self._responder = self._system.respond(self._announcement, addresses, deliver, deliver)
        self._responder.start()
        self.status = "on " + ", ".join(
            f"{name} ({', '.join(str(each.ip) for each in speaking if each.name == name)})"
            for name in dict.fromkeys(each.name for each in speaking)
        )
        await trio.lowlevel.checkpoint()

    async def _end(self) -> None:
        responder, self._responder = self._responder, None
        if responder is not None:
            await trio.to_thread.run_sync(responder.stop)

    def _wake(self) -> None:
        self._arrived.set()

    async def _read(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived = trio.Event()
            while self._queue:
                arrived = self._queue.popleft()
                if isinstance(arrived, str):
                    self._events.gone(arrived)
                elif (sighting := read_heard(arrived, self._peer, self._interfaces)) is not None:
                    self._events.sighted(sighting)
