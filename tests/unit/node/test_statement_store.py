"""Statements on disk: they survive, sequences too, and a damaged file is no end."""

import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest

from kvnet.errors import ConfigError, StoreError
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_book import Row
from kvnet_node.statement_store import StatementStore


def row(number: int, *, sequence: int = 1, envelope: bytes = b"signed") -> Row:
    return Row(
        signer=bytes([number]) * 32,
        kind="revocation",
        subject=b"artifact " + bytes([number]) * 32,
        sequence=sequence,
        hash=bytes([number, sequence]) * 16,
        scopes=(b"m" * 32, b"s" * 32),
        envelope=envelope,
    )


def key(of: Row) -> tuple[bytes, StatementType, bytes]:
    return of.signer, StatementType(of.kind), of.subject


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    first = StatementStore(tmp_path / "statements.sqlite3")
    first.write([row(1, sequence=5), row(2, sequence=3)], [])
    # Not closed: a killed process closes nothing.
    assert StatementStore(tmp_path / "statements.sqlite3").rows() == [row(2, sequence=3), row(1, sequence=5)]
    first.close()


def test_a_place_is_written_over_and_removed(tmp_path: Path) -> None:
    store = StatementStore(tmp_path / "statements.sqlite3")
    store.write([row(1), row(2)], [])
    expired = msgspec.structs.replace(row(1, sequence=9), envelope=b"")
    store.write([expired], [key(row(2))])
    assert store.rows() == [expired]
    store.close()


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "network" / "statements.sqlite3"
    store = StatementStore(path)
    store.write([row(1)], [])
    modes = {found.name: stat.S_IMODE(found.stat().st_mode) for found in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    store.close()


def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    path.write_bytes(b"this is no database" * 500)
    store = StatementStore(path)
    assert store.rows() == []
    store.write([row(1)], [])
    assert store.rows() == [row(1)]
    assert path.with_name("statements.sqlite3.damaged").read_bytes().startswith(b"this is no")
    store.close()


def test_rows_of_a_type_that_a_later_version_knows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    store = StatementStore(path)
    store.write([row(1), msgspec.structs.replace(row(2), kind="from-the-future")], [])
    assert store.rows() == [row(1)]
    store.close()


def test_a_drive_that_is_full_is_a_store_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    store = StatementStore(path)
    store.write([row(1)], [])
    store._database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match="cannot be written"):
        store.write([row(number, envelope=bytes(20_000)) for number in range(2, 60)], [key(row(1))])
    store.close()
    again = StatementStore(path)
    assert again.rows() == [row(1)]
    again.close()


def test_a_file_that_may_not_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "statements.sqlite3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        StatementStore(tmp_path / "statements.sqlite3")


def test_reading_a_closed_store_is_a_store_error(tmp_path: Path) -> None:
    store = StatementStore(tmp_path / "statements.sqlite3")
    store.close()
    with pytest.raises(StoreError, match="cannot be read"):
        store.rows()


def test_a_locked_file_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet_node.statement_store.BUSY_TIMEOUT_S", 0.0)
    path = tmp_path / "statements.sqlite3"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="cannot be used"):
        StatementStore(path)
    other.close()
