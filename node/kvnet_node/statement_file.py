"""One SQLite file of statements: opened, checked, read and written; what is wrong with it is said in one word."""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_places import PlaceKey, Row

BUSY_TIMEOUT_S: Final = 5.0
SCOPE_SIZE_BYTES: Final = 32

_SCHEMA = """
CREATE TABLE IF NOT EXISTS statements (
    signer BLOB NOT NULL, kind TEXT NOT NULL, subject BLOB NOT NULL, sequence INTEGER NOT NULL, hash BLOB NOT NULL,
    scopes BLOB NOT NULL, envelope BLOB NOT NULL, PRIMARY KEY (signer, kind, subject)
) STRICT, WITHOUT ROWID
"""
_PUT = "INSERT OR REPLACE INTO statements VALUES (?, ?, ?, ?, ?, ?, ?)"
_REMOVE = "DELETE FROM statements WHERE signer = ? AND kind = ? AND subject = ?"
_ALL = "SELECT signer, kind, subject, sequence, hash, scopes, envelope FROM statements ORDER BY sequence"


class DamagedError(Exception):
    """The file is there, and is not what was written."""


class StatementFile:
    """An open file. Every place is a row of its own.

    Args:
        path: the file; made, 0600, when it is missing.

    Raises:
        DamagedError: it is not what was written.
        sqlite3.OperationalError: it cannot be used: locked, or on a drive that cannot be written.
        OSError: the same, said by the system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Made before SQLite does, so that it, and the log beside it, are the owner's from the first byte.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
        self.database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            self._prepare()
            self.rows()
        except BaseException as error:
            self.database.close()
            if _says_damage(error):
                raise DamagedError(str(error)) from error
            raise

    def _prepare(self) -> None:
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("PRAGMA synchronous = FULL")
        with self.database:
            self.database.execute(_SCHEMA)
        with closing(self.database.execute("PRAGMA integrity_check")) as checked:
            if (found := checked.fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)

    def rows(self) -> list[Row]:
        """Everything written and not removed, in order of the sequences; types of later versions are left out."""
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
            for signer, kind, subject, sequence, digest, scopes, envelope in self.database.execute(_ALL)
            if kind in known
        ]

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove, all or nothing; on disk when it returns."""
        with self.database:
            self.database.executemany(_REMOVE, [(signer, kind.value, subject) for signer, kind, subject in gone])
            self.database.executemany(
                _PUT,
                [
                    (row.signer, row.kind, row.subject, row.sequence, row.hash, b"".join(row.scopes), row.envelope)
                    for row in rows
                ],
            )

    def close(self) -> None:
        """Close the file."""
        self.database.close()


def _says_damage(error: BaseException) -> bool:
    """Whether the content is wrong, or the drive, or another process in the way."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError)
    # Text that is no UTF-8 (without a code) and a table of another shape are called operational as well.
    return getattr(error, "sqlite_errorcode", None) in {None, sqlite3.SQLITE_ERROR}
