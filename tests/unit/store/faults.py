"""File operations of which one fails."""

import errno
import os
from pathlib import Path

from kvnet.format.hashes import BytesLike
from kvnet.store.osfile import OsFiles


class FaultyFiles(OsFiles):
    """The real file operations, of which one fails.

    Args:
        operation: which kind fails; "" for none.
        number: the how-manieth of its kind, from 1.
        code: ``errno`` of the failure.
        forever: all later ones fail too, as on a disk that stays full.
    """

    def __init__(self, operation: str = "", number: int = 0, code: int = errno.EIO, *, forever: bool = False) -> None:
        self._operation = operation
        self._number = number
        self._code = code
        self._forever = forever
        self.seen: dict[str, int] = {}
        self.free: int | None = None

    def fail_once(self, operation: str, code: int) -> None:
        """The next operation of a kind fails."""
        self._operation, self._number, self._code = operation, self.seen.get(operation, 0) + 1, code

    def fail_from_now_on(self, operation: str, code: int) -> None:
        """Every later operation of a kind fails."""
        self._operation, self._number, self._code, self._forever = (
            operation,
            self.seen.get(operation, 0) + 1,
            code,
            True,
        )

    def _count(self, operation: str) -> None:
        self.seen[operation] = self.seen.get(operation, 0) + 1
        if operation == self._operation:
            count = self.seen[operation]
            if count == self._number or (self._forever and count > self._number):
                raise OSError(self._code, os.strerror(self._code))

    def create(self, path: Path) -> int:
        self._count("create")
        return super().create(path)

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        try:
            self._count("write")
        except OSError:
            # A full disk takes a part of it first.
            super().write(handle, memoryview(data).cast("B")[: len(data) // 2], offset)
            raise
        super().write(handle, data, offset)

    def truncate(self, handle: int, size_bytes: int) -> None:
        self._count("truncate")
        super().truncate(handle, size_bytes)

    def sync(self, handle: int) -> None:
        self._count("sync")
        super().sync(handle)

    def sync_directory(self, path: Path) -> None:
        self._count("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free
