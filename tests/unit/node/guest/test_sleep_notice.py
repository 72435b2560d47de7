"""The system's word that it sleeps reaches the loop; whatever the loop does, sleep is let in."""

import queue
import threading
from collections.abc import Callable

import pytest
import trio

from kvnet_node.guest.sleep_macos import (
    CAN_SYSTEM_SLEEP,
    SYSTEM_HAS_POWERED_ON,
    SYSTEM_WILL_SLEEP,
    MacSleepNotice,
    OnMessage,
)
from kvnet_node.guest.sleep_notice import SleepBell

LIMIT_S = 60.0


class FakePort:
    """A registration whose messages a test sends; `listen` runs in the thread of the notice, as the real one does."""

    def __init__(self, *, broken: bool = False, forgets: int = 0) -> None:
        self._messages: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self._broken = broken
        self._forgets = forgets
        self.allowed: queue.Queue[int] = queue.Queue()
        self.ended = threading.Event()

    def listen(self, on_message: OnMessage) -> None:
        if self._broken:
            raise OSError("not for this program")
        while (message := self._messages.get()) is not None:
            try:
                on_message(*message)
            except RuntimeError:  # ctypes prints what a callback raises, and goes on
                continue
        self.ended.set()

    def allow(self, answer_to: int) -> None:
        self.allowed.put(answer_to)

    def stop(self) -> None:
        if self._forgets:
            self._forgets -= 1
            return
        self._messages.put(None)

    def say(self, kind: int, answer_to: int = 0) -> None:
        self._messages.put((kind, answer_to))

    async def answer(self) -> int:
        with trio.fail_after(LIMIT_S):
            return await trio.to_thread.run_sync(lambda: self.allowed.get(timeout=LIMIT_S))


class Told:
    """What a node was told; falling asleep takes as long as a test wants."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.may_sleep = trio.Event()
        self.may_sleep.set()
        self.heard = trio.Event()

    async def falls_asleep(self) -> None:
        self.words.append("asleep")
        self.heard.set()
        await self.may_sleep.wait()
        self.words.append("told")

    def is_awake(self) -> None:
        self.words.append("awake")
        self.heard.set()


async def start(nursery: trio.Nursery, port: FakePort, told: Told, hold_s: float = LIMIT_S) -> None:
    await nursery.start(SleepBell(MacSleepNotice(port), told.falls_asleep, told.is_awake, hold_s=hold_s).run)


async def test_sleep_waits_until_members_were_told_and_waking_is_heard_of(nursery: trio.Nursery) -> None:
    port, told = FakePort(), Told()
    told.may_sleep = trio.Event()
    await start(nursery, port, told)
    port.say(SYSTEM_WILL_SLEEP, 7)
    await told.heard.wait()
    assert port.allowed.empty()
    told.may_sleep.set()
    assert await port.answer() == 7
    assert told.words == ["asleep", "told"]
    told.heard = trio.Event()
    port.say(SYSTEM_HAS_POWERED_ON)
    await told.heard.wait()
    assert told.words == ["asleep", "told", "awake"]
    assert port.allowed.empty()


async def test_sleep_does_not_wait_for_a_node_that_takes_too_long(nursery: trio.Nursery) -> None:
    port, told = FakePort(), Told()
    told.may_sleep = trio.Event()
    await start(nursery, port, told, hold_s=0.01)
    for number in range(3 + 8):  # more than find room
        port.say(SYSTEM_WILL_SLEEP, number)
    assert [await port.answer() for _ in range(11)] == list(range(11))
    told.may_sleep.set()


async def test_the_question_whether_it_may_sleep_is_answered_at_once_and_what_else_is_said_is_not(
    nursery: trio.Nursery,
) -> None:
    port, told = FakePort(), Told()
    await start(nursery, port, told)
    port.say(0xE0000320, 1)
    port.say(CAN_SYSTEM_SLEEP, 2)
    assert await port.answer() == 2
    assert told.words == []


def test_sleep_is_let_in_when_what_is_to_be_done_before_fails() -> None:
    port = FakePort()
    notice = MacSleepNotice(port)

    def fails() -> None:
        raise RuntimeError("no")

    notice.start(fails, lambda: None)
    port.say(SYSTEM_WILL_SLEEP, 5)
    assert port.allowed.get(timeout=LIMIT_S) == 5
    notice.stop()
    assert port.ended.is_set()


@pytest.mark.parametrize("forgets", [0, 3])
async def test_the_thread_ends_with_the_node_also_when_the_first_word_is_forgotten(forgets: int) -> None:
    port = FakePort(forgets=forgets)
    async with trio.open_nursery() as nursery:
        await start(nursery, port, Told())
        nursery.cancel_scope.cancel()
    assert port.ended.is_set()


async def test_where_the_system_does_not_tell_the_node_runs_on(nursery: trio.Nursery) -> None:
    await start(nursery, FakePort(broken=True), Told())


async def test_after_the_loop_has_ended_sleep_does_not_wait() -> None:
    words: list[Callable[[], None]] = []

    class Late:
        def start(self, falls_asleep: Callable[[], None], is_awake: Callable[[], None]) -> None:
            words.extend([falls_asleep, is_awake])

        def stop(self) -> None:
            return

    def loop() -> None:
        async def briefly() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(SleepBell(Late(), Told().falls_asleep, lambda: None, hold_s=LIMIT_S).run)
                nursery.cancel_scope.cancel()

        trio.run(briefly)
        for word in words:
            word()

    with trio.fail_after(LIMIT_S / 2):
        await trio.to_thread.run_sync(loop)
