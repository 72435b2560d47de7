"""What others put into the folders of a store: it means nothing, and keeps nobody from using it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvnet.format.hashes import artifact_text
from kvnet.store.disk import DiskStore
from tests.unit.store.samples import check_whole, keys_of, publish, sample

HELD, ADDED = sample(range(600)), sample(range(3000, 3600))
TEXT = artifact_text(HELD.hash)

FOLDERS = ["partial", "pins", "removed", "tmp", "packs", "quarantine"]
NAMES = ["junk", TEXT, f"{TEXT}.part", f"{TEXT}.journal", f"{TEXT}.kva", "x" * 200, os.fsdecode(b"\xff\xfe")]


def junk(path: Path) -> None:
    path.write_bytes(os.urandom(777))


def folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


KINDS: dict[str, Callable[[Path], None]] = {"a file": junk, "a folder": folder, "a pipe": os.mkfifo, "a link": dangling}


def opened(place: Path) -> DiskStore:
    return DiskStore.open(place / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOLDERS)
def test_strangers_in_a_folder_of_the_store_keep_nobody_from_using_it(tmp_path: Path, name: str, kind: str) -> None:
    store = opened(tmp_path)
    publish(store, HELD)
    store.close()
    for each in NAMES:
        if (name, each) in {("removed", TEXT), ("pins", TEXT)}:
            continue  # that is a marker of ours
        KINDS[kind](tmp_path / "store" / name / each)
    store = opened(tmp_path)
    check_whole(store, HELD)
    assert not store.artifacts()[0].pinned
    publish(store, ADDED, pinned=True)
    assert store.remove(ADDED.hash)
    writer = store.resume_pack(ADDED.hash, ADDED.entries)
    writer.put(0, ADDED.chunks[0], ADDED.entries[0].hash)
    writer.abort()
    store.tidy(unused_s=3600.0)
    assert store.rebuild(keys_of).artifacts == 1
    assert all(problem.name.encode().isascii() for problem in store.problems)
    store.close()
    store = opened(tmp_path)
    check_whole(store, HELD)
    assert HELD.hash in store.collect_garbage(everything=True).removed
    assert store.artifacts() == []
    assert store.usage().held_bytes > 0
    store.close()
