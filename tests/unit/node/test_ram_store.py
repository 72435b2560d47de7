"""A place in RAM for the store: private, bounded, gone afterwards, and never somebody else's."""

import stat
from pathlib import Path

import pytest

from kvnet.errors import ConfigError
from kvnet_node.ram_store import (
    machine_ram_bytes,
    ram_directory,
    ram_directory_of,
    ram_quota_bytes,
    remove_left_behind,
)

DATA_DIR = Path("/somewhere/data")


def test_it_is_empty_private_and_gone_afterwards(tmp_path: Path) -> None:
    with ram_directory(DATA_DIR, tmp_path) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.parent == tmp_path
        (directory / "store").mkdir()
        (directory / "store" / "pack").write_bytes(b"secret")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_node_left_is_gone_before_the_next_one_begins(tmp_path: Path) -> None:
    left = ram_directory_of(DATA_DIR, tmp_path)
    left.mkdir()
    (left / "pack").write_bytes(b"secret")
    with ram_directory(DATA_DIR, tmp_path) as directory:
        assert directory == left
        assert list(directory.iterdir()) == []
    left.mkdir()
    assert remove_left_behind(DATA_DIR, tmp_path)
    assert not remove_left_behind(DATA_DIR, tmp_path)


def test_two_data_directories_never_share_one(tmp_path: Path) -> None:
    with ram_directory(DATA_DIR, tmp_path) as one, ram_directory(tmp_path / "other", tmp_path) as two:
        assert one != two


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_file_that_somebody_put_there_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("work of years")
    base = tmp_path / "shm"
    base.mkdir()
    place = ram_directory_of(DATA_DIR, base)
    if kind == "link":
        place.symlink_to(precious)
    else:
        place.write_text("here")
    with pytest.raises(ConfigError, match="found something else"), ram_directory(DATA_DIR, base):
        raise AssertionError("it was used")
    assert (precious / "thesis").exists()
    assert place.is_symlink() or place.is_file()


def test_a_system_without_such_a_place_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, ram_directory(DATA_DIR, tmp_path / "none"):
        raise AssertionError("it was used")
    assert "store.write_budget_bytes_day = 0" in caught.value.hint


def test_it_never_takes_more_than_asked_for_a_share_of_ram_or_half_of_what_is_free() -> None:
    assert ram_quota_bytes(10, ram_bytes=1000, free_bytes=1000) == 10
    assert ram_quota_bytes(10_000, ram_bytes=1000, free_bytes=1000) == 250
    assert ram_quota_bytes(10_000, ram_bytes=1000, free_bytes=300) == 150
    assert machine_ram_bytes() > 1 << 28
