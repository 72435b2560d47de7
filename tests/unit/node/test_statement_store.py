"""Statements on disk: they survive, sequences too, and a damaged file is no end."""

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kvnet.errors import ConfigError, StoreError
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_places import PlaceKey, Row
from kvnet_node.statement_store import StatementStore, copy_of


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


def key(of: Row) -> PlaceKey:
    return PlaceKey(of.signer, StatementType(of.kind), of.subject)


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


GARBAGE = b"this is no database" * 500


def spoil_sequences(path: Path) -> None:
    """Bytes in the middle of the file that SQLite opens without a word and cannot read."""
    data = bytearray(path.read_bytes())
    data[4096:4196] = bytes(100)
    path.write_bytes(data)


def closed_with(path: Path, *rows: Row) -> None:
    store = StatementStore(path)
    store.write(rows, [])
    store.close()


@pytest.mark.parametrize("which", [0, 1], ids=["first", "copy"])
@pytest.mark.parametrize(
    "spoil",
    [lambda path: path.write_bytes(GARBAGE), spoil_sequences, lambda path: path.write_bytes(b""), Path.unlink],
    ids=["garbage", "a bad page", "cut to nothing", "gone"],
)
def test_damaged_file_is_made_anew_from_the_other_and_no_sequence_goes_down(
    tmp_path: Path, spoil: Callable[[Path], object], which: int
) -> None:
    path = tmp_path / "statements.sqlite3"
    rows = [row(1, sequence=5), row(2, sequence=7)]
    closed_with(path, *rows)
    spoil((path, copy_of(path))[which])
    store = StatementStore(path)
    assert store.rows() == rows
    store.write([row(3, sequence=9)], [])
    store.close()
    # The other one is whole again as well: now that one may be lost.
    spoil((copy_of(path), path)[which])
    again = StatementStore(path)
    assert again.rows() == [*rows, row(3, sequence=9)]
    again.close()


def test_of_two_files_the_higher_sequence_counts_whichever_was_written_last(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    closed_with(path, row(1, sequence=5))
    early = path.read_bytes()
    closed_with(path, row(1, sequence=6), row(2, sequence=7))
    path.write_bytes(early)
    store = StatementStore(path)
    assert store.rows() == [row(1, sequence=6), row(2, sequence=7)]
    store.close()


def test_damaged_file_is_kept_to_look_at(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    closed_with(path, row(1))
    path.write_bytes(GARBAGE)
    StatementStore(path).close()
    assert path.with_name("statements.sqlite3.damaged").read_bytes() == GARBAGE


@pytest.mark.parametrize("copy_is", ["damaged", "missing"])
def test_two_damaged_files_are_an_error_that_begins_nothing_anew(tmp_path: Path, copy_is: str) -> None:
    path = tmp_path / "statements.sqlite3"
    closed_with(path, row(1))
    path.write_bytes(GARBAGE)
    if copy_is == "damaged":
        copy_of(path).write_bytes(GARBAGE)
    else:
        copy_of(path).unlink()
    # Nor the second time: an empty file made by the first would be taken for what was heard.
    for _ in range(2):
        with pytest.raises(ConfigError, match="both damaged or missing") as caught:
            StatementStore(path)
    assert "old statements as new" in caught.value.hint
    assert path.read_bytes() == GARBAGE


def test_text_that_is_no_text_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    closed_with(path, row(1))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE statements SET kind = CAST(x'ff' AS TEXT)")
    store = StatementStore(path)
    assert store.rows() == [row(1)]
    store.close()


def test_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "network").write_bytes(b"in the way")
    with pytest.raises(ConfigError, match="cannot be") as caught:
        StatementStore(tmp_path / "network" / "statements.sqlite3")
    assert "whether the drive can be written" in caught.value.hint


def test_damaged_file_that_cannot_be_set_aside_is_a_configuration_error(tmp_path: Path) -> None:
    path = tmp_path / "statements.sqlite3"
    closed_with(path, row(1))
    path.write_bytes(GARBAGE)
    (tmp_path / "statements.sqlite3.damaged").mkdir()
    with pytest.raises(ConfigError, match="cannot be"):
        StatementStore(path)
    assert path.read_bytes() == GARBAGE


def test_drive_that_can_only_be_read_is_a_store_error_with_the_next_step(tmp_path: Path) -> None:
    store = StatementStore(tmp_path / "statements.sqlite3")
    store._files[1].database.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="cannot be") as caught:
        store.write([row(1)], [])
    assert "can be written" in caught.value.hint
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
    for file in store._files:
        file.database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match="cannot be"):
        store.write([row(number, envelope=bytes(20_000)) for number in range(2, 60)], [key(row(1))])
    store.close()
    again = StatementStore(path)
    assert again.rows() == [row(1)]
    again.close()


def test_a_file_that_may_not_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "statements.sqlite3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be"):
        StatementStore(tmp_path / "statements.sqlite3")


def test_reading_a_closed_store_is_a_store_error(tmp_path: Path) -> None:
    store = StatementStore(tmp_path / "statements.sqlite3")
    store.close()
    with pytest.raises(StoreError, match="cannot be"):
        store.rows()


def test_a_locked_file_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet_node.statement_file.BUSY_TIMEOUT_S", 0.0)
    path = tmp_path / "statements.sqlite3"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="cannot be"):
        StatementStore(path)
    other.close()
