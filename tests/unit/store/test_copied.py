"""Data directories that backups, copies and other versions have left as no running store leaves them."""

import shutil
from pathlib import Path

import pytest

from kvnet.store.disk import DiskStore
from tests.unit.store.samples import MINE, Sample, check_whole, keys_of, publish, sample

FIRST, LONGER, REMOVED = sample(range(600)), sample(range(900)), sample(range(5000, 5600))
LATER = sample([*range(512), *range(7000, 7100)])


def opened(directory: Path) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)


def closed(directory: Path, *artifacts: Sample) -> None:
    """A store with these, all pinned."""
    store = opened(directory)
    for artifact in artifacts:
        publish(store, artifact, pinned=True)
    store.close()


def put_index(source: Path, target: Path) -> None:
    """The index of one store in the place of another's."""
    for path in target.glob("index.sqlite*"):
        path.unlink()
    for path in source.glob("index.sqlite*"):
        shutil.copy2(path, target)


def changed_since_a_copy(tmp_path: Path) -> Path:
    """A store that has been changed since `old` was copied of it."""
    directory = tmp_path / "store"
    closed(directory, FIRST, LONGER, REMOVED)
    shutil.copytree(directory, tmp_path / "old")
    store = opened(directory)
    store.remove(REMOVED.hash)
    store.unpin(LONGER.hash)
    publish(store, LATER, pinned=True)
    store.close()
    return directory


def check_as_changed(directory: Path) -> None:
    store = opened(directory)
    assert store.problems == ()
    for artifact in (FIRST, LONGER, LATER):
        check_whole(store, artifact)
    assert {record.hash: record.pinned for record in store.artifacts()} == {
        FIRST.hash: True,
        LONGER.hash: False,
        LATER.hash: True,
    }
    store.close()


def test_an_older_index_beside_newer_packs_says_what_the_packs_say(tmp_path: Path) -> None:
    directory = changed_since_a_copy(tmp_path)
    put_index(tmp_path / "old", directory)
    check_as_changed(directory)


@pytest.mark.parametrize("came_again", [False, True])
def test_a_log_of_another_moment_than_its_index_makes_the_index_anew(tmp_path: Path, came_again: bool) -> None:
    directory = tmp_path / "store"
    closed(directory, FIRST, LONGER, REMOVED)
    shutil.copytree(directory, tmp_path / "old")
    more = [sample(range(start, start + 600)) for start in (10_000, 20_000)]
    store = opened(directory)
    for artifact in (REMOVED, FIRST) if came_again else (REMOVED,):
        store.remove(artifact.hash)
    store.close()
    closed(directory, FIRST, *more)
    store = opened(directory)
    publish(store, LATER)
    log = (directory / "index.sqlite-wal").read_bytes()
    store.close()
    # As a backup has them that copied the one yesterday and the other today.
    put_index(tmp_path / "old", directory)
    (directory / "index.sqlite-wal").write_bytes(log)
    store = opened(directory)
    assert {record.hash for record in store.artifacts()} == {one.hash for one in (FIRST, LONGER, LATER, *more)}
    for artifact in (FIRST, LONGER, LATER, *more):
        check_whole(store, artifact)
    assert store.find_prefix(MINE.id, LATER.keys[::-1])[0] == (LATER.hash, len(LATER.keys))
    store.close()


def test_pins_that_are_there_before_their_packs_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    closed(directory, FIRST, LONGER)
    (directory / "packs").rename(tmp_path / "packs")
    store = opened(directory)
    assert store.artifacts() == []
    store.close()
    (directory / "packs").rmdir()
    (tmp_path / "packs").rename(directory / "packs")
    store = opened(directory)
    assert [record.pinned for record in store.artifacts()] == [True, True]
    for artifact in (FIRST, LONGER):
        check_whole(store, artifact)
    store.close()


def test_a_pack_that_was_copied_in_half_is_set_aside_and_the_rest_is_used(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    closed(directory, FIRST, REMOVED)
    pack = next(path for path in (directory / "packs").glob("*/*.kva") if path.stat().st_size)
    pack.write_bytes(pack.read_bytes()[: pack.stat().st_size // 2])
    store = opened(directory)
    assert [problem.path.name for problem in store.problems] == [pack.name]
    assert [path.name for path in (directory / "quarantine").iterdir()] == [pack.name]
    (left,) = store.artifacts()
    check_whole(store, FIRST if left.hash == FIRST.hash else REMOVED)
    store.close()


def test_files_of_the_system_beside_ours_are_passed_over(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    closed(directory, FIRST)
    pack = next((directory / "packs").glob("*/*.kva"))
    hidden = [
        pack.with_name(f"._{pack.name}"),
        pack.parent / ".DS_Store",
        *(directory / folder / ".DS_Store" for folder in ("packs", "pins", "removed", "partial", "tmp", "quarantine")),
    ]
    for path in hidden:
        path.write_bytes(b"the system's")
    store = opened(directory)
    assert store.problems == ()
    check_whole(store, FIRST)
    assert store.tidy(unused_s=1e9).removed == ()
    store.close()
    assert all(path.exists() for path in hidden[:3])


def test_an_index_of_a_later_version_is_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    closed(directory, FIRST)
    store = opened(directory)
    store._parts.index._db.execute("PRAGMA user_version = 2")
    store.close()
    store = opened(directory)
    assert store.get(FIRST.hash) is not None
    assert store.artifacts()[0].pinned
    check_whole(store, FIRST)
    store.close()
