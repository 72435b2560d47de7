"""The installed ``kvnet`` command, run as a person runs it: in processes of its own, on directories of its own."""

import json
import os
import select
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvnet_node.control_client import call_running_node
from kvnet_node.operations.registry import OPERATIONS

TIMEOUT_S = 300.0
"""After so long something hangs; nothing here depends on how fast the machine is."""
POLL_S = 0.05
END_S = 60.0


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of stdout, as JSON."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        """The last line of stdout, as JSON."""
        assert self.code == 0, self.stderr
        return self.lines[-1]

    @property
    def error(self) -> dict[str, Any]:
        """The last line of stderr, as JSON."""
        record: dict[str, Any] = json.loads(self.stderr.splitlines()[-1])
        return record


class Kvnet:
    """The command on one data directory; ``prefix`` is what runs it, such as ``ip netns exec``."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.command = Path(sysconfig.get_path("scripts"), "kvnet")
        home = data_dir.parent / "home"
        home.mkdir(exist_ok=True)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("KVNET_")} | {
            # No model of the person who runs the tests is seen by them.
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HOME": str(home / "hf"),
        }
        self.prefix: tuple[str, ...] = ()
        self._nodes: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, **environment: str) -> Ran:
        """Run a command on this data directory."""
        process = subprocess.Popen(
            [*self.prefix, self.command, "--data-dir", self.data_dir, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self.environment | environment,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            # With whatever it started: the nodes of a demo that hangs must not outlive the test.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return Ran(process.returncode, stdout, stderr)

    def typed(self, command: str) -> str:
        """How a command for this data directory is suggested."""
        return f"kvnet --data-dir {self.data_dir} {command}"

    def json(self, *arguments: str, **environment: str) -> dict[str, Any]:
        """The result of a command that must succeed."""
        return self("--json", "--quiet", *arguments, **environment).result

    def until(self, what: Callable[[dict[str, Any]], bool], *arguments: str) -> dict[str, Any]:
        """The result of a command once it is as expected: what nodes tell each other takes a moment, more on a busy
        machine."""
        return _once(what, lambda: self.json(*arguments))

    def asked(self, verb: str) -> dict[str, Any]:
        """What the running node says to a verb without arguments, without a process for it."""
        said = call_running_node(self.data_dir, verb, OPERATIONS[verb].request(), lambda _event: None)
        assert said is not None, "no node is running"
        found: dict[str, Any] = json.loads(said)
        return found

    def watch(self, what: Callable[[dict[str, Any]], bool], verb: str) -> dict[str, Any]:
        """As `until`, of the running node, and without a process for each look."""
        return _once(what, lambda: self.asked(verb))

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on while the test does; ended with the test."""
        process = subprocess.Popen(
            [*self.prefix, self.command, "--data-dir", self.data_dir, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )
        self._nodes.append(process)
        # Whoever asks a node to stop waits until its process is gone; nobody else here would collect its exit code.
        threading.Thread(target=process.wait, daemon=True).start()
        return process

    def start(self, *arguments: str) -> tuple[dict[str, Any], subprocess.Popen[str]]:
        """A running node on a free loopback port, once it says where it listens."""
        endpoint = () if "--api" in arguments else ("--api", "127.0.0.1:0")
        listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
        process = self.popen("--json", "node", "start", *listen, *endpoint, *arguments)
        assert process.stdout is not None
        assert process.stderr is not None
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            process.kill()
            raise AssertionError(f"the node did not start: {process.stderr.read()}")
        return json.loads(line), process

    def end(self) -> None:
        """End whatever still runs."""
        for process in self._nodes:
            if process.poll() is None:
                process.terminate()
        for process in self._nodes:
            try:
                process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def files_of(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder that a running node writes to, but for models: some come and go meanwhile."""
    found: dict[Path, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file() and "models" not in path.relative_to(folder).parts:
            with suppress(FileNotFoundError):
                found[path] = path.read_bytes()
    return found


def _once(what: Callable[[dict[str, Any]], bool], look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is seen once it is as expected; another process has no event for this."""
    until_s = time.monotonic() + TIMEOUT_S
    while not what(seen := look()):
        assert time.monotonic() < until_s, f"not so within {TIMEOUT_S:.0f} s: {json.dumps(seen, indent=1)}"
        time.sleep(POLL_S)
    return seen


@pytest.fixture
def kvnet(tmp_path: Path) -> Iterator[Kvnet]:
    """The command on a fresh data directory."""
    runner = Kvnet(tmp_path / "data")
    yield runner
    runner.end()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Kvnet]:
    """The command on a second data directory."""
    runner = Kvnet(tmp_path / "other")
    yield runner
    runner.end()
