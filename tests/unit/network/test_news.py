"""Waking whoever waits."""

import trio
from trio.testing import wait_all_tasks_blocked

from kvnet.network.news import News


async def test_everybody_who_waits_is_woken_and_waits_again_for_the_next() -> None:
    news, woken = News(), list[str]()

    async def wait(name: str) -> None:
        while True:
            await news.wait()
            woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a")
        nursery.start_soon(wait, "b")
        await wait_all_tasks_blocked()
        assert woken == []
        for n_told in (1, 2):
            news.tell()
            await wait_all_tasks_blocked()
            assert sorted(woken) == ["a"] * n_told + ["b"] * n_told
        nursery.cancel_scope.cancel()


async def test_what_was_told_before_wakes_nobody() -> None:
    news = News()
    news.tell()
    assert not news.next.is_set()


async def test_what_is_told_during_a_look_with_checkpoints_is_not_lost() -> None:
    news = News()
    upcoming = news.next
    await trio.lowlevel.checkpoint()
    news.tell()
    await upcoming.wait()
