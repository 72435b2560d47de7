"""A good guest: looks at the machine every half minute, and serves, announces and stays awake accordingly."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

from kvnet.exchange.lane import Lane
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.presence import Presences, PresenceState
from kvnet_node.guest.awake import AwakeHolder
from kvnet_node.guest.metered import metered
from kvnet_node.guest.pausing import Pause
from kvnet_node.guest.policy import Conduct, Situation, conduct, keep_awake
from kvnet_node.guest.power import on_battery
from kvnet_node.guest.sleep import LOOK_S, SleepWatch, asleep_s
from kvnet_node.guest.sleep_notice import SleepBell, SleepNotice, system_notice

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

_log = structlog.get_logger(__name__)

POLL_S = 30.0
"""Seconds from one look at battery and link to the next."""

LEAVE_S = 1.0
"""Seconds that members have to hear that this node leaves, or falls asleep."""

DROWSY_S = 60.0
"""Seconds after which a machine that was about to sleep and has not counts as awake."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as a guest sees it.

    Attributes:
        look: whether it runs on battery, and on a metered link; may take a while.
        awake: what keeps it awake.
        uploading: whether something is on its way to a peer.
        asleep: seconds it has been asleep since it was started.
        wall_s: seconds since 1970.
        notice: hears from the system before it sleeps; None where nothing does.
    """

    look: Callable[[], tuple[bool | None, bool | None]]
    awake: AwakeHolder
    uploading: Callable[[], bool]
    asleep: Callable[[], float] = asleep_s
    wall_s: Callable[[], float] = time.time
    notice: SleepNotice | None = None


def this_machine(node: ExchangeNode, link: str) -> Machine:
    """This machine; ``link`` is the owner's setting: ``auto``, ``yes`` for a metered link, or ``no``."""
    return Machine(lambda: (on_battery(), metered(link)), AwakeHolder(), lambda: node.uploading, notice=system_notice())


class Guest:
    """See the module.

    Args:
        node: among its peers; not running yet.
        pause: whether its owner paused it; loaded.
        lane: where the machine is looked at.
        machine: it.
        battery: the owner's setting: ``auto``, or ``serve`` on battery too.
    """

    def __init__(
        self, node: ExchangeNode, pause: Pause, lane: Lane, machine: Machine, *, battery: str = "auto"
    ) -> None:
        self._node = node
        self._lane = lane
        self._machine = machine
        self._serve_on_battery = battery == "serve"
        self._seen: tuple[bool | None, bool | None] = (None, None)
        self._leaving = False
        self._drowsy_at_s: float | None = None
        self._busy_s = float("-inf")
        self._holding = False
        self.pause = pause
        self.presences = Presences(node)
        self.conduct = self._decide()

    def left_s(self) -> float:
        """Seconds left of a pause; infinity for one without an end."""
        return self.pause.left_s(self._machine.wall_s())

    def _decide(self) -> Conduct:
        battery, link = self._seen
        return conduct(Situation(battery, link, paused=self.left_s() > 0, serve_on_battery=self._serve_on_battery))

    def apply(self) -> None:
        """Behave as the situation asks for, from now on."""
        if self._leaving or self._drowsy_at_s is not None:
            return
        wanted = self._decide()
        if wanted != self.conduct:
            _log.info("serving" if wanted.serve else "not serving", reason=wanted.why.value)
        self.conduct = wanted
        self._node.serving = wanted.serve
        self.presences.become(PresenceState.SERVING if wanted.serve else PresenceState.PAUSED)

    async def fall_asleep(self) -> None:
        """Tell members that this machine sleeps in a moment; nothing is served until it is awake."""
        self._drowsy_at_s = trio.current_time()
        self._node.serving = False
        await self.presences.leave(LEAVE_S)

    def awake(self) -> None:
        """Be as before, try all connections and announce anew; whether members were told of the sleep or not."""
        self._drowsy_at_s = None
        self.apply()
        self._node.network_changed()

    async def leave(self) -> None:
        """Tell members that this node ends, and let the machine sleep."""
        self._leaving = True
        self._node.serving = False
        await self.presences.leave(LEAVE_S)
        await self._lane.run(lambda: self._machine.awake.hold(wanted=False))

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Look and behave accordingly until cancelled; when it has started, the first look was taken."""
        self._seen = await self._lane.run(self._machine.look)
        self.apply()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_machine)
                nursery.start_soon(self._watch_sleep)
                if self._machine.notice is not None:
                    await nursery.start(SleepBell(self._machine.notice, self.fall_asleep, self.awake).run)
        finally:
            self._machine.awake.hold(wanted=False)

    async def _watch_machine(self) -> None:
        while True:
            # A pause that ends before the next look ends in time.
            await trio.sleep(min(POLL_S, self.left_s() or POLL_S))
            self._seen = await self._lane.run(self._machine.look)
            self.apply()

    async def _watch_sleep(self) -> None:
        watch = SleepWatch(self._machine.asleep())
        while True:
            await trio.sleep(LOOK_S)
            if slept_s := watch.look(self._machine.asleep()):
                _log.info("awake again", asleep_s=round(slept_s))
                self.awake()
            elif self._drowsy_at_s is not None and trio.current_time() - self._drowsy_at_s > DROWSY_S:
                _log.info("no sleep came")
                self.awake()
            await self._stay_awake()

    async def _stay_awake(self) -> None:
        now_s = trio.current_time()
        uploading = self._machine.uploading()
        if uploading:
            self._busy_s = now_s
        wanted = keep_awake(uploading=uploading, idle_s=now_s - self._busy_s, on_battery=self._seen[0])
        if wanted != self._holding:
            self._holding = wanted
            await self._lane.run(lambda: self._machine.awake.hold(wanted=wanted))
