"""``kvnet node start|stop|status``, and verbs that find the running node."""

import signal
import socket
import stat
from pathlib import Path

import pytest

from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.lock import DataDirLock
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]


def test_start_says_where_it_listens_and_stop_waits_until_it_is_gone(kvnet: Kvnet) -> None:
    started, process = kvnet.start()
    assert started["type"] == "node start"
    assert all("/p2p/" in address and "/ip4/127.0.0.1/tcp/" in address for address in started["addresses"])
    assert started["pid"] == process.pid
    status = kvnet.json("node", "status")
    assert (status["running"], status["pid"]) == (True, process.pid)
    assert status["addresses"] == started["addresses"]
    assert kvnet.json("node", "stop") == {"type": "node stop", "pid": process.pid}
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert kvnet.json("node", "status")["running"] is False


@pytest.mark.parametrize(("models", "step"), [((), "model list"), (("tiny",), "add")])
def test_the_first_screen_names_the_next_step(kvnet: Kvnet, models: tuple[str, ...], step: str) -> None:
    for name in models:
        tinymodels.write_model(kvnet.data_dir / "models" / name)
    process = kvnet.popen("node", "start", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0")
    assert process.stdout is not None
    screen = ""
    while "invite --device" not in screen:  # the last line, of a machine that shares nothing yet
        line = process.stdout.readline()
        assert line, screen
        screen += line
    for expected in ("/p2p/", "/v1", str(kvnet.data_dir), "kvpub1", kvnet.typed(step)):
        assert expected in screen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_stop(kvnet: Kvnet, number: signal.Signals) -> None:
    _, process = kvnet.start()
    process.send_signal(number)
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert not (kvnet.data_dir / "control.sock").exists()


def test_stop_without_a_node_is_no_failure(kvnet: Kvnet) -> None:
    assert kvnet.json("node", "stop") == {"type": "node stop", "pid": 0}


def test_a_second_node_on_the_data_directory_is_refused_and_the_owner_named(kvnet: Kvnet) -> None:
    _, process = kvnet.start()
    ran = kvnet("node", "start", "--listen", "127.0.0.1:0")
    assert (ran.code, ran.stdout) == (50, "")
    assert str(process.pid) in ran.stderr


def test_a_locked_data_directory_names_its_owner(kvnet: Kvnet) -> None:
    kvnet.json("key", "show")
    lock = DataDirLock(kvnet.data_dir)
    lock.acquire()
    try:
        ran = kvnet("list")
    finally:
        lock.release()
    assert (ran.code, ran.stdout) == (50, "")
    assert "process" in ran.stderr


def test_a_port_that_was_asked_for_and_is_taken_names_its_owner(kvnet: Kvnet) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = kvnet("node", "start", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (ran.code, ran.stdout) == (60, "")
    assert "process" in ran.stderr


def test_a_killed_node_does_not_stand_in_the_way(kvnet: Kvnet) -> None:
    _, process = kvnet.start()
    process.kill()
    process.wait()
    assert kvnet.json("node", "status")["running"] is False
    kvnet.start()


def test_verbs_use_the_running_node(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    kvnet.start()
    publisher = other.json("key", "show")["publisher"]
    kvnet.json("key", "trust", publisher)
    assert [key["role"] for key in kvnet.json("key", "list")["keys"]] == ["signing", "trusted"]
    kvnet.json("namespace", "export", str(tmp_path / "x.kvns"))
    assert stat.S_IMODE((tmp_path / "x.kvns").stat().st_mode) == 0o600


def test_the_control_socket_is_for_its_owner_alone(kvnet: Kvnet) -> None:
    started, _ = kvnet.start()
    assert stat.S_IMODE(Path(started["control_socket"]).stat().st_mode) == 0o600


def test_a_long_data_directory_still_has_a_control_socket(tmp_path: Path) -> None:
    kvnet = Kvnet(tmp_path / ("long-" * 20))
    try:
        started, _ = kvnet.start()
        assert len(started["control_socket"]) <= 100
        assert kvnet.json("node", "status")["running"] is True
        kvnet.json("node", "stop")
        assert not Path(started["control_socket"]).parent.exists()
    finally:
        kvnet.end()


def test_two_nodes_see_each_other(kvnet: Kvnet, other: Kvnet) -> None:
    first, _ = kvnet.start()
    second, _ = other.start("--bootstrap", first["addresses"][0])
    peers = other.json("peers", first["addresses"][0])["peers"]
    assert [peer["peer"] for peer in peers] == [first["peer"]]
    assert first["peer"] != second["peer"]


def test_an_interrupted_verb_exits_with_130(kvnet: Kvnet) -> None:
    kvnet.json("key", "show")
    lock = DataDirLock(kvnet.data_dir)
    lock.acquire()
    try:
        process = kvnet.popen("--json", "fetch", artifact_text(ArtifactHash(bytes(32))))
        assert process.stdout is not None
        assert "waiting for it" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == 130
    finally:
        lock.release()
