"""A repository that is added, edited and added again; and an engine that dies in the middle of a request."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvnet]:
    """A running node with one tiny model of a long window; its engine stays loaded."""
    window = {**tinymodels.LLAMA, "max_position_embeddings": 32_768}
    model = tinymodels.write_model(tmp_path_factory.mktemp("models") / "tiny-long", window)
    runner = Kvnet(tmp_path_factory.mktemp("node") / "data")
    runner.environment["KVNET_MODEL_PATHS"] = str(model)
    runner.start()
    yield runner
    runner.end()


def git(folder: Path, *arguments: str) -> None:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org",
    }  # fmt: skip
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, env=environment, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Thirty files of equal size; ``file_03.py`` changes most often. And things nobody wants in a prompt."""
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for number in range(30):
        (folder / f"file_{number:02}.py").write_text(f"number = {number}\n" + "text = 'some more'\n" * 8)
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / ".env").write_text("PASSWORD=1234\n")
    commit(folder)
    for number in range(3):
        with (folder / "file_03.py").open("a") as file:
            file.write(f"change = {number}\n")
        commit(folder)
    return folder


def test_editing_the_most_often_changed_of_thirty_files_prefills_at_most_a_quarter_again(
    node: Kvnet, repository: Path
) -> None:
    (repository / "untracked.txt").write_text("not part of it\n")
    first = node.json("add", str(repository), "--name", "work")
    assert (first["files"], first["prefilled_tokens"]) == (30, first["tokens"])
    assert {each["path"] for each in first["skipped"]} == {"logo.png", ".env"}
    assert all(each["reason"] for each in first["skipped"])
    with (repository / "file_03.py").open("a") as file:
        file.write("edited = True\n")
    second = node.json("add", str(repository), "--name", "work")
    assert second["version"] == 2
    assert 0 < second["prefilled_tokens"] <= 0.25 * second["tokens"]
    assert second["reused_tokens"] + second["prefilled_tokens"] == second["tokens"]
    assert second["new_bytes"] < 0.35 * second["bytes"]
    # Committing again makes another file the most often changed: the order stays as it was for the name.
    for number in range(6):
        (repository / "file_07.py").write_text(f"number = {number}\n" + "text = 'some more'\n" * 8)
        commit(repository)
    (repository / "file_07.py").write_text("number = 7\n" + "text = 'some more'\n" * 8)
    (repository / "new.py").write_text("new = True\n")
    commit(repository)
    third = node.json("add", str(repository), "--name", "work")
    assert third["files"] == 32
    assert third["prefilled_tokens"] < 400
    other = node.json("add", str(repository), "--name", "other", "--dry-run")
    assert other["tokens"] == third["tokens"]
    assert other["reused_tokens"] < third["tokens"] / 2
    question = ("ask", "work", "What is edited?", "--max-tokens", "6")
    warm, cold = node.json(*question), node.json(*question, "--no-reuse")
    assert (warm["text"], warm["reused_tokens"]) == (cold["text"], third["tokens"])


def test_what_was_skipped_and_how_long_it_will_take_is_said_before_the_work_starts(
    node: Kvnet, repository: Path
) -> None:
    ran = node("add", str(repository), "--name", "said", "--dry-run")
    assert ran.code == 0
    assert re.search(r"logo\.png: binary", ran.stderr)
    assert re.search(r"\.env: likely secret", ran.stderr)
    assert "PASSWORD" not in ran.stderr + ran.stdout
    assert re.search(r"[\d,]+ tokens of 30 files, .* of K/V, .*prefill", ran.stdout)
    assert "of K/V" not in ran.stderr


def engine_pid(node_pid: int) -> int:
    """The engine process of a node."""
    (pid,) = {pid for pid, parent, command in processes() if parent == node_pid and "kvnet.engine" in command}
    return pid


def processes() -> Iterator[tuple[int, int, str]]:
    """Process id, parent and command of every process; a small Linux has no ``ps``, macOS no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            pid, parent, command = line.split(None, 2)
            yield int(pid), int(parent), command
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            yield int(folder.name), int(parent), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_an_engine_killed_in_the_middle_costs_its_own_request_only(node: Kvnet, tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("kept whatever happens\n" * 20)
    added = node.json("add", str(file), "--name", "kept")
    status = node.json("status")
    question = ("ask", "kept", "What is kept?", "--max-tokens", "6")
    before = node.json(*question)
    doomed = node.popen("--json", "generate", "--prompt=go on and on", "--max-tokens", "20000")
    assert doomed.stdout is not None
    assert doomed.stderr is not None
    assert doomed.stdout.readline()
    os.kill(engine_pid(status["pid"]), signal.SIGKILL)
    doomed.stdout.read()
    assert doomed.wait(timeout=TIMEOUT_S) == 80
    assert '"engine_crashed"' in doomed.stderr.read()
    after = node.json(*question)
    assert (after["text"], after["reused_tokens"]) == (before["text"], added["tokens"])
    assert node.json("status")["pid"] == status["pid"]
    assert node.json("verify")["bad_chunks"] == []
