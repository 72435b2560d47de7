"""What a fetch does not have to bring, and why."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.events import FetchProgress
from kvnet.network.memory import World
from kvnet.protocol.pace import Purpose
from tests.simulated.nodes import identity, start_node
from tests.simulated.test_taking_turns import Copying, copy

TOKENS = [3 + (i * 7919) % 251 for i in range(3000)]


async def test_chunks_that_an_artifact_shares_with_another_are_not_resumed(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    first = await a.add(TOKENS[:2000])
    second = await a.add(TOKENS)
    await b.meet(a)
    await copy(b, first.record.hash)
    fetched = await copy(b, second.record.hash)
    assert fetched.held_chunks > 0
    assert fetched.held_chunks + fetched.fetched_chunks == len(second.record.entries)
    assert (fetched.resumed_chunks, fetched.meanwhile_chunks) == (0, 0)


async def test_chunks_of_a_fetch_that_was_interrupted_are_resumed(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    copying = Copying(b, added.record.hash, nursery, after_chunks=3)
    await copying.begun.wait()
    copying.scope.cancel()
    await copying.ended.wait()
    fetched = await copy(b, added.record.hash)
    assert fetched.resumed_chunks >= 3
    assert fetched.resumed_chunks + fetched.fetched_chunks == len(added.record.entries)
    assert fetched.held_chunks == fetched.resumed_chunks


@pytest.mark.parametrize("pinned", [False, True])
async def test_what_an_interrupted_fetch_keeps_is_pinned_only_once_it_is_all_there(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, *, pinned: bool
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    fetcher = b.exchange.fetcher
    located = await fetcher.locate(added.record.hash)
    entries = await fetcher.chunk_list(located)

    async def interrupt(event: FetchProgress) -> None:
        if event.done_chunks >= 3:
            scope.cancel()

    with trio.CancelScope() as scope:
        await fetcher.fetch(located, entries, pinned=pinned, progress=interrupt, purpose=Purpose.REPLICATION)
    assert scope.cancelled_caught
    kept = b.store.get(added.record.hash)
    assert kept is not None
    assert (kept.complete, kept.pinned) == (False, False)
    fetched = await fetcher.fetch(located, entries, pinned=pinned, purpose=Purpose.REPLICATION)
    assert (fetched.record.complete, fetched.record.pinned) == (True, pinned)
