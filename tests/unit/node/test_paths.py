import errno
import os
import stat
from pathlib import Path

import pytest

from kvnet.errors import ConfigError, StoreError
from kvnet_node.paths import (
    default_cache_dir,
    default_data_dir,
    keep_private,
    note_private,
    prepare_data_dir,
    remove_temporaries,
    write_private,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_data_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    paths = prepare_data_dir(tmp_path / "new" / "data")
    assert mode_of(paths.data_dir) == 0o700


def test_an_open_data_directory_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir(mode=0o755)
    prepare_data_dir(directory)
    assert mode_of(directory) == 0o700


def test_a_directory_of_something_else_is_neither_closed_to_others_nor_filled(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "Documents").mkdir(parents=True)
    home.chmod(0o755)
    with pytest.raises(ConfigError, match="'Documents' in it"):
        prepare_data_dir(home)
    assert mode_of(home) == 0o755


def test_a_directory_that_was_made_ready_or_restored_is_taken(tmp_path: Path) -> None:
    for name, inside in (("ready", "models/tiny"), ("restored", "keys/publisher-0001.key")):
        directory = tmp_path / name
        (directory / inside).mkdir(parents=True)
        (directory / "config.toml").touch()
        if name == "restored":
            (directory / "notes.txt").touch()
        directory.chmod(0o755)
        prepare_data_dir(directory)
        assert mode_of(directory) == 0o700


def test_a_file_where_the_data_directory_should_be_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be used"):
        prepare_data_dir(file)


def test_the_environment_chooses_the_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVNET_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("KVNET_CACHE_DIR", str(tmp_path / "cache"))
    assert default_data_dir() == tmp_path / "data"
    assert default_cache_dir() == tmp_path / "cache"


def test_without_the_environment_the_platform_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVNET_DATA_DIR", raising=False)
    assert default_data_dir().name == "kvnet"


def test_private_files_are_never_readable_by_others(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        write_private(tmp_path / "keys" / "secret", b"x")
    finally:
        os.umask(previous)
    assert mode_of(tmp_path / "keys" / "secret") == 0o600
    assert mode_of(tmp_path / "keys") == 0o700


def test_a_private_file_is_replaced_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    write_private(file, b"one")
    write_private(file, b"two")
    assert file.read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_private_file_that_may_not_be_replaced_stays(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    write_private(file, b"one", replace=False)
    with pytest.raises(FileExistsError):
        write_private(file, b"two", replace=False)
    assert file.read_bytes() == b"one"


def test_a_private_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "link", b"secret", replace=False)
    assert not target.exists()


def test_what_cannot_be_written_is_said_and_what_need_not_be_is_passed_over(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_bytes(b"no directory")
    with pytest.raises(StoreError, match="cannot be"):
        keep_private(taken / "file", b"data")
    note_private(taken / "file", b"data")
    note_private(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_a_new_private_file_has_no_name_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", killed)
    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "secret", b"x", replace=False)
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_links_a_new_private_file_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write_private(tmp_path / "secret", b"x", replace=False)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "secret", b"y", replace=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("secret", b"x")]


def test_what_a_killed_process_was_writing_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    paths = prepare_data_dir(tmp_path)
    write_private(paths.keys_dir / "publisher-0001.key", b"x")
    left = [tmp_path / ".speeds.json.7.tmp", paths.keys_dir / ".publisher-0002.key.7.tmp"]
    for path in left:
        path.write_bytes(b"half")
    (tmp_path / "mine.tmp").write_bytes(b"a person's")
    remove_temporaries(paths)
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"publisher-0001.key", "mine.tmp"}
