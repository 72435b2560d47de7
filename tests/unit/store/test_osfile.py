import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from kvnet.errors import StoreError, StoreFullError
from kvnet.store.failures import storage_errors
from kvnet.store.osfile import OsFiles


@pytest.fixture(params=["as it is here", "without the names of Linux"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OsFiles:
    """The seam, also as Python offers it on macOS."""
    if request.param == "without the names of Linux":
        monkeypatch.delattr(os, "fdatasync", raising=False)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    return OsFiles()


def test_what_is_written_is_read_back(files: OsFiles, tmp_path: Path) -> None:
    handle = files.create(tmp_path / "file")
    files.preallocate(handle, 10_000)
    assert files.size_bytes(handle) == 10_000
    files.write(handle, b"hello", 9_998)
    files.write(handle, memoryview(b"").cast("B"), 0)
    files.sync(handle)
    assert files.read(handle, 100, 9_998) == b"hello"
    assert files.read(handle, 100, 20_000) == b""
    files.truncate(handle, 3)
    assert files.size_bytes(handle) == 3
    files.close(handle)
    files.sync_directory(tmp_path)


def test_preallocating_never_shortens_a_file(files: OsFiles, tmp_path: Path) -> None:
    handle = files.create(tmp_path / "file")
    files.write(handle, b"x" * 5000, 0)
    files.preallocate(handle, 100)
    files.preallocate(handle, 0)
    assert files.size_bytes(handle) == 5000
    assert files.read(handle, 5000, 0) == b"x" * 5000
    files.close(handle)


def test_the_commands_of_macos_are_given_as_it_documents_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    commands: list[tuple[int, bytes | int]] = []

    def remember(handle: int, command: int, argument: bytes | int) -> int:
        commands.append((command, argument))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", remember)
    files = OsFiles()
    handle = files.create(tmp_path / "file")
    files.write(handle, b"x" * 100, 0)
    files.preallocate(handle, 4096)
    files.sync(handle)
    assert files.size_bytes(handle) == 4096
    files.close(handle)
    (preallocate, request), (full_sync, argument) = commands
    assert (preallocate, full_sync, argument) == (42, 51, 0)
    assert isinstance(request, bytes)
    assert len(request) == 32
    assert int.from_bytes(request[:4], "little") == 4
    assert int.from_bytes(request[4:8], "little") == 3
    assert int.from_bytes(request[16:24], "little") == 3996


@pytest.mark.parametrize("operation", ["preallocate", "sync"])
def test_a_full_disk_is_told_on_macos_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)

    def full(handle: int, command: int, argument: bytes | int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "fcntl", full)
    files = OsFiles()
    handle = files.create(tmp_path / "file")
    with pytest.raises(OSError, match="No space"):
        files.preallocate(handle, 4096) if operation == "preallocate" else files.sync(handle)
    files.close(handle)


def test_files_are_private_from_their_first_moment(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        files = OsFiles()
        files.make_directory(tmp_path / "dir")
        files.make_directory(tmp_path / "dir")
        files.write_whole(tmp_path / "dir" / "file", b"data", tmp_path / "dir" / "temporary")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "dir").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "dir" / "file").stat().st_mode) == 0o600
    assert (tmp_path / "dir" / "file").read_bytes() == b"data"
    assert os.listdir(tmp_path / "dir") == ["file"]


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    files = OsFiles()
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing"):
        with pytest.raises(OSError, match=name):
            files.open_for_reading(tmp_path / name)
    for name in ("link", "target"):
        with pytest.raises(FileExistsError):
            files.create(tmp_path / name)
    files.unlink(tmp_path / "link")
    files.unlink(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b"x"


def test_free_space_is_that_of_an_ordinary_user(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert abs(OsFiles().free_bytes(tmp_path) - found.f_bavail * found.f_frsize) < 1 << 32


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EIO, StoreError),
        (errno.EROFS, StoreError),
    ],
)
def test_errors_of_the_system_become_errors_of_the_store(code: int, kind: type[StoreError]) -> None:
    with pytest.raises(StoreError) as caught, storage_errors("writing a pack"):
        raise OSError(code, os.strerror(code))
    assert type(caught.value) is kind
    assert os.strerror(code) in caught.value.message
    assert caught.value.hint
