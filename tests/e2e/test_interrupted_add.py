"""Ctrl-C and `kill` in a long `kvnet add`: what was computed is kept, said, and gone on with."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

SLOW = {**tinymodels.LLAMA, "num_hidden_layers": 32, "max_position_embeddings": 8192}
"""Small to keep and long to compute, so that there is something to interrupt on a fast machine too."""

N_CHARACTERS = 3_000
"""About as many tokens: the tiny tokenizer has one for each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.write_model(tmp_path_factory.mktemp("models") / "slow-llama", SLOW)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    lines = (f"Line {number}: the keeper notes wind and tide.\n" for number in range(N_CHARACTERS))
    file = tmp_path / "keeper.txt"
    file.write_text("".join(lines)[:N_CHARACTERS], encoding="utf-8")
    return file


def interrupted(kvnet: Kvnet, document: Path, model: Path, number: signal.Signals) -> tuple[int, dict[str, Any]]:
    """An add that is ended once some of it is done; its exit code, and what it said of what is kept."""
    process = kvnet.popen("--json", "add", str(document), "--name", "keeper", "--model", str(model))
    assert process.stdout is not None
    said: list[dict[str, Any]] = []
    for line in process.stdout:
        event = json.loads(line)
        if not said and event["type"] == "progress" and event["stage"] == "prefill" and event["done"] >= 512:
            process.send_signal(number)
            said.append(event)
        elif event["type"] == "note" and "kept_tokens" in event["data"]:
            said.append(event)
        assert event["type"] != "add", "it was done before it could be interrupted"
    assert len(said) == 2
    return process.wait(timeout=TIMEOUT_S), said[1]


def test_an_add_that_is_ended_says_what_it_keeps_and_the_same_command_goes_on(
    kvnet: Kvnet, document: Path, model: Path
) -> None:
    code, kept = interrupted(kvnet, document, model, signal.SIGTERM)
    n_tokens = kept["data"]["kept_tokens"]
    assert code == 130
    assert n_tokens >= 512
    assert n_tokens % 256 == 0
    assert "the same command goes on from there" in kept["text"]
    assert "keeper" in kept["text"]
    (listed,) = kvnet.json("list")["artifacts"]
    assert (listed["tokens"], listed["names"], listed["pinned"], listed["complete"]) == (n_tokens, [], False, True)
    assert (listed["origin"], listed["adding"]) == ("interrupted", "keeper")
    shown = kvnet("list")
    assert "(keeper, begun)" in shown.stdout
    assert "The same kvnet" in shown.stderr
    again = kvnet.json("add", str(document), "--name", "keeper", "--model", str(model))
    assert (again["reused_tokens"], again["version"]) == (n_tokens, 1)
    (listed,) = kvnet.json("list")["artifacts"]
    assert (listed["artifact"], listed["names"]) == (again["artifact"], ["keeper@1"])
    assert kvnet.json("verify")["bad_chunks"] == []


def test_ctrl_c_reaches_an_add_in_the_running_node_and_its_words_come_back(
    kvnet: Kvnet, document: Path, model: Path
) -> None:
    kvnet.start()
    code, kept = interrupted(kvnet, document, model, signal.SIGINT)
    assert code == 130
    assert kvnet.json("show", kept["data"]["artifact"])["tokens"] == kept["data"]["kept_tokens"]
    added = kvnet.json("add", str(document), "--name", "keeper", "--model", str(model))
    assert added["reused_tokens"] == kept["data"]["kept_tokens"]
    assert kvnet.json("node", "status")["running"]


@pytest.mark.nightly
def test_a_person_reads_what_is_kept_before_the_command_ends(kvnet: Kvnet, document: Path, model: Path) -> None:
    process = kvnet.popen("add", str(document), "--name", "keeper", "--model", str(model))
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("prefill") and "interrupted" not in said:
            process.send_signal(signal.SIGINT)
    process.wait(timeout=TIMEOUT_S)
    words = [line for line in said.splitlines() if not line.startswith(("prefill", "loading"))]
    assert any(line.startswith(("kept ", "nothing more")) for line in words), said
    assert words[-1] == "error: interrupted"


@pytest.mark.nightly
def test_a_killed_asker_leaves_the_node_with_what_is_done(kvnet: Kvnet, document: Path, model: Path) -> None:
    kvnet.start()
    process = kvnet.popen("--json", "add", str(document), "--name", "keeper", "--model", str(model))
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "progress" and event["done"] >= 512:
            process.kill()
            break
    found = kvnet.until(lambda listed: bool(listed["artifacts"]), "list")
    (listed,) = found["artifacts"]
    assert (listed["names"], listed["tokens"] % 256, listed["complete"]) == ([], 0, True)


def test_a_second_ctrl_c_does_not_wait(kvnet: Kvnet, document: Path, model: Path) -> None:
    _, node = kvnet.start()
    process = kvnet.popen("--json", "add", str(document), "--name", "keeper", "--model", str(model))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert json.loads(line)["type"] == "note"
    # A node that answers nothing at all.
    node.send_signal(signal.SIGSTOP)
    try:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == 130
    finally:
        node.send_signal(signal.SIGCONT)
