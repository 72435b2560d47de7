"""A disk that cannot read some places any more, as disks do before they fail."""

import errno
import os
from pathlib import Path

import pytest

from kvnet.errors import IntegrityError, StoreError
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.samples import check_whole, keys_of, publish, sample

ARTIFACT, OTHER = sample(range(900)), sample(range(3000, 3600))


class BadSectors(OsFiles):
    """Reads nothing at one offset, so many times; writes nothing once the drive is dying."""

    bad_offset = -1
    times = 1 << 30
    dying = False

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        if offset == self.bad_offset and self.times:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(handle, length_bytes, offset)

    def sync(self, handle: int) -> None:
        if self.dying:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(handle)


@pytest.fixture
def files() -> BadSectors:
    return BadSectors()


@pytest.fixture
def store(tmp_path: Path, files: BadSectors) -> DiskStore:
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of, files=files)
    publish(store, ARTIFACT, pinned=True)
    publish(store, OTHER)
    place = store.locate_all([ARTIFACT.entries[3].hash])[0]
    assert place is not None
    files.bad_offset = place.offset
    return store


def test_a_chunk_that_cannot_be_read_is_found_dropped_and_taken_in_again(store: DiskStore) -> None:
    found = store.verify(ARTIFACT.hash)
    assert (found.chunks, found.bad, found.missing) == (len(ARTIFACT.chunks) - 1, (3,), ())
    assert store.away == ""
    assert not store.has_chunk(ARTIFACT.entries[3].hash)
    publish(store, ARTIFACT, [3])
    check_whole(store, ARTIFACT)
    check_whole(store, OTHER)
    store.close()


def test_a_place_that_is_read_at_the_second_attempt_is_good(store: DiskStore, files: BadSectors) -> None:
    files.times = 1
    check_whole(store, ARTIFACT)
    store.close()


def test_nothing_is_dropped_where_the_whole_drive_fails(store: DiskStore, files: BadSectors) -> None:
    files.dying = True
    with pytest.raises(StoreError, match="reading a pack failed") as caught:
        store.read_chunk(ARTIFACT.entries[3].hash)
    assert not isinstance(caught.value, IntegrityError)
    files.dying, files.bad_offset = False, -1
    assert store.look()
    check_whole(store, ARTIFACT)
    store.close()
