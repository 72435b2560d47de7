"""Statements on disk: two small SQLite files, 0600, that a killed process or a power failure leaves whole.

Every statement is signed, so that nobody gains by changing a file; what the files themselves are trusted with are the
sequences, which never go down: whoever has forgotten what was revoked can be shown what was said before. So there is a
copy, written right after the first one, and each mends the other when the node starts. With both damaged it does not
start, and says so: to begin anew is for people to decide.

With a write-ahead log and ``synchronous=FULL`` a statement is on disk before it is told on.
"""

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvnet.errors import ConfigError, StoreError
from kvnet.trust.statement_places import PlaceKey, Row
from kvnet_node.statement_file import DamagedError, StatementFile

_log = logging.getLogger(__name__)


class StatementStore:
    """The statements of one data directory; fulfils ``kvnet.exchange.statement_keep.StatementKeep``.

    Args:
        path: of the first file; the copy is beside it. Made when they are missing.

    Raises:
        ConfigError: they cannot be used, or both are damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: list[StatementFile] = []
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open([path, copy_of(path)])
            self._mend()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | sqlite3.Error | DamagedError):
                raise _unusable(path, error) from error
            raise

    def _open(self, paths: Sequence[Path]) -> None:
        """Open both; one that is missing or damaged is begun anew, if there is another to fill it from."""
        there = [path for path in paths if path.exists()]
        damaged: list[str] = []
        for path in there:
            try:
                self._files.append(StatementFile(path))
            except DamagedError as error:
                damaged.append(f"{path}: {error}")
        if there and not self._files:
            raise _all_damaged(paths, damaged)
        for path in paths:
            if path not in {file.path for file in self._files}:
                if path in there:
                    _log.warning("%s is damaged and is made anew from its copy: %s", path, "; ".join(damaged))
                    _set_aside(path)
                self._files.append(StatementFile(path))

    def _mend(self) -> None:
        """Have in each what is in any: of one place the row with the highest sequence."""
        found = [file.rows() for file in self._files]
        latest: dict[tuple[bytes, str, bytes], Row] = {}
        for row in (row for rows in found for row in rows):
            known = latest.get(_place(row))
            if known is None or row.sequence > known.sequence:
                latest[_place(row)] = row
        for file, rows in zip(self._files, found, strict=True):
            here = {_place(row): row.sequence for row in rows}
            missing = [row for row in latest.values() if here.get(_place(row), -1) < row.sequence]
            if missing:
                file.write(missing, [])

    def rows(self) -> list[Row]:
        """Everything written and not removed, in order of the sequences.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return self._files[0].rows()
        except sqlite3.Error as error:
            raise StoreError(
                f"expected to read {self._path}, found that it cannot be: {error}",
                hint="start the node again: it looks whether the file is damaged, and mends it from its copy",
            ) from error

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove, all or nothing in each file; on disk when it returns.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            for file in self._files:
                file.write(rows, gone)
        except sqlite3.Error as error:
            raise StoreError(
                f"expected to write {self._path}, found that it cannot be: {error}",
                hint="make room on the drive, and see that it can be written; until then statements count as long as "
                "the node runs",
            ) from error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def copy_of(path: Path) -> Path:
    """Where the copy of a file of statements is."""
    return path.with_name(f"{path.stem}-copy{path.suffix}")


def _place(row: Row) -> tuple[bytes, str, bytes]:
    return row.signer, row.kind, row.subject


def _set_aside(path: Path) -> None:
    path.replace(path.with_name(path.name + ".damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _all_damaged(paths: Iterable[Path], reasons: Iterable[str]) -> ConfigError:
    first, second = paths
    return ConfigError(
        f"expected what this node has heard of revocations and members in {first} or its copy {second.name}, "
        f"found both damaged or missing ({'; '.join(reasons)})",
        hint="take both back from a backup; or move both away and connect to a member you trust first: until members "
        "have told this node everything again, it can be shown old statements as new",
    )


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"expected to use {path} and its copy, found that they cannot be: {error}",
        hint="look at the rights of the file and its directory, and whether the drive can be written; "
        "`--data-dir` uses another directory",
    )
