"""Word from the system that it falls asleep, brought to the trio loop; sleep is never held up for longer than a moment.

The system's word comes in a thread of its own, which waits until members were told and then lets sleep come. It waits
for `HOLD_S` at the most, whatever the loop does: macOS would sleep without an answer too, but only after 30 seconds.
"""

import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

HOLD_S = 2.0
"""Seconds for which sleep is held up at the most."""
MAX_WAITING = 4
"""Words that wait for the loop; more mean that it is stuck, and nobody is told then."""


class SleepNotice(Protocol):
    """Hears from the system. Both functions are called in a thread of its own; the first may block for a moment."""

    def start(self, falls_asleep: Callable[[], None], is_awake: Callable[[], None]) -> None:
        """Hear from now on; returns at once. Raises nothing: where it cannot hear, it does not."""

    def stop(self) -> None:
        """Hear no longer; may block for a moment."""


def system_notice() -> SleepNotice | None:
    """This system's; None where nothing tells in advance."""
    if sys.platform == "darwin":
        from kvnet_node.guest.sleep_macos import MacSleepNotice

        return MacSleepNotice()
    return None


class SleepBell:
    """Calls the loop when the system falls asleep and when it is awake.

    Args:
        notice: hears from the system.
        falls_asleep: tells members; sleep waits for it.
        is_awake: takes everything up again.
        hold_s: for how long sleep waits at the most.
    """

    def __init__(
        self,
        notice: SleepNotice,
        falls_asleep: Callable[[], Awaitable[None]],
        is_awake: Callable[[], None],
        *,
        hold_s: float = HOLD_S,
    ) -> None:
        self._notice = notice
        self._falls_asleep = falls_asleep
        self._is_awake = is_awake
        self._hold_s = hold_s

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        token = trio.lowlevel.current_trio_token()
        words, heard = trio.open_memory_channel[threading.Event | None](MAX_WAITING)

        def falls_asleep() -> None:
            told = threading.Event()
            # A word that finds no room, or no loop any more, is lost: sleep waits for its time then, and comes.
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(_put, words, told)
                told.wait(self._hold_s)

        def is_awake() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(_put, words, None)

        self._notice.start(falls_asleep, is_awake)
        try:
            with words, heard:
                task_status.started()
                async for told in heard:
                    await self._obey(told)
        finally:
            # Waits for its thread, which may wait for `hold_s` itself; at the end of a node that is soon enough.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._notice.stop)

    async def _obey(self, told: threading.Event | None) -> None:
        if told is None:
            self._is_awake()
            return
        _log.info("the system falls asleep")
        try:
            await self._falls_asleep()
        finally:
            told.set()


def _put(words: trio.MemorySendChannel[threading.Event | None], told: threading.Event | None) -> None:
    with suppress(trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
        words.send_nowait(told)
