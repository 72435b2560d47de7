"""Packs that nobody reads soon: the same bytes in the file, none of them in the page cache, as safe as others."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from kvnet.store.writer import LET_GO_BYTES
from tests.unit.store.samples import check_whole, fill, sample
from tests.unit.store.test_partial import ARTIFACT, VICTIM, VolatileFiles, opened

N = len(ARTIFACT.chunks)


class AskedFiles(OsFiles):
    """Notes what the page cache is asked to let go of."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def let_go(self, handle: int, offset: int = 0, length_bytes: int = 0) -> None:
        self.asked.append((offset, length_bytes))
        super().let_go(handle, offset, length_bytes)


def cached(path: Path, size_bytes: int) -> int:
    """How many pages of a file's beginning lie in the page cache; asked without reading ahead."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        found = 0
        for offset in range(0, size_bytes, 4096):
            try:
                found += os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
        return found
    finally:
        os.close(handle)


def fetched(store: DiskStore, *, read_soon: bool) -> Path:
    """Fill a pack and publish it; where it lies."""
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=ARTIFACT.size_bytes, read_soon=read_soon)
    fill(writer, ARTIFACT)
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    (location,) = {place.path for place in store.locate_all([entry.hash for entry in ARTIFACT.entries]) if place}
    return location


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells whether bytes are in its page cache")
def test_what_nobody_reads_soon_takes_no_memory_of_the_page_cache(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    files = OsFiles()
    handle = files.open_for_writing(probe)
    files.sync(handle)
    try:
        if cached(probe, 1 << 20) != 256:
            pytest.skip("the file system of the temporary folder does not tell what is cached")
        files.let_go(handle)
        if cached(probe, 1 << 20):
            pytest.skip("the file system of the temporary folder lies in memory")
    finally:
        files.close(handle)
    found = {}
    for read_soon in (True, False):
        store = opened(tmp_path / str(read_soon))
        path = fetched(store, read_soon=read_soon)
        found[read_soon] = cached(path, ARTIFACT.size_bytes)
        check_whole(store, ARTIFACT)
        store.close()
    assert found[True] == -(-ARTIFACT.size_bytes // 4096)
    assert found[False] == 0


def test_the_cache_is_asked_while_a_pack_is_filled_and_at_its_end(tmp_path: Path) -> None:
    files = AskedFiles()
    store = opened(tmp_path, files)
    fetched(store, read_soon=True)
    assert files.asked == []
    large = sample(range(1_000_000, 1_000_000 + 4 * LET_GO_BYTES // ARTIFACT.size_bytes * 256 * 60))
    writer = store.resume_pack(large.hash, large.entries, read_soon=False)
    fill(writer, large)
    while_filled = files.asked[1:]
    assert len(while_filled) >= large.size_bytes // LET_GO_BYTES - 1 > 0
    assert all(offset + length <= writer.next_offset for offset, length in while_filled)
    writer.publish(large.envelope, keys=large.keys, pinned=False)
    assert files.asked[0] == files.asked[-1] == (0, 0)
    store.close()


def test_killed_fetch_that_nobody_waits_for_fetches_at_most_two_chunks_again(
    repository_root: Path, tmp_path: Path
) -> None:
    victim = VICTIM.replace("expected_bytes=", "read_soon=False, expected_bytes=")
    assert victim != VICTIM
    command = [sys.executable, "-c", victim, str(tmp_path / "store"), str(N // 2)]
    found = subprocess.run(command, cwd=repository_root, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == -signal.SIGKILL, found.stderr
    store = opened(tmp_path / "store")
    assert len(store.resume_pack(ARTIFACT.hash, ARTIFACT.entries).held) >= N // 2 - 2
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_power_failure_of_a_fetch_that_nobody_waits_for_never_invents_a_chunk(tmp_path: Path, seed: int) -> None:
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
