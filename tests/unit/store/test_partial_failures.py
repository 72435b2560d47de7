"""Every write, sync, truncate and rename of a fetch's partial pack and its journal fails once, or from then on.

Nothing of it is published, what is held already and what others write is unharmed, and the fetch can be gone on with.
"""

import errno
from pathlib import Path

import pytest

from kvnet.errors import StoreError, StoreFullError
from kvnet.store.disk import DiskStore
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import check_whole, fill, publish, sample

HELD, OTHER = sample(range(300)), sample(range(7000, 7600))
FETCHED = sample(range(20_000, 20_000 + 6 * 256))
HALF = len(FETCHED.chunks) // 2

OPERATIONS = ("create", "write", "truncate", "sync", "sync_directory", "rename")


def opened(directory: Path, files: FaultyFiles | None = None) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=1 << 30, min_free_bytes=0, files=files)


def fetch(store: DiskStore) -> None:
    """As a fetch does it that was interrupted half-way before: go on, write what is missing, publish."""
    writer = store.resume_pack(FETCHED.hash, FETCHED.entries, expected_bytes=FETCHED.size_bytes)
    try:
        fill(writer, FETCHED, sorted(set(range(len(FETCHED.chunks))) - writer.held))
        writer.publish(FETCHED.envelope, keys=FETCHED.keys, pinned=False)
    except BaseException:
        writer.abort()
        raise


def prepared(directory: Path) -> None:
    """A store that holds an artifact and half of a fetch."""
    store = opened(directory)
    publish(store, HELD, pinned=True)
    writer = store.resume_pack(FETCHED.hash, FETCHED.entries)
    fill(writer, FETCHED, range(HALF))
    store.close()


def steps(directory: Path) -> dict[str, int]:
    """How often a fetch that is gone on with does each operation, after the store was opened."""
    prepared(directory)
    files = FaultyFiles()
    store = opened(directory, files)
    before = dict(files.seen)
    fetch(store)
    check_whole(store, FETCHED)
    store.close()
    return {operation: files.seen.get(operation, 0) - before.get(operation, 0) for operation in OPERATIONS}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "disk error"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fetch_that_the_disk_fails_anywhere_publishes_nothing_and_can_be_gone_on_with(
    tmp_path: Path, operation: str, forever: bool, code: int
) -> None:
    count = steps(tmp_path / "counting")[operation]
    assert count > 0
    for number in range(1, count + 1):
        directory = tmp_path / f"store{number}"
        prepared(directory)
        files = FaultyFiles()
        store = opened(directory, files)
        # Somebody else's transfer, begun before.
        writer = store.begin_pack(len(OTHER.chunks))
        fill(writer, OTHER, [0])
        files._operation, files._number = operation, files.seen.get(operation, 0) + number
        files._code, files._forever = code, forever
        with pytest.raises(StoreFullError if code == errno.ENOSPC else StoreError):
            fetch(store)
        assert [record.hash for record in store.artifacts()] == [HELD.hash]
        check_whole(store, HELD)
        if not forever:
            fill(writer, OTHER, range(1, len(OTHER.chunks)))
            writer.publish(OTHER.envelope, keys=OTHER.keys, pinned=False)
            check_whole(store, OTHER)
        store.close()
        store = opened(directory)
        assert store.problems == ()
        assert store.get(FETCHED.hash) is None
        resumed = store.resume_pack(FETCHED.hash, FETCHED.entries)
        for index in resumed.held:
            assert resumed.read(index) == FETCHED.chunks[index]
        resumed.abort()
        fetch(store)
        for artifact in (HELD, FETCHED):
            check_whole(store, artifact)
        store.close()
