"""A disk that is full for real: a small file system in memory, mounted for each test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import StoreFullError
from kvnet.network.memory import World
from kvnet.store.disk import DiskStore
from tests.simulated.nodes import Node, identity, start_node
from tests.simulated.test_completion import QUESTION, SYSTEM, converse
from tests.unit.store.samples import check_whole, fill, keys_of, publish, sample

SIZE_BYTES = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        pytest.skip("mounting a small file system needs Linux and root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill_up(place: Path, leave_bytes: int) -> Path:
    """Take the rest of the file system, but for so much."""
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - leave_bytes))
    return ballast


BIG = sample(range(100_000, 100_000 + 40_000))
"""A little more than 2.5 MB."""
SMALL = sample(range(3000))


def test_what_does_not_fit_is_not_published_and_what_does_goes_on(small_disk: Path) -> None:
    store = DiskStore.open(small_disk / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)
    publish(store, SMALL, pinned=True)
    # Another transfer has its place reserved already.
    other = sample(range(50_000, 53_000))
    reserved = store.begin_pack(len(other.chunks), expected_bytes=other.size_bytes + 100_000)
    ballast = fill_up(small_disk, BIG.size_bytes // 2)
    with pytest.raises(StoreFullError):
        publish(store, BIG)
    writer = store.resume_pack(BIG.hash, BIG.entries)
    with pytest.raises(StoreFullError):
        fill(writer, BIG)
    writer.abort()
    assert store.get(BIG.hash) is None
    check_whole(store, SMALL)
    ballast.unlink()
    fill(reserved, other)
    reserved.publish(other.envelope, keys=other.keys, pinned=False)
    check_whole(store, other)
    again = store.resume_pack(BIG.hash, BIG.entries)
    assert again.held
    fill(again, BIG, sorted(set(range(len(BIG.chunks))) - again.held))
    again.publish(BIG.envelope, keys=BIG.keys, pinned=False)
    check_whole(store, BIG)
    store.close()


@pytest.mark.parametrize("left_bytes", [0, 4096, 60_000, 200_000, 1_000_000])
def test_at_any_fill_a_publish_is_whole_or_not_there_also_after_a_restart(small_disk: Path, left_bytes: int) -> None:
    def opened() -> DiskStore:
        return DiskStore.open(small_disk / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)

    store = opened()
    publish(store, SMALL, pinned=True)
    ballast = fill_up(small_disk, left_bytes)
    artifacts = [sample(range(start, start + 2000)) for start in range(200_000, 300_000, 10_000)]
    published = []
    for artifact in artifacts:
        try:
            publish(store, artifact, pinned=True)
        except StoreFullError:
            continue
        published.append(artifact)
    assert len(published) < len(artifacts)
    for artifact in (SMALL, *published):
        check_whole(store, artifact)
    ballast.unlink()
    store.close()
    store = opened()
    assert {record.hash for record in store.artifacts()} == {one.hash for one in (SMALL, *published)}
    for artifact in (SMALL, *published):
        check_whole(store, artifact)
    for artifact in artifacts:
        if artifact not in published:
            publish(store, artifact, pinned=True)
            check_whole(store, artifact)
    store.close()


def sound(node: Node) -> None:
    """Everything that is listed reads back whole."""
    for record in node.store.artifacts():
        found = node.store.verify(record.hash)
        assert (found.bad, found.missing) == ((), ())


async def test_requests_on_a_full_disk_are_answered_as_ever_and_kept_again_once_there_is_room(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, small_disk: Path
) -> None:
    roomy = await start_node(world, nursery, tmp_path, "roomy")
    a = await start_node(world, nursery, small_disk, "a")
    ballast = fill_up(small_disk, 0)
    expected = [each.text for each in await converse(roomy, 2, [SYSTEM])]
    talk = [SYSTEM]
    assert [each.text for each in await converse(a, 2, talk)] == expected
    assert a.keeper.counters()["keep_failed"] > 0
    assert a.store.artifacts() == []
    ballast.unlink()
    await converse(a, 1, talk)
    assert len(a.store.artifacts()) == 1
    sound(a)


async def test_a_prompt_whose_fetch_finds_the_disk_full_is_prefilled_and_served_peers_go_on(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, small_disk: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, small_disk, "b", who=identity("b", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a", "b"]))
    await b.meet(a)
    tokens = [3 + (i * 104_729) % 251 for i in range(1500)]
    first = await b.add(tokens[:600])
    await a.ask(SYSTEM, QUESTION)
    cold = await c.ask_now(SYSTEM, QUESTION, reuse=False, private=True)
    ballast = fill_up(small_disk, 0)
    told = await b.ask(SYSTEM, QUESTION)
    assert (told.text, told.reuse.source) == (cold.text, "none")
    with pytest.raises(StoreFullError):
        await b.add(tokens)
    assert [record.hash for record in b.store.artifacts()] == [first.record.hash]
    # What it has, it still serves.
    await c.meet(b)
    assert (await c.fetch(first.record.hash)).record.complete
    ballast.unlink()
    await b.engine.drop_live()
    assert (await b.ask(SYSTEM, QUESTION)).reuse.source == "peer"
    sound(b)
