"""Scrub: damage is found before it is met, and mended from peers."""

from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import StoreError
from kvnet.exchange.scrubber import FAILED_AGAIN_S, Scrubbed, Scrubber, ScrubPace
from kvnet.format.chunks import ChunkKind
from kvnet.format.hashes import ArtifactHash
from kvnet.network.memory import World
from tests.simulated.nodes import Node, identity, start_node
from tests.simulated.test_damage import chunk, damage

TOKENS = list(range(1000))


def scrubber(node: Node, *, network: bool = True) -> Scrubber:
    return Scrubber(node.store, node.lane, node.exchange.repair if network else None)


async def test_sound_store_is_read_once_and_nothing_is_touched(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    first = (await a.add(TOKENS[:600])).record
    second = (await a.add(TOKENS)).record
    found = await scrubber(a).scrub()
    distinct = {entry.hash for record in (first, second) for entry in record.entries}
    assert (found.artifacts, found.chunks, found.bad) == (2, len(distinct), 0)
    assert (found.damaged, found.repaired) == ((), ())


async def test_damage_is_mended_from_a_peer_and_served_sound_again(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record
    await b.meet(a)
    await b.fetch(record.hash)
    damage(b, record, chunk(record, ChunkKind.TILE, block=2))
    written: list[int] = []
    found = await Scrubber(b.store, b.lane, partial(b.exchange.repair, wrote=written.append)).scrub()
    assert (found.bad, found.damaged, found.repaired) == (1, (record.hash,), (record.hash,))
    assert written == [record.entries[chunk(record, ChunkKind.TILE, block=2)].length_bytes]
    assert b.store.verify(record.hash).bad == ()
    again = b.store.get(record.hash)
    assert again is not None
    assert again.complete


async def test_damage_that_nobody_can_mend_is_named(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    record = (await a.add(TOKENS)).record
    damage(a, record, chunk(record, ChunkKind.TILE, block=1))
    for network in (False, True):
        found = await scrubber(a, network=network).scrub()
        assert found.repaired == ()
    # It counts as not held since the first time.
    assert found.bad == 0
    held = a.store.get(record.hash)
    assert held is not None
    assert not held.complete


async def test_scrub_keeps_its_pace_and_comes_again(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    record = (await a.add(TOKENS)).record
    size_bytes = sum(entry.length_bytes for entry in record.entries)
    times: list[tuple[float, Scrubbed]] = []
    pace = ScrubPace(interval_s=1000.0, bytes_s=size_bytes / 50)
    began_s = trio.current_time()
    with trio.move_on_after(2500):
        await scrubber(a).run(
            pace, next_in_s=100.0, done=lambda found: times.append((trio.current_time() - began_s, found))
        )
    assert [round(at_s) for at_s, _ in times] == [150, 1200, 2250]


async def test_failing_disk_ends_a_scrub_and_not_the_next_one(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    await a.add(TOKENS)
    fails = iter([True])

    def read_chunk(chunk_hash: ArtifactHash, read: object = a.store.read_chunk) -> bytes:
        if next(fails, False):
            raise StoreError("the disk failed")
        return read(chunk_hash)  # type: ignore[operator]

    monkeypatch.setattr(a.store, "read_chunk", read_chunk)
    times: list[float] = []
    began_s = trio.current_time()
    with trio.move_on_after(FAILED_AGAIN_S + 1):
        await scrubber(a).run(ScrubPace(bytes_s=0.0), next_in_s=0.0, done=lambda _: times.append(trio.current_time()))
    assert [round(at_s - began_s) for at_s in times] == [round(FAILED_AGAIN_S)]
