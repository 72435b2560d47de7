"""Partial packs on disk: after a crash, a power failure or damage only what still matches is held."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvnet.errors import StoreError
from kvnet.format.hashes import BytesLike, artifact_text
from kvnet.store.disk import DiskStore
from kvnet.store.journal import GroupedSync, Kept, encode_header, encode_record, parse_journal
from kvnet.store.osfile import OsFiles
from kvnet.store.resuming import PARTIAL_KEPT_S, journal_of
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import check_whole, fill, sample

ARTIFACT = sample(range(64 * 256 - 256 * 4))
N = len(ARTIFACT.chunks)

VICTIM = """
import os, signal, sys
from pathlib import Path
from kvnet.store.disk import DiskStore
from tests.unit.store.test_partial import ARTIFACT
store = DiskStore.open(Path(sys.argv[1]), quota_bytes=1 << 30, min_free_bytes=0)
writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=ARTIFACT.size_bytes)
for done, (data, entry) in enumerate(zip(ARTIFACT.chunks, ARTIFACT.entries, strict=True)):
    if done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    writer.put(done, data, entry.hash)
"""


def opened(directory: Path, files: OsFiles | None = None, now_s: float | None = None) -> DiskStore:
    clock = {} if now_s is None else {"now": lambda: now_s}
    return DiskStore.open(directory, quota_bytes=1 << 30, min_free_bytes=0, files=files, **clock)  # type: ignore[arg-type]


def interrupted(directory: Path, n_chunks: int = N // 2) -> Path:
    """A store in which a fetch was interrupted after so many chunks; the path of its partial pack."""
    store = opened(directory)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    fill(writer, ARTIFACT, range(n_chunks))
    store.close()
    return writer.path


def held(directory: Path) -> frozenset[int]:
    store = opened(directory)
    try:
        return store.resume_pack(ARTIFACT.hash, ARTIFACT.entries).held
    finally:
        store.close()


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_fetch_fetches_at_most_two_chunks_again(repository_root: Path, tmp_path: Path, seed: int) -> None:
    done = N // 2 if seed == 0 else random.Random(seed).randrange(1, N)
    found = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path / "store"), str(done)],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    store = opened(tmp_path / "store")
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert len(writer.held) >= done - 2
    assert writer.held <= set(range(done))
    fill(writer, ARTIFACT, [index for index in range(N) if index not in writer.held])
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)
    assert list((tmp_path / "store" / "partial").iterdir()) == []
    store.close()


class VolatileFiles(OsFiles):
    """A disk with a cache: what was not synced is lost when the power fails."""

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self.paths: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self.paths[handle] = path
        return handle

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.paths = {handle: target if path == source else path for handle, path in self.paths.items()}

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.durable[handle] = self.read(handle, self.size_bytes(handle), 0)

    def fail_power(self, rng: random.Random) -> None:
        """Of what was written since the last sync, any sectors may have reached the medium."""
        for handle, path in self.paths.items():
            if not path.exists():
                continue
            written, safe = path.read_bytes(), self.durable.get(handle, b"")
            sectors = []
            for start in range(0, len(written), 512):
                old = safe[start : start + 512].ljust(len(written[start : start + 512]), b"\0")
                sectors.append(written[start : start + 512] if rng.random() < 0.5 else old)
            path.write_bytes(b"".join(sectors))


@pytest.mark.parametrize("seed", range(8))
def test_power_failure_loses_what_was_not_synced_and_never_invents_a_chunk(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = VolatileFiles()
    store = opened(tmp_path / "store", files)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    synced, written = rng.randrange(N // 2), rng.randrange(N // 2, N)
    fill(writer, ARTIFACT, range(synced))
    for handle in list(files.paths):
        files.sync(handle)
    fill(writer, ARTIFACT, range(synced, written))
    store.close()
    files.fail_power(rng)
    store = opened(tmp_path / "store")
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert set(range(synced)) <= writer.held <= set(range(written))
    fill(writer, ARTIFACT, [index for index in range(N) if index not in writer.held])
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)
    store.close()


def test_chunk_that_was_damaged_meanwhile_is_fetched_again(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert held(tmp_path) == frozenset(range(N // 2 - 1))


@pytest.mark.parametrize("seed", range(20))
def test_journal_of_junk_makes_nothing_held_that_is_not_there(tmp_path: Path, seed: int) -> None:
    path = interrupted(tmp_path)
    rng = random.Random(seed)
    journal = bytearray(journal_of(path).read_bytes())
    for _ in range(rng.randrange(1, 20)):
        journal[rng.randrange(len(journal))] = rng.randrange(256)
    journal_of(path).write_bytes(journal[: rng.randrange(len(journal))] if seed % 2 else journal)
    assert held(tmp_path) <= set(range(N // 2))


@pytest.mark.parametrize("change", ["no journal", "empty pack", "no pack", "journal of another artifact"])
def test_partial_pack_that_cannot_be_gone_on_with_is_begun_anew(tmp_path: Path, change: str) -> None:
    path = interrupted(tmp_path)
    if change == "no journal":
        journal_of(path).unlink()
    elif change == "empty pack":
        path.write_bytes(b"")
    elif change == "no pack":
        path.unlink()
    else:
        journal_of(path).write_bytes(encode_header(sample(range(3)).hash, N))
    assert held(tmp_path) == frozenset()


def test_torn_last_line_is_left_out() -> None:
    lines = [Kept(index, 1000 * index, 10) for index in range(5)]
    data = encode_header(ARTIFACT.hash, N) + b"".join(map(encode_record, lines))
    assert parse_journal(data, ARTIFACT.hash, N) == lines
    assert parse_journal(data[:-1], ARTIFACT.hash, N) == lines[:-1]
    assert parse_journal(data, ARTIFACT.hash, N + 1) == []


def test_chunk_that_a_journal_names_twice_or_over_another_counts_once(tmp_path: Path) -> None:
    path = interrupted(tmp_path, 4)
    journal = journal_of(path)
    first = parse_journal(journal.read_bytes(), ARTIFACT.hash, N)[0]
    shifted = Kept(1, first.offset + 1, ARTIFACT.entries[1].length_bytes)
    journal.write_bytes(journal.read_bytes() + encode_record(first) + encode_record(shifted))
    assert held(tmp_path) == frozenset(range(4))


def test_partial_packs_nobody_goes_on_with_expire(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    written_s = path.stat().st_mtime
    opened(tmp_path, now_s=written_s + PARTIAL_KEPT_S - 1).close()
    assert path.exists()
    opened(tmp_path, now_s=written_s + PARTIAL_KEPT_S + 1).close()
    assert list(path.parent.iterdir()) == []


def test_symbolic_link_in_the_place_of_a_partial_pack_is_not_followed(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "store")
    target = tmp_path / "elsewhere"
    target.write_bytes(b"mine")
    path.unlink()
    path.symlink_to(target)
    store = opened(tmp_path / "store")
    with pytest.raises(StoreError):
        store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert target.read_bytes() == b"mine"
    store.close()


@pytest.mark.parametrize("operation", ["create", "write", "rename", "truncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_disk_loses_no_chunk_that_was_kept_before(tmp_path: Path, operation: str, code: int) -> None:
    interrupted(tmp_path)
    for number in range(1, 6):
        store = opened(tmp_path, FaultyFiles(operation, number, code))
        try:
            writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=1000)
            fill(writer, ARTIFACT, range(N // 2, N // 2 + 1))
            writer.abort()
        except StoreError:
            pass
        store.close()
    assert held(tmp_path) >= set(range(N // 2))


def test_partial_pack_that_cannot_be_removed_keeps_no_other_from_going_or_being_gone_on_with(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = opened(tmp_path, files)
    both = [ARTIFACT, sample(range(5000, 5600))]
    for each in both:
        writer = store.resume_pack(each.hash, each.entries)
        fill(writer, each, range(2))
        writer.abort()
    files.fail_once("unlink", errno.EIO)
    with pytest.raises(StoreError, match="removing a partial pack failed"):
        store.collect_garbage(everything=True)
    (left,) = [each for each in both if store.has_partial(each.hash)]
    assert {path.stem for path in writer.path.parent.iterdir()} == {artifact_text(left.hash)}
    for each in both:
        assert len(store.resume_pack(each.hash, each.entries).held) == 2 * (each is left)
    store.close()


def test_full_disk_at_publishing_keeps_what_came(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = opened(tmp_path, files)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    fill(writer, ARTIFACT)
    files.fail_from_now_on("sync", errno.ENOSPC)
    with pytest.raises(StoreError):
        writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    store.close()
    assert held(tmp_path) == frozenset(range(N))


class TidyingFiles(OsFiles):
    """Runs something in the middle of the next read."""

    between: Callable[[], object] | None = None

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        between, self.between = self.between, None
        if between is not None:
            between()
        return super().read(handle, length_bytes, offset)


def test_a_store_tidied_while_a_partial_pack_is_read_leaves_it_alone(tmp_path: Path) -> None:
    path = interrupted(tmp_path)
    files = TidyingFiles()
    store = opened(tmp_path, files)
    files.between = lambda: store.collect_garbage(everything=True)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert path.exists()
    assert writer.held == frozenset(range(N // 2))
    fill(writer, ARTIFACT, range(N // 2, N))
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)
    store.close()


# --- syncing in groups ------------------------------------------------------------------------------------------------


class CountingFiles(OsFiles):
    """Counts syncs, and tells of each."""

    def __init__(self, failing: bool = False) -> None:
        self.synced: list[int] = []
        self.happened = threading.Condition()
        self._failing = failing

    def sync(self, handle: int) -> None:
        with self.happened:
            self.synced.append(handle)
            self.happened.notify_all()
        if self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        raise AssertionError("a sync writes nothing")

    def wait_for(self, n_syncs: int) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: len(self.synced) >= n_syncs, timeout=60)


def test_data_is_synced_before_its_journal_after_so_many_bytes() -> None:
    files = CountingFiles()
    sync = GroupedSync(files, 7, 8, size_bytes=100, seconds=3600)
    for _ in range(9):
        sync.wrote(10)
    assert files.synced == []
    sync.wrote(10)
    files.wait_for(2)
    assert files.synced == [7, 8]
    sync.end()


def test_the_first_syncs_come_sooner_and_each_after_twice_as_much() -> None:
    files = CountingFiles()
    sync = GroupedSync(files, 7, 8, size_bytes=40, seconds=3600, first_bytes=10)
    for n_syncs, n_bytes in ((2, 10), (4, 20), (6, 40), (8, 40)):
        sync.wrote(n_bytes - 1)
        assert len(files.synced) == n_syncs - 2
        sync.wrote(1)
        files.wait_for(n_syncs)
    sync.end()
    assert files.synced == [7, 8] * 4


def test_what_was_written_is_synced_after_some_time_though_nothing_more_comes() -> None:
    files = CountingFiles()
    sync = GroupedSync(files, 7, 8, size_bytes=1 << 30, seconds=0.01)
    sync.wrote(1)
    files.wait_for(2)
    sync.end()
    assert files.synced[:2] == [7, 8]


def test_failed_sync_is_told_to_the_next_writer() -> None:
    files = CountingFiles(failing=True)
    sync = GroupedSync(files, 7, 8, size_bytes=1, seconds=3600)
    sync.wrote(1)
    files.wait_for(1)
    sync.join()
    with pytest.raises(StoreError, match="did not reach the disk"):
        sync.wrote(1)
    sync.end()


def test_nothing_written_needs_no_thread() -> None:
    before = threading.active_count()
    GroupedSync(CountingFiles(), 7, 8).end()
    assert threading.active_count() == before
