"""A disk that is really full, and one that can only be read."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnet.errors import DataDirLockedError, StoreError, StoreFullError
from kvnet.store.disk import DiskStore
from kvnet.store.lock import DataDirLock, LockOwner
from tests.unit.store.samples import Sample, check_whole, keys_of, publish, sample

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="a small disk of its own needs Linux and root"
)

SAMPLES = [sample(range(start, start + 3000)) for start in range(0, 60_000, 3000)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 3 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def opened(disk: Path) -> DiskStore:
    return DiskStore.open(disk / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)


def filled(store: DiskStore, disk: Path, *, pinned: bool) -> list[Sample]:
    """Artifacts until no more fit, and something else in the rest of the disk."""
    added = []
    for artifact in SAMPLES:
        try:
            publish(store, artifact, pinned=pinned)
        except StoreFullError:
            break
        added.append(artifact)
    assert 3 < len(added) < len(SAMPLES)
    with (disk / "something else").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            assert os.statvfs(disk).f_bavail == 0
    return added


def test_what_is_held_on_a_full_disk_is_read_and_no_more_is_added(disk: Path) -> None:
    store = opened(disk)
    added = filled(store, disk, pinned=True)
    with pytest.raises(StoreFullError):
        publish(store, SAMPLES[-1])
    for artifact in added:
        check_whole(store, artifact)
    store.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_removing_makes_room_on_a_full_disk(disk: Path, reopened: bool) -> None:
    store = opened(disk)
    first, *others = filled(store, disk, pinned=True)
    if reopened:
        store.close()
        store = opened(disk)
    assert store.remove(first.hash) >= first.size_bytes
    assert store.get(first.hash) is None
    for artifact in others:
        check_whole(store, artifact)
    publish(store, sample(range(200_000, 200_500)))
    store.close()
    store = opened(disk)
    assert store.get(first.hash) is None
    assert len(store.artifacts()) == len(others) + 1
    store.close()


def test_garbage_collection_makes_room_on_a_full_disk(disk: Path) -> None:
    store = opened(disk)
    added = filled(store, disk, pinned=False)
    held = {record.hash for record in store.artifacts()}
    assert set(store.collect_garbage(everything=True).removed) == held
    publish(store, added[0])
    check_whole(store, added[0])
    store.close()


def test_a_full_disk_keeps_nobody_from_taking_the_data_directory_to_make_room(disk: Path) -> None:
    lock = DataDirLock(disk)
    lock.acquire()
    lock.release()
    store = opened(disk)
    first, *_ = filled(store, disk, pinned=True)
    store.close()
    lock.acquire()
    assert lock.held
    assert lock.owner() is None
    # Whoever comes meanwhile is refused all the same.
    with pytest.raises(DataDirLockedError):
        DataDirLock(disk).acquire()
    with pytest.raises(StoreFullError, match="recording the owner"):
        lock.record_control_socket(disk / "control.sock")
    store = opened(disk)
    assert store.remove(first.hash) >= first.size_bytes
    store.close()
    lock.record_control_socket(disk / "control.sock")
    assert lock.owner() == LockOwner(os.getpid(), str(disk / "control.sock"))
    lock.release()


def test_a_disk_that_can_only_be_read_is_named(disk: Path) -> None:
    opened(disk).close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StoreError, match=f"can be written, found {disk}/store, which can only be read") as caught:
        opened(disk)
    assert "Unlock its drive" in caught.value.hint
