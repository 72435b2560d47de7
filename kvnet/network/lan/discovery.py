"""Neighbours on the local network, for trio: what mDNS hears comes through a bounded queue and is checked here.

The interfaces are looked at every few seconds. When they change, and when the machine has slept, mDNS is begun anew
under new names and whoever wants to know is told.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    private_interfaces,
    read_heard,
)
from kvnet.network.lan.responder import Responder
from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds from one look at the interfaces and the clocks to the next."""
QUEUE = 256
"""What was heard and not looked at yet; the oldest of more is dropped, and heard again when it is said again."""
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 300.0
"""How long mDNS is left alone after it failed; doubles with each failure."""


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
        addresses: where it listens, multiaddr texts; asked anew whenever mDNS begins.
        events: who is told.
        random: fresh random bytes, for names.
        interfaces: this machine's.
    """

    def __init__(
        self,
        peer: PeerId,
        addresses: Callable[[], list[str]],
        events: LanEvents,
        *,
        random: Callable[[int], bytes],
        interfaces: Callable[[], list[LanInterface]] = list_interfaces,
    ) -> None:
        self._peer = peer
        self._addresses = addresses
        self._events = events
        self._random = random
        self._list_interfaces = interfaces
        self._interfaces: list[LanInterface] = []
        self._announcement: Announcement | None = None
        self._responder: Responder | None = None
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
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                self._interfaces = self._list_interfaces()
                await self._begin(token)
                task_status.started()
                while True:
                    await trio.sleep(LOOK_S)
                    await self._look(token, clocks)
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def _look(self, token: trio.lowlevel.TrioToken, clocks: ClockWatch) -> None:
        interfaces = self._list_interfaces()
        moved = interfaces != self._interfaces
        woke = clocks.jumped(time.time(), time.monotonic())
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

    def _note_failure(self, reason: str) -> None:
        pause_s = min(FIRST_PAUSE_S * 2.0**self._failures, MAX_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        self._pause_until_s = trio.current_time() + pause_s
        self.status = f"failed: {reason}"
        _log.warning("no discovery on the local network for %.0f s: %s", pause_s, reason)

    async def _begin(self, token: trio.lowlevel.TrioToken) -> None:
        """Start mDNS on the interfaces there are; nothing to do is no failure."""
        near = private_interfaces(self._interfaces)
        self._announcement = announce(self._peer, self._addresses(), near, self._random(2 * NAME_SIZE_BYTES))
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

        self._responder = Responder(self._announcement, [str(each.address.ip) for each in near], deliver, deliver)
        self._responder.start()
        self.status = "on " + ", ".join(f"{each.name} ({each.address.ip})" for each in near)
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
