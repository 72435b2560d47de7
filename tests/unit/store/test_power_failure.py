"""Power fails while artifacts come and go: a disk with a cache, of which only what was synced is left.

A file's bytes are on the medium once it was synced, a name once its folder was. SQLite writes past this; its index is
left out of the image, or is all there: the two ends of what may have reached the medium.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvnet.format.hashes import BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.samples import Sample, check_whole, keys_of, publish, sample

FIRST, SECOND, THIRD = sample(range(600)), sample(range(3000, 3600)), sample(range(6000, 6600))


class CachedFiles(OsFiles):
    """The worst disk there may be: what was not synced is never written.

    Args:
        root: of the store.
        after: called after each operation.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        self.after: Callable[[], object] = lambda: None

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        super().write(handle, data, offset)
        self.after()

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self._bytes[os.fstat(handle).st_ino] = self.read(handle, self.size_bytes(handle), 0)
        self.after()

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path) if entry.is_file()}
        self.after()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.after()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.after()

    def image(self, place: Path, *, index: bool) -> Path:
        """What the store is after a power failure now."""
        shutil.rmtree(place, ignore_errors=True)
        for folder in [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]:
            copy = place / folder.relative_to(self._root)
            copy.mkdir(parents=True)
            for name, inode in self._names.get(folder, {}).items():
                (copy / name).write_bytes(self._bytes.get(inode, b""))
                if (folder / name).exists():
                    # Times are as an index knows them that has reached the medium.
                    found = (folder / name).stat()
                    os.utime(copy / name, ns=(found.st_atime_ns, found.st_mtime_ns))
        if index:
            for path in self._root.glob("index.sqlite*"):
                shutil.copy2(path, place / path.name)
        return place


def opened(directory: Path, files: OsFiles | None = None) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of, files=files)


@pytest.fixture
def files(tmp_path: Path) -> CachedFiles:
    return CachedFiles(tmp_path / "store")


def check_image(files: CachedFiles, place: Path, *, whole: list[Sample], gone: list[Sample], index: bool) -> None:
    """After a power failure some artifacts are there, whole and pinned, some are not, and nothing is there in part."""
    store = opened(files.image(place, index=index))
    for record in store.artifacts():
        assert store.verify(record.hash).missing == ()
    for artifact in whole:
        check_whole(store, artifact)
        assert artifact.hash in {each.hash for each in store.artifacts() if each.pinned}
    for artifact in gone:
        assert store.get(artifact.hash) is None
    store.close()


@pytest.mark.parametrize("index", [False, True], ids=["index lost", "index written"])
def test_what_was_published_outlives_a_power_failure_and_what_was_removed_stays_away(
    tmp_path: Path, files: CachedFiles, index: bool
) -> None:
    store = opened(tmp_path / "store", files)
    place = tmp_path / "image"
    publish(store, FIRST, pinned=True)
    check_image(files, place, whole=[FIRST], gone=[SECOND], index=index)
    publish(store, SECOND, pinned=True)
    check_image(files, place, whole=[FIRST, SECOND], gone=[], index=index)
    store.remove(FIRST.hash)
    check_image(files, place, whole=[SECOND], gone=[FIRST], index=index)
    # Another add has the folder of markers written: nothing is to need a marker any more that has gone from it.
    publish(store, THIRD, pinned=True)
    check_image(files, place, whole=[SECOND, THIRD], gone=[FIRST], index=index)
    store.close()


@pytest.mark.parametrize("index", [False, True], ids=["index lost", "index written"])
def test_a_power_failure_at_any_moment_leaves_an_artifact_whole_or_not_there(
    tmp_path: Path, files: CachedFiles, index: bool
) -> None:
    store = opened(tmp_path / "store", files)
    publish(store, FIRST, pinned=True)
    moments = 0

    def fails() -> None:
        nonlocal moments
        moments += 1
        check_image(files, tmp_path / "image", whole=[FIRST], gone=[], index=index)

    files.after = fails
    publish(store, SECOND, pinned=True)
    store.remove(SECOND.hash)
    files.after = lambda: None
    assert moments > 15
    store.close()


@pytest.mark.parametrize("index", [False, True], ids=["index lost", "index written"])
def test_a_power_failure_while_packs_are_written_anew_costs_nothing_of_what_is_used(
    tmp_path: Path, files: CachedFiles, index: bool
) -> None:
    base, longer = sample(range(2000)), sample([*range(1024), *range(9000, 9300)])
    store = opened(tmp_path / "store", files)
    publish(store, base)
    publish(store, longer, pinned=True)
    store.release(base.hash)
    place, moments = tmp_path / "image", 0

    def fails() -> None:
        nonlocal moments
        moments += 1
        check_image(files, place, whole=[longer], gone=[base], index=index)

    files.after = fails
    assert store.compact() > 0
    assert moments >= 5
    # The names in a folder reach the medium some day, too.
    for folder in {path.parent for path in (tmp_path / "store" / "packs").rglob("*.kva")}:
        files.sync_directory(folder)
    store.close()
