"""Writing past the page cache: the same bytes in the file, nothing in the cache, and every failure as without."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnet.errors import StoreError
from kvnet.format.hashes import BytesLike
from kvnet.store.osfile import OsFiles
from kvnet.store.past_cache import BLOCK_BYTES, PastCache
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import check_whole, fill
from tests.unit.store.test_partial import ARTIFACT, VICTIM, VolatileFiles, opened

N = len(ARTIFACT.chunks)
LENGTHS = [1, 511, 512, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 100_000, 3 * BLOCK_BYTES, 7]


class RefusingFiles(OsFiles):
    """A file system that opens files for writing past its cache, and then takes nothing."""

    def __init__(self) -> None:
        self.direct: int | None = None

    def open_past_cache(self, path: Path) -> int | None:
        self.direct = super().open_past_cache(path)
        return self.direct

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        if handle == self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().write(handle, data, offset)


class CachedFiles(OsFiles):
    """A file system that has no such thing."""

    def open_past_cache(self, path: Path) -> int | None:
        return None


def pieces(seed: int = 0) -> Iterator[tuple[int, bytes]]:
    rng = random.Random(seed)
    offset = 4096 + 52
    for length in LENGTHS:
        yield offset, rng.randbytes(length)
        offset += length


@pytest.mark.parametrize("files", [OsFiles(), RefusingFiles(), CachedFiles()], ids=lambda each: type(each).__name__)
def test_what_is_written_is_in_the_file_when_the_write_returns(tmp_path: Path, files: OsFiles) -> None:
    path = tmp_path / "file"
    handle = files.create(path)
    writer = PastCache(files, path, handle)
    for offset, data in pieces():
        writer.write(data, offset)
        for before, expected in pieces():
            if before <= offset:
                assert files.read(handle, len(expected), before) == expected
    writer.close()
    files.close(handle)


def test_write_goes_on_in_the_middle_of_a_block_that_another_writer_began(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "file"
    handle = files.create(path)
    for offset, data in pieces():
        writer = PastCache(files, path, handle)
        writer.write(data, offset)
        writer.close()
    for offset, data in pieces():
        assert files.read(handle, len(data), offset) == data
    files.close(handle)


def test_write_elsewhere_keeps_what_lies_before_it(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "file"
    handle = files.create(path)
    writer = PastCache(files, path, handle)
    writer.write(b"a" * 100, 0)
    files.write(handle, b"b" * BLOCK_BYTES, 3 * BLOCK_BYTES)
    writer.write(b"c" * 100, 3 * BLOCK_BYTES + 50)
    assert files.read(handle, 100, 0) == b"a" * 100
    assert files.read(handle, 150, 3 * BLOCK_BYTES) == b"b" * 50 + b"c" * 100
    writer.close()
    files.close(handle)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells whether bytes are in its page cache")
def test_what_is_written_takes_no_memory_of_the_page_cache(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "file"
    handle = files.create(path)
    writer = PastCache(files, path, handle)
    if writer.goes_through_cache:
        pytest.skip("the file system of the temporary folder writes through its cache only")
    buffer = bytearray(BLOCK_BYTES)
    files.write(handle, bytes(BLOCK_BYTES), 0)
    assert os.preadv(handle, [buffer], 0, os.RWF_NOWAIT) == BLOCK_BYTES
    writer.write(os.urandom(64 * BLOCK_BYTES), BLOCK_BYTES)
    with pytest.raises(BlockingIOError):
        os.preadv(handle, [buffer], 32 * BLOCK_BYTES, os.RWF_NOWAIT)
    writer.close()
    files.close(handle)


def test_write_that_failed_can_be_made_again(tmp_path: Path) -> None:
    files, path = FaultyFiles("write", 3, errno.ENOSPC), tmp_path / "file"
    handle = files.create(path)
    writer = PastCache(files, path, handle)
    for number, (offset, data) in enumerate(pieces(), 1):
        if number == 3:
            with pytest.raises(OSError, match="No space left"):
                writer.write(data, offset)
        writer.write(data, offset)
    for offset, data in pieces():
        assert files.read(handle, len(data), offset) == data
    writer.close()
    files.close(handle)


# --- packs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [OsFiles(), RefusingFiles(), CachedFiles()], ids=lambda each: type(each).__name__)
def test_pack_that_nobody_reads_soon_holds_the_same(tmp_path: Path, files: OsFiles) -> None:
    store = opened(tmp_path, files)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=ARTIFACT.size_bytes, read_soon=False)
    fill(writer, ARTIFACT, range(N // 2))
    assert [writer.read(index) for index in range(N // 2)] == list(ARTIFACT.chunks[: N // 2])
    writer.abort()
    # Gone on with once through the cache and once past it.
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    fill(writer, ARTIFACT, range(N // 2, N // 2 + 1))
    writer.abort()
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, read_soon=False)
    assert writer.held == frozenset(range(N // 2 + 1))
    fill(writer, ARTIFACT, range(N // 2 + 1, N))
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)
    store.close()
    store = opened(tmp_path)
    assert store.problems == ()
    check_whole(store, ARTIFACT)
    store.close()


def test_second_pack_of_an_artifact_past_the_cache_is_an_ordinary_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first, second = (store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, read_soon=False) for _ in range(2))
    fill(second, ARTIFACT)
    second.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    first.abort()
    check_whole(store, ARTIFACT)
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_killed_fetch_past_the_cache_fetches_at_most_two_chunks_again(
    repository_root: Path, tmp_path: Path, seed: int
) -> None:
    done = N // 2 if seed == 0 else random.Random(seed).randrange(1, N)
    victim = VICTIM.replace("expected_bytes=", "read_soon=False, expected_bytes=")
    assert victim != VICTIM
    command = [sys.executable, "-c", victim, str(tmp_path / "store"), str(done)]
    found = subprocess.run(command, cwd=repository_root, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == -signal.SIGKILL, found.stderr
    store = opened(tmp_path / "store")
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert len(writer.held) >= done - 2
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_power_failure_past_the_cache_never_invents_a_chunk(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = VolatileFiles()
    store = opened(tmp_path, files)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, read_soon=False)
    synced, written = rng.randrange(1, N // 2), rng.randrange(N // 2, N)
    fill(writer, ARTIFACT, range(synced))
    for handle in list(files.paths):
        files.sync(handle)
    fill(writer, ARTIFACT, range(synced, written))
    store.close()
    files.fail_power(rng)
    store = opened(tmp_path)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, read_soon=False)
    assert set(range(synced)) <= writer.held <= set(range(written))
    fill(writer, ARTIFACT, [index for index in range(N) if index not in writer.held])
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)
    store.close()


@pytest.mark.parametrize("operation", ["create", "write", "rename", "truncate", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_that_fails_past_the_cache_loses_no_chunk_that_was_kept(tmp_path: Path, operation: str, code: int) -> None:
    store = opened(tmp_path)
    fill(store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, read_soon=False), ARTIFACT, range(N // 2))
    store.close()
    for number in range(1, 9):
        store = opened(tmp_path, FaultyFiles(operation, number, code))
        try:
            writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=1000, read_soon=False)
            fill(writer, ARTIFACT, [index for index in range(N // 2, N // 2 + 2) if index not in writer.held])
            writer.abort()
        except StoreError:
            pass
        store.close()
    store = opened(tmp_path)
    assert store.resume_pack(ARTIFACT.hash, ARTIFACT.entries).held >= set(range(N // 2))
    store.close()
