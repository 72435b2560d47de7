"""What was announced when, kept over restarts: a small SQLite file beside the store.

It holds keyed names, which mean nothing without the lookup secret, and times. Losing it costs one round of announcing
in another order, so nothing here raises and nothing waits for the medium.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from kvnet.exchange.announcer import KeptKey

_log = logging.getLogger(__name__)

MAX_KEYS = 100_000
"""Rows read at most; far more than the pace could ever announce."""
BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS announced (
    key BLOB PRIMARY KEY, position INTEGER NOT NULL, uses INTEGER NOT NULL, announced_s REAL
) STRICT, WITHOUT ROWID;
"""


class AnnounceStore:
    """The table of one data directory.

    Args:
        file: the database; created 0600 when something is kept.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> list[KeptKey]:
        """Everything kept, the newest first; nothing when the file cannot be read."""
        if not self._file.exists():
            return []
        try:
            with self._opened() as database:
                rows = database.execute(
                    "SELECT key, position, uses, announced_s FROM announced ORDER BY position DESC LIMIT ?", [MAX_KEYS]
                ).fetchall()
        except (sqlite3.Error, OSError) as error:
            _log.warning("what was announced could not be read: %s", error)
            return []
        return [KeptKey(bytes(key), position, uses, announced_s) for key, position, uses, announced_s in rows]

    def save(self, changed: Sequence[KeptKey], removed: Sequence[bytes]) -> None:
        """Keep some, and keep others no longer."""
        try:
            with self._opened() as database:
                database.executemany("DELETE FROM announced WHERE key = ?", [[key] for key in removed])
                database.executemany(
                    "INSERT INTO announced VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                    "position = excluded.position, uses = excluded.uses, announced_s = excluded.announced_s",
                    [[each.key, each.order, each.uses, each.announced_s] for each in changed],
                )
        except (sqlite3.Error, OSError) as error:
            _log.warning("what was announced could not be kept: %s", error)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(open_private(self._file, _SCHEMA)) as database, database:
            yield database


def open_private(file: Path, schema: str) -> sqlite3.Connection:
    """A database that its owner alone can read; one that is damaged is set aside and begun anew.

    Raises:
        sqlite3.Error, OSError: it can be neither read nor made.
    """
    try:
        return _open(file, schema)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        _log.warning("%s is damaged and begun anew: %s", file.name, error)
        for suffix in ("-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
        file.replace(file.with_name(file.name + ".damaged"))
        return _open(file, schema)


def _open(file: Path, schema: str) -> sqlite3.Connection:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    database = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(schema)
    except BaseException:
        database.close()
        raise
    return database
