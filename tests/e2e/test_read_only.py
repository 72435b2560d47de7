"""A data directory that cannot be written to is looked at all the same, and nothing in it changes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Kvnet, files_of
from tests.e2e.test_shared_names import added

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]


@pytest.fixture
def read_only(kvnet: Kvnet) -> Iterator[Kvnet]:
    """Holds an artifact named project, and cannot be written to: by its modes, or for root by a mount."""
    added(kvnet, "project")
    kvnet.json("list")
    folder = kvnet.data_dir
    if os.geteuid() == 0:
        at = str(folder)
        if subprocess.run(["mount", "--bind", at, at], check=False, capture_output=True).returncode:
            pytest.skip("root writes whatever the modes say, and may not mount here")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
            yield kvnet
        finally:
            subprocess.run(["umount", at], check=True)
        return
    _chmod(folder, 0o500, 0o400)
    yield kvnet
    _chmod(folder, 0o700, 0o600)


def _chmod(folder: Path, of_folders: int, of_files: int) -> None:
    folder.chmod(0o700)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(of_folders if path.is_dir() else of_files)
    folder.chmod(of_folders)


def test_what_only_looks_works_on_a_read_only_directory(read_only: Kvnet) -> None:
    before = files_of(read_only.data_dir)
    status = read_only.json("status")
    assert (status["data_dir"], status["artifacts"], status["running"]) == (str(read_only.data_dir), 1, False)
    assert [each["names"] for each in read_only.json("list")["artifacts"]] == [["project@1"]]
    assert read_only.json("show", "project")["held_chunks"] > 0
    assert read_only.json("key", "show")["publisher"] == status["publisher"]
    assert "a running node" in read_only("explain").stderr
    assert files_of(read_only.data_dir) == before


@pytest.mark.parametrize("arguments", [("rm", "project"), ("gc",), ("node", "start"), ("peers",)])
def test_what_writes_says_that_it_cannot_and_what_can(read_only: Kvnet, arguments: tuple[str, ...]) -> None:
    ran = read_only(*arguments)
    assert (ran.code, ran.stdout) == (2, "")
    assert f"found {read_only.data_dir} read-only for this user" in ran.stderr
    assert read_only.typed("list, show and status read it all the same") in ran.stderr
