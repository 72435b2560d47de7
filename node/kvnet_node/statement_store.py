"""Statements on disk: a small SQLite file, 0600, that a killed process or a power failure leaves whole.

Every statement is signed, so that nobody gains by changing the file; what the file itself is trusted with are the
sequences, which never go down. With a write-ahead log and ``synchronous=FULL`` a statement is on disk before it is told
on. A damaged file is set aside and a new one begun: members tell what they know again.
"""

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvnet.errors import ConfigError, StoreError
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_book import PlaceKey, Row

_log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
SCOPE_SIZE_BYTES = 32

_SCHEMA = """
CREATE TABLE IF NOT EXISTS statements (
    signer BLOB NOT NULL, kind TEXT NOT NULL, subject BLOB NOT NULL, sequence INTEGER NOT NULL, hash BLOB NOT NULL,
    scopes BLOB NOT NULL, envelope BLOB NOT NULL, PRIMARY KEY (signer, kind, subject)
) STRICT, WITHOUT ROWID
"""
_PUT = "INSERT OR REPLACE INTO statements VALUES (?, ?, ?, ?, ?, ?, ?)"
_REMOVE = "DELETE FROM statements WHERE signer = ? AND kind = ? AND subject = ?"
_ALL = "SELECT signer, kind, subject, sequence, hash, scopes, envelope FROM statements ORDER BY sequence"


class StatementStore:
    """The statements of one data directory; fulfils ``kvnet.exchange.statement_keep.StatementKeep``.

    Args:
        path: the file; made when it is missing.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._database = _opened(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise _unusable(path, error) from error
            aside = path.with_name(path.name + ".damaged")
            _log.warning("%s is damaged and was set aside as %s: %s", path, aside.name, error)
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._database = _opened(path)
        except OSError as error:
            raise _unusable(path, error) from error

    def rows(self) -> list[Row]:
        """Everything written and not removed, in order of the sequences.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            found = self._database.execute(_ALL).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} cannot be read: {error}") from error
        known = {kind.value for kind in StatementType}
        return [
            Row(
                signer=signer,
                kind=kind,
                subject=subject,
                sequence=sequence,
                hash=digest,
                scopes=tuple(scopes[at : at + SCOPE_SIZE_BYTES] for at in range(0, len(scopes), SCOPE_SIZE_BYTES)),
                envelope=envelope,
            )
            for signer, kind, subject, sequence, digest, scopes, envelope in found
            if kind in known
        ]

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove, all or nothing; on disk when it returns.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            with self._database:
                self._database.executemany(_REMOVE, [(signer, kind.value, subject) for signer, kind, subject in gone])
                self._database.executemany(
                    _PUT,
                    [
                        (row.signer, row.kind, row.subject, row.sequence, row.hash, b"".join(row.scopes), row.envelope)
                        for row in rows
                    ],
                )
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._path} cannot be written: {error}",
                hint="make room on the drive; until then statements count as long as the node runs",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _opened(path: Path) -> sqlite3.Connection:
    # Made before SQLite does, so that it, and the log beside it, are the owner's from the first byte.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    path.chmod(0o600)
    database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        with database:
            database.execute(_SCHEMA)
        with closing(database.execute("PRAGMA quick_check")) as checked:
            if (found := checked.fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
    except BaseException:
        database.close()
        raise
    return database


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error}", hint="look at the rights of the file and its directory")
