import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnet.errors import DataDirLockedError, StoreError
from kvnet.store.lock import DataDirLock, LockOwner

HOLDER = """
import sys
from pathlib import Path
from kvnet.store.lock import DataDirLock
lock = DataDirLock(Path(sys.argv[1]))
lock.acquire()
lock.record_control_socket("/tmp/some.sock")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, repository_root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository_root,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_told_who_owns_the_directory(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    lock = DataDirLock(tmp_path)
    with pytest.raises(DataDirLockedError, match=f"process {holder.pid} owns the data directory {tmp_path}") as caught:
        lock.acquire()
    assert str(holder.pid) in caught.value.hint
    assert not lock.held
    assert lock.owner() == LockOwner(holder.pid, "/tmp/some.sock")


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = DataDirLock(tmp_path)
    assert lock.owner() is None
    lock.acquire()
    assert lock.owner() == LockOwner(os.getpid())
    lock.release()


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = DataDirLock(tmp_path), DataDirLock(tmp_path)
    first.acquire()
    first.acquire()
    with pytest.raises(DataDirLockedError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    assert second.owner() is None
    second.acquire()
    assert second.held
    second.release()


def test_a_lock_file_alone_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    lock = DataDirLock(tmp_path)
    assert lock.owner() is None
    lock.acquire()
    lock.release()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[" * 8000,
        b'{"pid":"1"}',
        b'{"pid":0}',
        b'{"pid":-1}',
        b'{"pid":4611686018427387904}',
        b"\xff" * 9000,
    ],
)
def test_an_owner_record_that_says_nothing_is_nobody(tmp_path: Path, record: bytes) -> None:
    (tmp_path / "owner.json").write_bytes(record)
    assert DataDirLock(tmp_path).owner() is None


def test_files_and_directory_are_private(tmp_path: Path) -> None:
    lock = DataDirLock(tmp_path / "new" / "dir")
    lock.acquire()
    lock.record_control_socket(tmp_path / "control.sock")
    assert (tmp_path / "new" / "dir").stat().st_mode & 0o777 == 0o700
    for name in ("lock", "owner.json"):
        assert (tmp_path / "new" / "dir" / name).stat().st_mode & 0o777 == 0o600
    lock.release()
    assert sorted(os.listdir(tmp_path / "new" / "dir")) == ["lock"]


def test_a_control_socket_is_recorded_only_by_the_holder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="hold the lock"):
        DataDirLock(tmp_path).record_control_socket("x")


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be opened"):
        DataDirLock(tmp_path / "file" / "sub").acquire()


def test_a_linked_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        DataDirLock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()
