"""The one seam between the store and the operating system's files.

Everything the store writes goes through one :class:`OsFiles`, so that differences between systems are settled here
and a test can make any single write, sync or rename fail.

Sources: ``fcntl(2)`` of macOS for ``F_FULLFSYNC``, ``F_PREALLOCATE`` and ``F_NOCACHE``; ``fdatasync(2)``,
``posix_fallocate(3)`` and ``posix_fadvise(2)`` of Linux. Python offers none of the latter on macOS.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Final

from kvnet.format.hashes import BytesLike

PRIVATE_FILE_MODE: Final = 0o600
PRIVATE_DIRECTORY_MODE: Final = 0o700

# <sys/fcntl.h> of macOS; Python names only the first, and only there.
_F_FULLFSYNC: Final = 51
_F_PREALLOCATE: Final = 42
_F_NOCACHE: Final = 48
_F_ALLOCATEALL: Final = 4
_F_PEOFPOSMODE: Final = 3
_FSTORE: Final = struct.Struct("=IiqqQ")
"""fstore_t: flags, position mode, offset, length, bytes allocated."""

_UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})


class OsFiles:
    """File operations, each of which is durable or raises ``OSError``. Holds no state."""

    def make_directory(self, path: Path) -> None:
        """Create a directory 0700, its parents too; leave one that is there."""
        # With parents=True the parents would be as open as the umask lets them.
        missing = [path, *path.parents]
        while missing and missing[-1].exists():
            missing.pop()
        for directory in reversed(missing):
            directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file 0600 that must not exist, open for reading and writing. A symbolic link is never followed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, PRIVATE_FILE_MODE)

    def open_for_reading(self, path: Path) -> int:
        """Open a regular file; a symbolic link is never followed, and a pipe or device is refused.

        Raises:
            OSError: also when it is something else than a regular file (``EINVAL``).
        """
        # O_NONBLOCK: opening a named pipe that somebody put there must not wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return handle

    def open_for_writing(self, path: Path) -> int:
        """Open a regular file that exists, for reading and writing; a symbolic link is never followed.

        Raises:
            OSError: also when it is something else than a regular file (``EINVAL``).
        """
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return handle

    def close(self, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def size_bytes(self, handle: int) -> int:
        """Size of an open file."""
        return os.fstat(handle).st_size

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        """``length_bytes`` bytes from ``offset``; fewer only at the end of the file."""
        parts: list[bytes] = []
        while length_bytes:
            part = os.pread(handle, length_bytes, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(handle, view, offset)
            view = view[written:]
            offset += written

    def truncate(self, handle: int, size_bytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(handle, size_bytes)

    def preallocate(self, handle: int, size_bytes: int) -> None:
        """Reserve disk blocks for ``size_bytes`` bytes, and make the file that long.

        Where the file system cannot reserve, the file becomes that long all the same; want of space then shows at a
        write.
        """
        if size_bytes <= 0:
            return
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(handle, 0, size_bytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            else:
                return
        else:
            more = size_bytes - os.fstat(handle).st_size
            if more > 0:
                request = _FSTORE.pack(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, more, 0)
                _try_fcntl(handle, _F_PREALLOCATE, request)
        os.ftruncate(handle, max(size_bytes, os.fstat(handle).st_size))

    def sync(self, handle: int) -> None:
        """Wait until a file's bytes and size are on the medium.

        On macOS ``fsync`` stops at the drive's cache; ``F_FULLFSYNC`` does not. File systems without it (network
        shares) get ``fsync``.
        """
        if hasattr(os, "fdatasync"):
            os.fdatasync(handle)
        elif not _try_fcntl(handle, _F_FULLFSYNC, 0):
            os.fsync(handle)

    def let_go(self, handle: int, offset: int = 0, length_bytes: int = 0) -> None:
        """Have a part of a file, or all of it, take no memory of the page cache: nobody reads it soon.

        Linux begins to write what is not on the medium yet, and lets go of what is: what was on its way is let go of
        when it is named again. On macOS it is the file that is kept out of the cache, from now on. Advice: a file
        system that does not take it is no failure.
        """
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, offset, length_bytes, os.POSIX_FADV_DONTNEED)
            else:
                fcntl.fcntl(handle, _F_NOCACHE, 1)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the medium."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file within one file system, replacing ``target``."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is as good. A symbolic link itself is removed, not what it names."""
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Bytes an ordinary user may still write on the file system of ``path``."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def write_whole(self, path: Path, data: BytesLike, temporary: Path) -> None:
        """Write a small file: all of it, durable, or nothing.

        Args:
            path: the file; replaced when it exists.
            data: its whole content.
            temporary: a path on the same file system that nobody else uses.
        """
        handle = self.create(temporary)
        try:
            try:
                self.write(handle, data, 0)
                self.sync(handle)
            finally:
                self.close(handle)
            self.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_directory(path.parent)


def _try_fcntl(handle: int, command: int, argument: bytes | int) -> bool:
    """Whether the system knows the command; a failure of the command itself is raised."""
    try:
        fcntl.fcntl(handle, command, argument)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
