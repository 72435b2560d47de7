"""Whether the store is where it was: drives are unplugged, unmounted, and fail.

What has gone must not be taken for lost: nothing is dropped from the index for it, and nothing is written to whatever
lies at its place meanwhile, such as the empty folder under a mount point.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from kvnet.errors import StoreAwayError, StoreError
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import StorePaths

_log = logging.getLogger(__name__)

HINT: Final = "Connect its drive again: requests are answered without it until then."


class Presence:
    """Knows whether a store is there.

    Args:
        files: the seam to the operating system.
        paths: the store; it is there now.

    Attributes:
        away: why the store cannot be used; "" while it can.
    """

    def __init__(self, files: OsFiles, paths: StorePaths) -> None:
        self._files = files
        self._paths = paths
        self._packs = os.fspath(paths.packs)  # made once: it is looked at for every chunk
        self.away = ""
        self._place = self._found()

    def _found(self) -> tuple[int, int]:
        found = os.stat(self._packs)
        return found.st_dev, found.st_ino

    def look(self) -> bool:
        """Whether the folder at the store's place is still the one that was opened; costs one ``stat``."""
        if self.away:
            return False
        try:
            if self._found() == self._place:
                return True
            reason = f"another folder is at {self._paths.root}"
        except OSError as error:
            reason = f"{self._paths.root}: {error.strerror}"
        self.lose(reason)
        return False

    def lose(self, reason: str) -> None:
        """The store cannot be used any more."""
        if not self.away:
            self.away = reason
            _log.warning("store: away, requests are answered without it until it is back: %s", reason)

    def unreadable(self) -> str:
        """Why not even what is there can be read; "" when it can: what cannot be written may still be served."""
        try:
            self._found()
            handle = self._files.open_for_reading(self._paths.index)
            try:
                self._files.read(handle, 16, 0)
            finally:
                self._files.close(handle)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def probe(self) -> str:
        """Why nothing can be written and read where the store is; "" when that works."""
        path = self._paths.temporary / "probe"
        try:
            self._found()
            self._files.unlink(path)
            self._files.write_whole(path, b"kvnet", path.with_suffix(".new"))
            handle = self._files.open_for_reading(path)
            try:
                if self._files.read(handle, 5, 0) != b"kvnet":
                    return "it does not read back what was written"
            finally:
                self._files.close(handle)
            self._files.unlink(path)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def back(self) -> None:
        """The store was opened again."""
        self._place = self._found()
        self.away = ""
        _log.warning("store: back, and used again")

    def error(self) -> StoreAwayError:
        """What whoever needs the store is told."""
        return StoreAwayError(f"the store is away: {self.away}", hint=HINT)


GIVE_WAY_S = 0.001
"""How long a turn of giving way lasts, in seconds: a waiting thread wakes up in far less."""
GIVE_WAY_TURNS = 50
"""Whoever gives way goes on after so many turns, however many wait."""


class Gate:
    """The lock of a store that may go away: whoever takes it finds the store there, or gets ``StoreAwayError``.

    Args:
        presence: asked each time.
    """

    def __init__(self, presence: Presence) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._presence = presence
        self._depth = 0
        self._counting = threading.Lock()
        self._waiting = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with self._counting:
                self._waiting += 1
            try:
                self._lock.acquire()
            finally:
                with self._counting:
                    self._waiting -= 1
        if not self._depth and not self._presence.look():
            self._lock.release()
            raise self._presence.error()
        self._depth += 1

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            self._depth -= 1
            if not self._depth and _may_be_the_drive(error):
                reason = self._presence.unreadable()
                if reason:
                    self._presence.lose(reason)
        finally:
            self._lock.release()

    @property
    def waiting(self) -> int:
        """How many wait for it."""
        return self._waiting

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Let others have the lock, which is held, until something is so; they say when they have changed it."""
        while not true():
            depth, self._depth = self._depth, 0
            self._changed.wait()
            self._depth = depth

    def give_way(self) -> None:
        """Let others have the lock first; call it, without the lock, between two steps of work that can wait.

        Python's locks are not fair: whoever takes one again at once, gets it again.
        """
        for _ in range(GIVE_WAY_TURNS):
            if not self._waiting:
                return
            time.sleep(GIVE_WAY_S)

    def while_away(self, function: Callable[[], None]) -> None:
        """Run something under the lock without asking whether the store is there."""
        with self._lock:
            function()

    def settle(self, function: Callable[[], None]) -> None:
        """As :meth:`while_away`, and wake up those in :meth:`wait_for`."""
        with self._lock:
            function()
            self._changed.notify_all()


def _may_be_the_drive(error: BaseException | None) -> bool:
    """Whether it was the disk that failed, and not for want of room or of what was asked for."""
    if isinstance(error, OSError):
        return True
    return type(error) is StoreError and isinstance(error.__cause__, OSError | sqlite3.Error)
