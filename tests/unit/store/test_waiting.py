"""Nobody who adds waits for packs that are being written anew."""

import threading
from pathlib import Path

from kvnet.format.hashes import BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.samples import check_whole, publish, sample

WAIT_S = 20.0
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


class CountingRemovals(OsFiles):
    """Counts the packs that are removed, and stops at the first until it is told to go on."""

    def __init__(self) -> None:
        self.removed = 0
        self.halted, self.go_on = threading.Event(), threading.Event()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path.parent.parent.name == "packs":
            self.removed += 1
            self.halted.set()
            assert self.go_on.wait(WAIT_S)


def test_an_add_comes_before_the_rest_of_what_is_collected(tmp_path: Path) -> None:
    n_held = 60
    files = CountingRemovals()
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files)
    for number in range(n_held):
        publish(store, sample(range(number * 300, number * 300 + 300)))
    added_after: list[int] = []
    other = sample(range(90_000, 90_300))

    def add() -> None:
        publish(store, other, pinned=True)
        added_after.append(files.removed)

    collecting = threading.Thread(target=lambda: store.collect_garbage(everything=True))
    collecting.start()
    assert files.halted.wait(WAIT_S)
    adding = threading.Thread(target=add)
    adding.start()
    while not store._lock._waiting:  # the add has come to the lock that the removal holds
        assert adding.is_alive()
    files.go_on.set()
    adding.join(WAIT_S)
    collecting.join(WAIT_S)
    assert added_after[0] < n_held
    check_whole(store, other)
    assert store.usage().artifacts == 1
    store.close()
