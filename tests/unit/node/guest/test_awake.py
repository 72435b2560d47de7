"""The child that keeps the machine awake: begun once, ended with the upload, gone with this process."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet_node.guest.awake import AwakeHolder, command

READER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_macos_has_a_tool_that_watches_this_process() -> None:
    found = command(42, platform="darwin", which=lambda name: f"/usr/bin/{name}")
    assert found == ["/usr/bin/caffeinate", "-i", "-w", "42"]
    assert command(42, platform="darwin", which=lambda _: None) == []


def test_linux_has_one_that_runs_a_reader() -> None:
    found = command(42, platform="linux", which=lambda name: f"/usr/bin/{name}")
    assert found[0] == "/usr/bin/systemd-inhibit"
    assert found[-1] == "/usr/bin/cat"
    assert command(42, platform="linux", which=lambda name: None if name == "systemd-inhibit" else "/bin/cat") == []


def test_the_child_lives_exactly_as_long_as_it_is_wanted() -> None:
    holder = AwakeHolder(READER)
    assert not holder.held
    holder.hold(wanted=True)
    holder.hold(wanted=True)
    states = [holder.held]
    holder.hold(wanted=False)
    states.append(holder.held)
    holder.hold(wanted=False)
    holder.hold(wanted=True)
    states.append(holder.held)
    holder.hold(wanted=False)
    assert states == [True, False, True]


def test_a_child_that_does_not_end_when_told_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet_node.guest.awake.END_S", 0.1)
    stubborn = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    holder = AwakeHolder([sys.executable, "-c", stubborn])
    holder.hold(wanted=True)
    holder.hold(wanted=False)
    assert not holder.held


def test_a_tool_that_cannot_be_started_or_ends_at_once_is_let_be(tmp_path: Path) -> None:
    missing = AwakeHolder([str(tmp_path / "missing")])
    missing.hold(wanted=True)
    assert not missing.held
    refused = AwakeHolder([sys.executable, "-c", "raise SystemExit(1)"])
    refused.hold(wanted=True)
    child = refused._child
    assert child is not None
    child.wait(60)
    refused.hold(wanted=True)
    assert refused._child is child
    refused.hold(wanted=False)
    nothing = AwakeHolder([])
    nothing.hold(wanted=True)
    assert not nothing.held


@pytest.mark.skipif(sys.platform != "linux", reason="waits for somebody else's child as Linux can")
def test_the_child_ends_with_the_process_that_began_it() -> None:
    program = (
        "import os, sys\n"
        "from kvnet_node.guest.awake import AwakeHolder\n"
        "holder = AwakeHolder([sys.executable, '-c', 'import sys; sys.stdin.read()'])\n"
        "holder.hold(wanted=True)\n"
        "print(holder._child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    child = int(done.stdout)
    try:
        ended = os.pidfd_open(child)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([ended], [], [], 60)
    finally:
        os.close(ended)
    assert readable
