"""The database under the index: its tables, one open connection, and what its errors mean to a store."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from kvnet.errors import StoreError, StoreFullError
from kvnet.store.osfile import PRIVATE_FILE_MODE

SCHEMA_VERSION: Final = 1
"""An index of another version is made anew."""

_SCHEMA: Final = """
CREATE TABLE packs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    artifact BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL
);
CREATE INDEX packs_by_artifact ON packs (artifact);
CREATE TABLE chunks (
    hash BLOB NOT NULL,
    pack INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    length_bytes INTEGER NOT NULL,
    PRIMARY KEY (hash, pack)
) WITHOUT ROWID;
CREATE INDEX chunks_by_pack ON chunks (pack);
CREATE TABLE artifacts (
    id INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    envelope BLOB NOT NULL,
    pages BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    namespace BLOB NOT NULL,
    token_chunks INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    complete INTEGER NOT NULL DEFAULT 0,
    readable INTEGER NOT NULL DEFAULT 0,
    held_bytes INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    last_used_s REAL NOT NULL
);
CREATE INDEX artifacts_by_model ON artifacts (fingerprint, namespace);
CREATE TABLE refs (
    artifact INTEGER NOT NULL,
    position INTEGER NOT NULL,
    hash BLOB NOT NULL,
    length_bytes INTEGER NOT NULL,
    PRIMARY KEY (artifact, position)
) WITHOUT ROWID;
CREATE INDEX refs_by_hash ON refs (hash);
CREATE TABLE prefixes (
    namespace BLOB NOT NULL,
    key BLOB NOT NULL,
    artifact INTEGER NOT NULL,
    n_blocks INTEGER NOT NULL,
    PRIMARY KEY (namespace, key, artifact)
) WITHOUT ROWID;
CREATE INDEX prefixes_by_artifact ON prefixes (artifact);
"""


class IndexUnreadableError(StoreError):
    """The index is damaged or of another version; the packs can make a new one."""


class Database:
    """One open database. Not safe for threads by itself: the store's lock covers it.

    Args:
        path: the database file; created 0600 when missing.

    Raises:
        IndexUnreadableError: damaged, or of another version.
        StoreError: the disk failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = path.with_name(path.name + "-wal")
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        new = not self._path.exists()
        if new:
            try:
                # SQLite gives its side files the mode of the database.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE))
            except OSError as error:
                raise StoreError(f"the index {self._path} cannot be created: {error.strerror}") from error
        with self._translated():
            # Nobody is waited for: whoever has it open keeps it.
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0.0)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        with self._translated():
            # A log of another moment than the database, as backups and half-copied folders have, leaves pages that
            # are each in order and contradict each other. Where there is a log, more is checked than after a clean end.
            check = "integrity_check(1)" if self.log_bytes() else "quick_check(1)"
            # Nobody else opens it: the data directory is locked. Then SQLite needs no memory-mapped file beside it,
            # whose pages kill the process with SIGBUS when the drive has gone.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            # A checkpoint waits for the medium. It is the store that says when, so that it befalls nobody unasked.
            db.execute("PRAGMA wal_autocheckpoint = 0")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version != SCHEMA_VERSION:
                raise IndexUnreadableError(f"expected an index of version {SCHEMA_VERSION}, found {version}")
            elif db.execute(f"PRAGMA {check}").fetchone()[0] != "ok":
                raise IndexUnreadableError("the index is damaged")

    @classmethod
    def open(cls, path: Path) -> Self:
        """The index at ``path``; a new, empty one when there is none or it cannot be used.

        Raises:
            StoreError: the disk failed.
        """
        try:
            return cls(path)
        except IndexUnreadableError:
            _remove(path)
            return cls(path)

    def start_anew(self) -> None:
        """Throw everything away and start with an empty index.

        Raises:
            StoreError: the disk failed.
        """
        self._db.close()
        _remove(self._path)
        self._db = self._connect()

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def checkpoint(self) -> None:
        """Move what was committed into the database file, and empty the log beside it.

        On a full disk it stays where it is, which is as good: what was committed is read from there.
        """
        with suppress(StoreFullError), self._translated():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def log_bytes(self) -> int:
        """How long the log beside the database file is."""
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def files(self) -> list[Path]:
        """The database and its side files."""
        return _files(self._path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it, or nothing.

        Raises:
            StoreFullError: the disk is full.
            IndexUnreadableError: the database is damaged.
            StoreError: the disk failed.
        """
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise StoreFullError(
                    "there is no room for the index", hint="Make room on the disk, or remove artifacts: `kvnet rm`."
                ) from error
            if code == sqlite3.SQLITE_BUSY:
                # A node whose data directory was removed or exchanged may have found this one at its place.
                raise StoreError(
                    f"expected the index {self._path} to be ours alone, found it open in another process",
                    hint="Stop the other kvnet first: `ps -C kvnet` or the node's terminal shows it.",
                ) from error
            # The last three: tables that contradict each other, or are others than ours.
            if code in {
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
                sqlite3.SQLITE_CONSTRAINT,
                sqlite3.SQLITE_MISMATCH,
                sqlite3.SQLITE_ERROR,
            }:
                raise IndexUnreadableError("the index is damaged", hint="Run `kvnet store rebuild`.") from error
            raise StoreError(f"the index failed: {error}", hint="Run `kvnet store rebuild`.") from error

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._translated():
            return self._db.execute(query, parameters).fetchall()

    def _row(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        rows = self._rows(query, parameters)
        return rows[0] if rows else None


def _files(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


def _remove(path: Path) -> None:
    try:
        for file in _files(path):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"the index {path} cannot be removed: {error.strerror}") from error
