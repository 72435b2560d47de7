"""Packs of interrupted fetches: which lie there, how much they take, and whose turn it is with each."""

import stat
from pathlib import Path

from kvnet.errors import StoreError
from kvnet.store.failures import storage_errors
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import PARTIAL_SUFFIX, StorePaths
from kvnet.store.resuming import PARTIAL_KEPT_S, journal_of


class Partials:
    """The partial packs of one store. Covered by the store's lock, but for :meth:`remove`.

    Args:
        files: the seam to the operating system.
        paths: the store.
        taken: those that somebody fills already: the store was opened again meanwhile.
    """

    def __init__(self, files: OsFiles, paths: StorePaths, taken: frozenset[Path] = frozenset()) -> None:
        self._files = files
        self._folder = paths.partial
        self._taken = set(taken)
        self._idle: dict[Path, int] = {}
        for path in sorted(self._folder.glob(f"*{PARTIAL_SUFFIX}")):
            if path not in taken:
                self._count(path)

    @property
    def taken(self) -> frozenset[Path]:
        """Those that somebody fills or removes."""
        return frozenset(self._taken)

    def __contains__(self, path: Path) -> bool:
        """Whether it lies there and nobody has it."""
        return path in self._idle

    def size_bytes(self) -> int:
        """What those that nobody has take, journals included."""
        return sum(self._idle.values())

    def take(self, path: Path) -> bool:
        """Have a partial pack, there or not, to oneself until :meth:`give_back`; False when somebody has it."""
        if path in self._taken:
            return False
        self._taken.add(path)
        self._idle.pop(path, None)
        return True

    def give_back(self, path: Path) -> None:
        """Others may have it; it counts again if it is there."""
        self._taken.discard(path)
        self._count(path)

    def _count(self, path: Path) -> None:
        try:
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                return  # somebody else's
            self._idle[path] = found.st_size + journal_of(path).lstat().st_size
        except OSError:
            self._idle.pop(path, None)

    def take_expired(self, now_s: float) -> list[Path]:
        """Take those that nobody went on with for `PARTIAL_KEPT_S`, to be removed."""
        return [path for path in list(self._idle) if now_s - _written_s(path) > PARTIAL_KEPT_S and self.take(path)]

    def take_oldest(self, n_bytes: int) -> list[Path]:
        """Take those of longest ago until they make up so many bytes, to be removed."""
        taken = []
        for path in sorted(self._idle, key=_written_s):
            if n_bytes <= 0:
                break
            n_bytes -= self._idle[path]
            self.take(path)
            taken.append(path)
        return taken

    def remove(self, path: Path) -> None:
        """Remove one that was taken; without the lock.

        Raises:
            StoreError: the disk failed.
        """
        with storage_errors("removing a partial pack"):
            self._files.unlink(path)
            self._files.unlink(journal_of(path))

    def sweep(self) -> None:
        """Remove what belongs to no partial pack, such as a journal without one. For when the store opens.

        Raises:
            StoreError: the disk failed.
        """
        known = self._idle.keys() | self._taken
        known |= {journal_of(path) for path in known}
        with storage_errors("looking at partial packs"):
            for path in self._folder.iterdir():
                if path not in known and not path.is_dir():
                    self._files.unlink(path)


def _written_s(path: Path) -> float:
    """When it was last written to, in seconds since 1970; 0 when it has gone."""
    try:
        with storage_errors("looking at a partial pack"):
            return path.lstat().st_mtime
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return 0.0
        raise
