"""A store on a drive that is unplugged, unmounted or fails at everything, and comes back."""

import errno
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvnet.errors import StoreAwayError, StoreError
from kvnet.format.hashes import BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.samples import MINE, check_whole, fill, keys_of, publish, sample

FIRST, SECOND, THIRD = sample(range(600)), sample(range(900)), sample(range(5000, 5600))

OTHER_PROCESS = """
import sys
from pathlib import Path
from kvnet.store.disk import DiskStore
store = DiskStore.open(Path(sys.argv[1]), quota_bytes=1 << 30, min_free_bytes=0)
writer = store.begin_pack(3)
print("writing", flush=True)
sys.stdin.read()
writer.abort()
store.close()
"""


class Failing(OsFiles):
    """A drive that can be told to fail at everything."""

    broken = False

    def _try(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")

    def create(self, path: Path) -> int:
        self._try()
        return super().create(path)

    def open_for_reading(self, path: Path) -> int:
        self._try()
        return super().open_for_reading(path)

    def open_for_writing(self, path: Path) -> int:
        self._try()
        return super().open_for_writing(path)

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        self._try()
        return super().read(handle, length_bytes, offset)

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        self._try()
        super().write(handle, data, offset)

    def sync(self, handle: int) -> None:
        self._try()
        super().sync(handle)

    def truncate(self, handle: int, size_bytes: int) -> None:
        self._try()
        super().truncate(handle, size_bytes)

    def rename(self, source: Path, target: Path) -> None:
        self._try()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._try()
        super().unlink(path)

    def free_bytes(self, path: Path) -> int:
        self._try()
        return super().free_bytes(path)


class Forgetful(OsFiles):
    """A drive that can be told to give zeros for what was written to it."""

    forgets = False

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        data = super().read(handle, length_bytes, offset)
        return bytes(len(data)) if self.forgets else data


@pytest.fixture
def files() -> Failing:
    return Failing()


@pytest.fixture
def store(tmp_path: Path, files: Failing) -> Iterator[DiskStore]:
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files, keys_of=keys_of)
    publish(store, FIRST, pinned=True)
    publish(store, SECOND)
    yield store
    files.broken = False
    store.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def check_away(store: DiskStore) -> None:
    """Nothing is found, nothing is taken, nothing is waited for."""
    assert not store.has_chunk(FIRST.entries[0].hash)
    assert store.locate_all([FIRST.entries[0].hash])[0] is None
    assert store.take_evicted() == []
    for ask in (
        store.artifacts,
        store.usage,
        lambda: store.get(FIRST.hash),
        lambda: store.find_prefix(MINE.id, FIRST.keys),
        lambda: store.read_chunk(FIRST.entries[0].hash),
        lambda: store.begin_pack(4),
        lambda: store.resume_pack(THIRD.hash, THIRD.entries),
        lambda: store.touch(FIRST.hash),
        lambda: store.remove(FIRST.hash),
        lambda: store.tidy(unused_s=0.0),
        lambda: store.collect_garbage(everything=True),
    ):
        with pytest.raises(StoreAwayError, match="the store is away"):
            ask()
    assert not store.look()
    assert store.away


def check_back(store: DiskStore) -> None:
    """Everything is as it was, and can be added to."""
    assert store.look()
    assert store.away == ""
    check_whole(store, FIRST)
    check_whole(store, SECOND)
    record = store.get(FIRST.hash)
    assert record is not None
    assert record.pinned
    assert (FIRST.hash, len(FIRST.keys)) in store.find_prefix(MINE.id, FIRST.keys[::-1])
    publish(store, THIRD)
    check_whole(store, THIRD)


def test_a_store_whose_folder_has_gone_is_away_with_one_warning_and_comes_back_whole(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").rename(tmp_path / "unplugged")
    check_away(store)
    check_away(store)
    assert len(warnings(caplog)) == 1
    assert not (tmp_path / "store").exists()
    (tmp_path / "unplugged").rename(tmp_path / "store")
    check_back(store)
    assert len(warnings(caplog)) == 2


def test_nothing_is_written_into_the_empty_folder_under_a_mount_point(store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "unplugged")
    (tmp_path / "store").mkdir()
    check_away(store)
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    (tmp_path / "unplugged").rename(tmp_path / "store")
    check_back(store)


def test_a_folder_without_packs_is_not_the_store_come_back(store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "unplugged")
    (tmp_path / "store" / "tmp").mkdir(parents=True)
    check_away(store)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["tmp"]
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "unplugged").rename(tmp_path / "store")
    check_back(store)


def test_a_drive_that_does_not_read_back_what_was_written_stays_away(tmp_path: Path) -> None:
    files = Forgetful()
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files)
    publish(store, FIRST)
    (tmp_path / "store").rename(tmp_path / "unplugged")
    assert not store.look()
    files.forgets = True
    (tmp_path / "unplugged").rename(tmp_path / "store")
    assert not store.look()
    files.forgets = False
    assert store.look()
    check_whole(store, FIRST)
    store.close()


def test_a_folder_put_in_its_place_that_is_a_store_is_used_as_what_it_is(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore.open(tmp_path / "other", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)
    publish(other, THIRD)
    other.close()
    (tmp_path / "store").rename(tmp_path / "unplugged")
    (tmp_path / "other").rename(tmp_path / "store")
    with pytest.raises(StoreAwayError):
        store.artifacts()
    assert store.look()
    assert [record.hash for record in store.artifacts()] == [THIRD.hash]
    check_whole(store, THIRD)


def test_a_drive_that_fails_at_everything_is_away_until_it_does_not(
    store: DiskStore, files: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    files.broken = True
    with pytest.raises(StoreError):
        store.read_chunk(FIRST.entries[0].hash)
    check_away(store)
    assert len(warnings(caplog)) == 1
    files.broken = False
    check_back(store)


def test_one_failed_operation_is_no_drive_that_has_gone(store: DiskStore, files: Failing) -> None:
    class Once(Failing):
        left = 1

        def open_for_reading(self, path: Path) -> int:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "Input/output error")
            return super().open_for_reading(path)

    store._parts.files = once = Once()
    with pytest.raises(StoreError):
        store.read_chunk(FIRST.entries[0].hash)
    assert once.left <= 0
    assert store.away == ""
    check_whole(store, FIRST)


def test_a_chunk_is_not_taken_for_lost_because_its_drive_went_as_it_was_read(store: DiskStore, tmp_path: Path) -> None:
    class GoesNow(Failing):
        def open_for_reading(self, path: Path) -> int:
            if (tmp_path / "store").exists():
                (tmp_path / "store").rename(tmp_path / "unplugged")
            return super().open_for_reading(path)

    files, store._parts.files = store._parts.files, GoesNow()
    with pytest.raises(StoreAwayError):
        store.read_chunk(FIRST.entries[0].hash)
    store._parts.files = files
    (tmp_path / "unplugged").rename(tmp_path / "store")
    check_back(store)


def test_packs_being_written_end_with_an_error_and_leave_nothing_when_it_is_back(
    store: DiskStore, tmp_path: Path
) -> None:
    writer = store.begin_pack(len(THIRD.chunks))
    fill(writer, THIRD, [0])
    (tmp_path / "store").rename(tmp_path / "unplugged")
    with pytest.raises(StoreError):
        fill(writer, THIRD, range(1, len(THIRD.chunks)))
        writer.publish(THIRD.envelope, keys=THIRD.keys, pinned=False)
    (tmp_path / "unplugged").rename(tmp_path / "store")
    assert store.look()
    with pytest.raises(StoreError):
        writer.publish(THIRD.envelope, keys=THIRD.keys, pinned=False)
    writer.abort()
    check_back(store)
    assert not any((tmp_path / "store" / "tmp").iterdir())


def test_a_fetch_that_a_vanishing_drive_interrupted_is_gone_on_with(store: DiskStore, tmp_path: Path) -> None:
    writer = store.resume_pack(THIRD.hash, THIRD.entries)
    fill(writer, THIRD, [0, 1])
    (tmp_path / "store").rename(tmp_path / "unplugged")
    with pytest.raises(StoreError):
        fill(writer, THIRD, [2])
    writer.abort()
    (tmp_path / "unplugged").rename(tmp_path / "store")
    assert store.look()
    again = store.resume_pack(THIRD.hash, THIRD.entries)
    assert again.held == {0, 1}
    fill(again, THIRD, range(2, len(THIRD.chunks)))
    again.publish(THIRD.envelope, keys=THIRD.keys, pinned=False)
    check_whole(store, THIRD)


class Flapping(OsFiles):
    """Runs something after the next file was read and closed."""

    then: Callable[[], object] | None = None

    def close(self, handle: int) -> None:
        super().close(handle)
        then, self.then = self.then, None
        if then is not None:
            then()


def test_a_drive_that_goes_again_while_the_store_is_opened_again_is_away_until_the_next_time(tmp_path: Path) -> None:
    files = Flapping()
    place, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store = DiskStore.open(place, quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of, files=files)
    publish(store, FIRST)
    place.rename(elsewhere)
    assert not store.look()
    # On the way a pack was added, so that one has to be read.
    other = DiskStore.open(tmp_path / "other", quota_bytes=1 << 30, min_free_bytes=0)
    publish(other, THIRD)
    other.close()
    shutil.copytree(tmp_path / "other" / "packs", elsewhere / "packs", dirs_exist_ok=True)
    elsewhere.rename(place)
    files.then = lambda: setattr(files, "then", lambda: setattr(files, "then", lambda: place.rename(elsewhere)))
    assert not store.look()
    assert elsewhere.exists()
    elsewhere.rename(place)
    assert store.look()
    check_whole(store, FIRST)
    check_whole(store, THIRD)
    assert store.find_prefix(MINE.id, THIRD.keys[::-1]) == [(THIRD.hash, len(THIRD.keys))]
    store.close()


def test_a_store_that_is_away_can_be_closed(store: DiskStore, tmp_path: Path) -> None:
    writer = store.begin_pack(len(THIRD.chunks))
    (tmp_path / "store").rename(tmp_path / "unplugged")
    check_away(store)
    store.close()
    writer.abort()
    assert not store.look()


def test_a_store_that_another_process_has_at_the_same_place_is_left_alone_and_loses_nothing(
    store: DiskStore, tmp_path: Path, repository_root: Path
) -> None:
    # A node whose data directory was removed, while another one began anew there.
    shutil.rmtree(tmp_path / "store")
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository_root,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        (being_written,) = (tmp_path / "store" / "tmp").glob("*.part")
        assert not store.look()
        assert being_written.exists()
        with pytest.raises(StoreError, match="found it open in another process"):
            DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)
        assert being_written.exists()
    finally:
        other.communicate("")
    assert other.returncode == 0
    assert store.look()
