"""Nobody who adds waits for what is being collected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvnet.format.hashes import BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from kvnet.store.presence import Gate
from tests.unit.store.samples import Sample, check_whole, publish, sample

WAIT_S = 120.0
"""Long enough for any machine; passed only when somebody waits for ever."""


class Halting(OsFiles):
    """Stops one thread in the middle of a write, until it is told to go on."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.halted, self.go_on = threading.Event(), threading.Event()

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        if threading.current_thread() is self.thread:
            self.halted.set()
            assert self.go_on.wait(WAIT_S)
        super().write(handle, data, offset)


def test_an_add_goes_on_while_another_thread_is_in_the_middle_of_writing_a_pack_anew(tmp_path: Path) -> None:
    base, longer, other = sample(range(2000)), sample([*range(1024), *range(9000, 9300)]), sample(range(5000, 6000))
    files = Halting()
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files)
    publish(store, base)
    publish(store, longer)
    # Some of its pack is used by the other, and stays until packs are written anew.
    store.release(base.hash)
    files.thread = threading.Thread(target=lambda: store.tidy(unused_s=1e9))
    files.thread.start()
    assert files.halted.wait(WAIT_S)
    added = threading.Thread(target=lambda: publish(store, other))
    added.start()
    added.join(WAIT_S)
    assert not added.is_alive()
    check_whole(store, other)
    check_whole(store, longer)
    files.go_on.set()
    files.thread.join(WAIT_S)
    held = store.usage().chunks
    assert held == len(set(longer.entries) | set(other.entries))
    check_whole(store, longer)
    store.close()


class HaltingRemoval(OsFiles):
    """Stops whoever removes a pack, until it is told to go on."""

    def __init__(self) -> None:
        self.halted, self.go_on = threading.Event(), threading.Event()

    def unlink(self, path: Path) -> None:
        if path.parent.parent.name == "packs":
            self.halted.set()
            assert self.go_on.wait(WAIT_S)
        super().unlink(path)


@pytest.fixture
def files() -> HaltingRemoval:
    return HaltingRemoval()


@pytest.fixture
def store(tmp_path: Path, files: HaltingRemoval) -> Iterator[DiskStore]:
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files)
    yield store
    files.go_on.set()
    store.close()


FIRST, SECOND, OTHER = sample(range(300)), sample(range(300, 600)), sample(range(90_000, 90_300))


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def held_beside_index(store: DiskStore) -> int:
    index_bytes = sum(path.stat().st_size for path in store._parts.index.files() if path.exists())
    return store.usage().held_bytes - index_bytes


def test_an_add_is_done_before_the_rest_of_what_is_collected(files: HaltingRemoval, store: DiskStore) -> None:
    for artifact in (FIRST, SECOND):
        publish(store, artifact)
    held_bytes = held_beside_index(store)
    collecting = started(lambda: store.collect_garbage(everything=True))
    assert files.halted.wait(WAIT_S)
    # What is being removed takes room until it has gone.
    assert held_beside_index(store) == held_bytes
    # Here and now, while a pack is being removed.
    publish(store, OTHER, pinned=True)
    check_whole(store, OTHER)
    files.go_on.set()
    collecting.join(WAIT_S)
    check_whole(store, OTHER)
    assert store.usage().artifacts == 1


def test_what_is_removed_and_added_again_at_once_is_there_afterwards(
    tmp_path: Path, files: HaltingRemoval, store: DiskStore
) -> None:
    publish(store, FIRST)
    removing = started(lambda: store.remove(FIRST.hash))
    assert files.halted.wait(WAIT_S)
    adding = started(lambda: publish(store, FIRST, pinned=True))
    # It has come to where its files are being changed.
    while not store._lock._changed._waiters:  # type: ignore[attr-defined]
        assert adding.is_alive()
    files.go_on.set()
    for thread in (removing, adding):
        thread.join(WAIT_S)
    check_whole(store, FIRST)
    store.close()
    again = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)
    check_whole(again, FIRST)
    again.close()


def test_somebody_who_adds_what_is_in_flux_keeps_nobody_else_waiting(files: HaltingRemoval, store: DiskStore) -> None:
    publish(store, FIRST)
    removing = started(lambda: store.remove(FIRST.hash))
    assert files.halted.wait(WAIT_S)
    adding = started(lambda: publish(store, FIRST))
    while not store._lock._changed._waiters:  # type: ignore[attr-defined]
        assert adding.is_alive()
    publish(store, OTHER)
    assert store.get(FIRST.hash) is None
    files.go_on.set()
    for thread in (removing, adding):
        thread.join(WAIT_S)
    check_whole(store, FIRST)
    check_whole(store, OTHER)


CHANGING = ("create", "make_directory", "open_for_writing", "preallocate", "rename", "sync", "sync_directory")
READING = ("open_for_reading", "read")
WRITING = ("truncate", "unlink", "write")


class UnderTheLock(OsFiles):
    """Notes every file operation made by a thread that holds the store's lock."""

    def __init__(self) -> None:
        self.lock: Gate | None = None
        self.operations = 0
        self.locked: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in CHANGING + READING + WRITING and self.lock is not None:
            self.operations += 1
            if self.lock._lock._is_owned():  # type: ignore[attr-defined]
                self.locked.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "collect",
    [
        lambda store: store.tidy(unused_s=0.0),
        lambda store: store.collect_garbage(everything=True),
        lambda store: store.remove(FIRST.hash),
        lambda store: store.release(FIRST.hash),
    ],
    ids=["tidy", "gc", "remove", "release"],
)
def test_no_file_is_touched_under_the_lock_that_an_add_needs(
    tmp_path: Path, collect: Callable[[DiskStore], object]
) -> None:
    files, now_s = UnderTheLock(), [1_800_000_000.0]
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files, now=lambda: now_s[0])
    for artifact in (FIRST, SECOND, sample(range(2000))):
        publish(store, artifact)
    # Some of the pack of the longest is used by another, and stays until packs are written anew.
    publish(store, sample([*range(1024), *range(9000, 9300)]), pinned=True)
    partial = store.resume_pack(OTHER.hash, OTHER.entries)
    partial.put(0, OTHER.chunks[0])
    partial.abort()
    now_s[0] += 30 * 24 * 3600.0
    files.lock = store._lock
    collect(store)
    files.lock = None
    assert files.operations >= 4
    assert files.locked == []
    store.close()


@pytest.mark.parametrize(
    "collect",
    [lambda store: store.tidy(unused_s=1e9), lambda store: store.collect_garbage(everything=True)],
    ids=["tidy", "gc"],
)
def test_the_log_of_the_index_is_not_emptied_under_the_lock_while_a_pack_is_being_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collect: Callable[[DiskStore], object]
) -> None:
    with closing(DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)) as store:
        publish(store, FIRST)
        log_bytes = store._parts.index.log_bytes
        writer = store.begin_pack(len(OTHER.chunks))
        collect(store)
        assert log_bytes() > 0
        # One that has become long is another matter, or it would grow for as long as there is always some pack open.
        with monkeypatch.context() as patched:
            patched.setattr("kvnet.store.collecting.MAX_LOG_BYTES", 0)
            collect(store)
        assert log_bytes() == 0
        publish(store, SECOND)
        assert log_bytes() > 0
        writer.abort()
        collect(store)
        assert log_bytes() == 0


def test_what_is_too_much_is_looked_up_in_steps_and_somebody_who_adds_comes_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvnet.store.collecting.STEP_PACKS", 1)
    now_s = [1_800_000_000.0]
    artifacts = [sample(range(start, start + 2000)) for start in range(0, 60_000, 10_000)]
    with closing(DiskStore.open(tmp_path / "sizing", quota_bytes=1 << 30, min_free_bytes=0)) as sizing:
        for artifact in artifacts:
            publish(sizing, artifact)
        quota_bytes = int(sizing.usage().held_bytes / 0.97)
    store = DiskStore.open(tmp_path / "store", quota_bytes=quota_bytes, min_free_bytes=0, now=lambda: now_s[0])
    for artifact in artifacts:
        publish(store, artifact)
        now_s[0] += 100.0
    added: list[Sample] = []

    def give_way() -> None:
        # In the first of its steps, somebody pins what would go first.
        if not added:
            added.append(artifacts[0])
            store.pin(artifacts[0].hash)

    monkeypatch.setattr(store._lock, "give_way", give_way)
    assert store.tidy(unused_s=1e9).removed == (artifacts[1].hash,)
    assert added
    check_whole(store, artifacts[0])
    store.close()
