"""Work that is shared while it is done."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvnet.errors import NotFoundError
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.flights import Flights, Shared
from kvnet.protocol.ids import PeerId


class FixedPatience:
    """Waits for so long; remembers what it was told."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.told: list[int] = []

    def scope(self) -> trio.CancelScope:
        return trio.CancelScope(deadline=trio.current_time() + self._seconds)

    def judge(self, event: FetchProgress) -> None:
        self.told.append(event.done_bytes)


class Work:
    """Takes a second, and counts how often it is begun."""

    def __init__(self, *, fails: bool = False) -> None:
        self.begun = 0
        self._fails = fails

    async def __call__(self) -> str:
        self.begun += 1
        await trio.sleep(1)
        if self._fails:
            raise NotFoundError("nobody has it")
        return "done"


async def test_work_that_several_want_is_done_once(autojump_clock: MockClock) -> None:
    shared, work = Shared[str](), Work()
    got: list[tuple[str, bool] | None] = []

    async def want() -> None:
        got.append(await shared.get(work))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(want)
    assert sorted(got, key=str) == [("done", False), ("done", False), ("done", True)]
    assert work.begun == 1


async def test_work_that_fails_has_failed_for_all_who_waited(autojump_clock: MockClock) -> None:
    shared, work = Shared[str](), Work(fails=True)
    failures: list[str] = []

    async def want() -> None:
        with pytest.raises(NotFoundError) as caught:
            await shared.get(work)
        failures.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(want)
    assert failures == ["nobody has it"] * 3
    assert work.begun == 1


async def test_one_who_waits_takes_over_from_one_who_is_cancelled(autojump_clock: MockClock) -> None:
    shared, work = Shared[str](), Work()
    got: list[tuple[str, bool] | None] = []
    leaving = trio.CancelScope()

    async def leave() -> None:
        with leaving:
            await shared.get(work)

    async def want() -> None:
        got.append(await shared.get(work))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        await wait_all_tasks_blocked()
        nursery.start_soon(want)
        nursery.start_soon(want)
        await wait_all_tasks_blocked()
        leaving.cancel()
    assert sorted(got, key=str) == [("done", False), ("done", True)]
    assert work.begun == 2


async def test_nobody_waits_longer_than_his_patience(autojump_clock: MockClock) -> None:
    shared, work = Shared[str](), Work()
    patience = FixedPatience(0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.get, work)
        await wait_all_tasks_blocked()
        began_s = trio.current_time()
        nursery.start_soon(_tell, shared)
        assert await shared.get(work, patience) is None
        assert trio.current_time() - began_s == pytest.approx(0.5)
    assert patience.told == [7]


async def _tell(shared: Shared[str]) -> None:
    shared.tell(FetchProgress(7, 10, 1, 2, PeerId(b"")))
    await trio.lowlevel.checkpoint()


async def test_a_flight_is_one_for_all_who_are_in_it_and_forgotten_after(autojump_clock: MockClock) -> None:
    flights: Flights[list[int]] = Flights(list)
    with flights.join("a") as first:
        with flights.join("a") as second, flights.join("b") as other:
            assert first is second
            assert first is not other
        with flights.join("a") as third:
            assert third is first
    with flights.join("a") as fresh:
        assert fresh is not first
    await trio.lowlevel.checkpoint()
