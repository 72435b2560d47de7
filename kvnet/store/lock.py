"""One process per data directory: an advisory lock, and beside it who holds it.

The lock is ``flock(2)`` on ``lock``: the system lets go of it when its process ends, however that happens, so a lock
file that was left behind means nothing. ``owner.json`` is only for people and for finding the control socket.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec

from kvnet.errors import DataDirLockedError, StoreError, StoreFullError
from kvnet.store.failures import storage_errors
from kvnet.store.osfile import PRIVATE_FILE_MODE, OsFiles

LOCK_NAME: Final = "lock"
OWNER_NAME: Final = "owner.json"
MAX_OWNER_BYTES: Final = 8192


class LockOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who holds a data directory.

    Attributes:
        pid: its process id.
        control_socket: path of its control socket; "" while it has none.
        verb: the command at work, such as "add"; "" when it is a node, or not known.
    """

    pid: int
    control_socket: str = ""
    verb: str = ""


class DataDirLock:
    """The lock of one data directory. Not for sharing between threads.

    Args:
        directory: the data directory; created 0700 by :meth:`acquire` when missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handle: int | None = None
        self._files = OsFiles()

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._handle is not None

    def acquire(self, verb: str = "") -> None:
        """Take the lock, without waiting.

        Args:
            verb: the command that takes it, for whoever has to wait.

        Raises:
            DataDirLockedError: another process, or another lock object of this one, holds it; names the owner.
            StoreError: the lock file cannot be opened or written.
        """
        if self._handle is not None:
            return
        try:
            self._files.make_directory(self._directory)
            path = self._directory / LOCK_NAME
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE_MODE)
        except OSError as error:
            raise StoreError(
                f"the lock in {self._directory} cannot be opened: {error.strerror}",
                hint="Name another directory with --data-dir or KVNET_DATA_DIR.",
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                raise self._locked() from None
            raise StoreError(
                f"the lock in {self._directory} cannot be taken: {error.strerror}",
                hint="Some network drives know no locks: name a folder on a disk of this machine with --data-dir; "
                "`store` in it may be a link to another drive.",
            ) from error
        self._handle = handle
        try:
            with storage_errors(f"recording the owner of {self._directory}"):
                self._record(LockOwner(os.getpid(), verb=verb))
        except StoreFullError:
            # It is only for people, and whoever wants to make room on a full disk needs the lock.
            self._forget_owner()
        except BaseException:
            self.release()
            raise

    def record_control_socket(self, path: Path | str) -> None:
        """Let others find the control socket of the process that holds this lock.

        Raises:
            StoreFullError: there is no room for the record.
            StoreError: this object does not hold the lock, or the record cannot be written.
        """
        if self._handle is None:
            raise StoreError(f"expected to hold the lock of {self._directory} before a control socket is recorded")
        with storage_errors(f"recording the owner of {self._directory}"):
            self._record(LockOwner(os.getpid(), str(path)))

    def owner(self) -> LockOwner | None:
        """Who holds the lock, as far as is known; ``None`` when nobody does, or a process that has ended did.

        A process id may have been given to another process since: whoever asks it must expect no answer.
        """
        try:
            handle = self._files.open_for_reading(self._directory / OWNER_NAME)
        except OSError:
            return None
        try:
            data = self._files.read(handle, MAX_OWNER_BYTES, 0)
        finally:
            self._files.close(handle)
        try:
            owner = msgspec.json.decode(data, type=LockOwner)
        except (msgspec.DecodeError, RecursionError):
            return None
        return owner if _is_alive(owner.pid) else None

    def release(self) -> None:
        """Let go of the lock; nothing when it is not held."""
        if self._handle is None:
            return
        # The record first: between the two the lock is held by somebody unknown, never free with an owner's name.
        self._forget_owner()
        os.close(self._handle)
        self._handle = None

    def _forget_owner(self) -> None:
        with contextlib.suppress(OSError):
            self._files.unlink(self._directory / OWNER_NAME)

    def _record(self, owner: LockOwner) -> None:
        temporary = self._directory / f".{OWNER_NAME}.tmp"
        self._files.unlink(temporary)
        self._files.write_whole(self._directory / OWNER_NAME, msgspec.json.encode(owner), temporary)

    def _locked(self) -> DataDirLockedError:
        owner = self.owner()
        if owner is None:
            return DataDirLockedError(
                f"another process owns the data directory {self._directory}",
                hint="Wait for it to end, or use another directory with --data-dir.",
            )
        if owner.control_socket:
            step = "It is a node: stop it with `kvnet node stop`, or use another directory with --data-dir"
        elif owner.verb:
            step = f"It is the command {owner.verb} at work: wait for it"
        else:
            step = "It is a kvnet command at work, or a node that starts: wait for it"
        return DataDirLockedError(
            f"process {owner.pid} owns the data directory {self._directory}",
            hint=f"{step}; ps -p {owner.pid} shows it.",
        )


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
