"""What may be written today outlives a restart, and a broken file of it costs nothing."""

import stat
from pathlib import Path

import pytest

from kvnet_node.writes import Writes

NOON_S = 1_900_000_000.0


def test_what_was_written_is_known_after_a_restart_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "writes.json"
    writes = Writes(file, 1000, lambda: NOON_S)
    writes.fetched(300)
    writes.named(40)
    again = Writes(file, 1000, lambda: NOON_S).state()
    assert (again.left_bytes, again.fetched_bytes, again.named_bytes) == (700, 300, 40)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"[]", b'{"left_bytes": 1e999, "as_of_s": 0}', b'{"left_bytes":', b"\xff"])
def test_a_broken_file_counts_as_a_full_bucket(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "writes.json"
    file.write_bytes(content)
    assert Writes(file, 1000, lambda: NOON_S).state().left_bytes == 1000


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    file = tmp_path / "writes.json"
    file.mkdir()
    writes = Writes(file, 1000, lambda: NOON_S)
    writes.fetched(300)
    assert writes.state().left_bytes == 700
