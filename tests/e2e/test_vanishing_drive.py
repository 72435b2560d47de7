"""The folder of the store is taken away from a running node, and brought back."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

RULES = "Whoever comes last puts out the light and says so to the others. " * 40


def ask(endpoint: str, question: str) -> str:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages}
    answer = httpx.post(f"{endpoint}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "an empty folder in its place"])
def test_requests_are_answered_while_the_drive_is_away_and_it_is_used_again_without_a_restart(
    kvnet: Kvnet, tmp_path: Path, replaced: bool
) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", LLAMA)
    started, process = kvnet.start("--model", "tiny")
    endpoint = started["endpoint"][0]
    document = tmp_path / "rules.txt"
    document.write_text(RULES)
    added = kvnet.json("add", str(document), "--name", "rules", "--model", "tiny")
    before = ask(endpoint, "Who puts out the light?")
    store, unplugged = kvnet.data_dir / "store", tmp_path / "unplugged"
    store.rename(unplugged)
    if replaced:
        store.mkdir()
    status = kvnet.watch(lambda seen: bool(seen["store_away"]), "status")
    assert "away" in kvnet("node", "status").stdout
    assert status["pid"] == process.pid
    # The same, and something new.
    assert ask(endpoint, "Who puts out the light?") == before
    assert ask(endpoint, "And who opens the door again in the morning?")
    failed = kvnet("--json", "verify", added["artifact"])
    assert failed.code == 50
    assert failed.error["code"] == "store_away"
    if replaced:
        assert list(store.iterdir()) == []
        store.rmdir()
    assert not store.exists()
    unplugged.rename(store)
    status = kvnet.watch(lambda seen: not seen["store_away"], "status")
    assert status["artifacts"] >= 1
    assert kvnet.json("verify", added["artifact"])["chunks"] > 0
    assert ask(endpoint, "Who puts out the light?") == before
    assert kvnet.json("node", "stop")
    log = (kvnet.data_dir / "node.log").read_text()
    assert log.count("store: away") == 1
    assert log.count("store: back") == 1
    assert '"level": "error"' not in log
    assert "Traceback" not in log
