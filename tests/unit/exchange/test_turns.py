"""Whoever waits for an answer before whoever copies."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvnet.errors import StoreError
from kvnet.exchange.turns import Turns


class Copy:
    """A copy that goes on until it is told that it has everything."""

    def __init__(self, turns: Turns, *, failure: Exception | None = None) -> None:
        self._turns = turns
        self._failure = failure
        self.said: list[str] = []
        self.all_here = trio.Event()

    async def run(self) -> None:
        await self._turns.copy("artifact", self._work, self._put_down)
        self.said.append("done")

    async def _work(self) -> None:
        self.said.append("work")
        await self.all_here.wait()

    async def _put_down(self) -> None:
        self.said.append("put down")
        await trio.lowlevel.checkpoint()
        if self._failure is not None:
            raise self._failure


async def test_a_copy_is_put_down_for_a_prompt_and_goes_on_after_it(nursery: trio.Nursery) -> None:
    turns = Turns()
    copy = Copy(turns)
    nursery.start_soon(copy.run)
    await wait_all_tasks_blocked()
    with turns.first("artifact") as clear:
        await clear()
        assert copy.said == ["work", "put down"]
        await wait_all_tasks_blocked()
        assert "work" not in copy.said[2:]
    await wait_all_tasks_blocked()
    assert copy.said[-1] == "work"
    copy.all_here.set()
    await wait_all_tasks_blocked()
    assert copy.said[-1] == "done"


async def test_a_copy_goes_on_when_the_last_of_several_prompts_is_done(nursery: trio.Nursery) -> None:
    turns = Turns()
    copy = Copy(turns)
    with turns.first("artifact") as clear:
        nursery.start_soon(copy.run)
        await wait_all_tasks_blocked()
        with turns.first("artifact"):
            await clear()
        await wait_all_tasks_blocked()
        assert copy.said == ["put down"]
    copy.all_here.set()
    await wait_all_tasks_blocked()
    assert copy.said == ["put down", "work", "done"]


async def test_other_artifacts_are_no_reason_to_wait(nursery: trio.Nursery) -> None:
    turns = Turns()
    copy = Copy(turns)
    nursery.start_soon(copy.run)
    await wait_all_tasks_blocked()
    with turns.first("another") as clear:
        await clear()
        assert copy.said == ["work"]
    copy.all_here.set()


async def test_a_copy_that_cannot_be_put_down_fails_alone() -> None:
    turns = Turns()
    copy = Copy(turns, failure=StoreError("the disk is full"))
    cleared = False
    with pytest.RaisesGroup(StoreError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.run)
            await wait_all_tasks_blocked()
            with trio.CancelScope(shield=True), turns.first("artifact") as clear:
                await clear()
                cleared = True
    assert cleared
