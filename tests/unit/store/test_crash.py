"""A process that is killed while it publishes, at many points, leaves a store that opens as if it had not begun."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet.format.hashes import BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.samples import MINE, check_whole, keys_of, publish, sample

FIRST = sample(range(600))
EXTENDED = sample(range(2600), context=b"context")

VICTIM = """
import os, signal, sys
from pathlib import Path
from kvnet.store.disk import DiskStore
from tests.unit.store.samples import publish
from tests.unit.store.test_crash import DyingFiles, EXTENDED, FIRST
store = DiskStore.open(Path(sys.argv[1]), quota_bytes=1 << 30, min_free_bytes=0, files=DyingFiles(int(sys.argv[2])))
if sys.argv[3] == "publish":
    publish(store, EXTENDED, pinned=True)
else:
    store.remove(FIRST.hash)
print("survived", flush=True)
"""


class DyingFiles(OsFiles):
    """Kills its own process at the given step, before or in the middle of it."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.seen = 0

    def _step(self) -> None:
        self.seen += 1
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        view = memoryview(data).cast("B")
        super().write(handle, view[: len(view) // 2], offset)
        self._step()
        super().write(handle, view, offset)

    def sync(self, handle: int) -> None:
        self._step()
        super().sync(handle)

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)


def opened(directory: Path, files: OsFiles | None = None) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=1 << 30, min_free_bytes=0, files=files, keys_of=keys_of)


def steps_of(directory: Path, action: str) -> int:
    """How many steps the action takes when nobody dies."""
    opened(directory).close()
    files = DyingFiles(0)
    store = opened(directory, files)
    publish(store, FIRST)
    if action == "remove":
        publish(store, EXTENDED)
    before = files.seen
    if action == "publish":
        publish(store, EXTENDED, pinned=True)
    else:
        store.remove(FIRST.hash)
    store.close()
    return files.seen - before


def killed(repository_root: Path, directory: Path, step: int, action: str) -> None:
    """Runs the action in another process, which has to die of it."""
    found = subprocess.run(
        [sys.executable, "-c", VICTIM, str(directory), str(step), action],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert "survived" not in found.stdout


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_publish_is_there_whole_or_not_at_all(repository_root: Path, tmp_path: Path, seed: int) -> None:
    steps = steps_of(tmp_path / "counting", "publish")
    # The last steps are the delicate ones: rename, directory, index.
    step = steps - seed if seed < 4 else random.Random(seed).randrange(1, steps)
    directory = tmp_path / "store"
    store = opened(directory)
    publish(store, FIRST)
    store.close()
    killed(repository_root, directory, step, "publish")
    store = opened(directory)
    check_whole(store, FIRST)
    assert not any((directory / "tmp").iterdir())
    assert store.problems == ()
    record = store.get(EXTENDED.hash)
    if record is None:
        assert [one.hash for one in store.artifacts()] == [FIRST.hash]
        assert store.find_prefix(MINE.id, EXTENDED.keys[::-1]) == [(FIRST.hash, 2)]
        assert not store.has_chunk(EXTENDED.entries[-1].hash)
    else:
        assert record.pinned
        check_whole(store, EXTENDED)
    publish(store, EXTENDED, pinned=True)
    check_whole(store, EXTENDED)
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_removal_keeps_the_artifact_whole_or_loses_it_for_good(
    repository_root: Path, tmp_path: Path, seed: int
) -> None:
    steps = steps_of(tmp_path / "counting", "remove")
    step = 1 + seed * (steps - 1) // 3
    directory = tmp_path / "store"
    store = opened(directory)
    publish(store, FIRST)
    publish(store, EXTENDED)
    store.close()
    killed(repository_root, directory, step, "remove")
    for _ in range(2):
        store = opened(directory)
        check_whole(store, EXTENDED)
        assert store.problems == ()
        listed = store.get(FIRST.hash) is not None
        if listed:
            check_whole(store, FIRST)
        else:
            assert store.find_prefix(MINE.id, FIRST.keys[::-1]) == [(EXTENDED.hash, 2)]
        store.rebuild(keys_of)
        assert (store.get(FIRST.hash) is not None) == listed
        store.close()
