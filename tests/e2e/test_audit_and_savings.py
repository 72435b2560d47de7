"""``kvnet audit`` over logs of agents, and ``kvnet savings`` over what reuse has spared."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx.tinymodels import LLAMA, write_model
from tests.unit.node.audit.test_logs import CODEX, SESSION, write

pytestmark = pytest.mark.e2e

SECRET = "a word nobody else uses: xylocarp"


def body(number: int) -> dict[str, Any]:
    line = f"x-anthropic-billing-header: cc_version=2.1.39.{number}; cc_entrypoint=cli; cch={number}7;"
    messages = [{"role": "user", "content": f"{SECRET} {each}"} for each in range(number)]
    return {"model": "m", "system": [{"type": "text", "text": f"{line}\n" + "Be kind. " * 400}], "messages": messages}


def test_logs_of_agents_are_found_where_they_are(kvnet: Kvnet) -> None:
    home = Path(kvnet.environment["HOME"])
    write(home / ".claude" / "projects" / "-p" / "s1.jsonl", *SESSION, "{broken")
    write(home / ".codex" / "sessions" / "2026" / "rollout-1.jsonl", *CODEX)
    result = kvnet.json("audit", CLAUDE_CONFIG_DIR="", CODEX_HOME="")
    assert (result["type"], result["requests"], result["files"]) == ("audit", 5, 2)
    assert {each["agent"] for each in result["sessions"]} == {"claude-code", "codex"}
    assert result["repeated_tokens"] == 40_500
    assert result["malformed_lines"] == 1
    assert result["malformed"][0]["first"] == [{"line": len(SESSION) + 1, "reason": "not JSON"}]
    assert not kvnet.data_dir.exists(), "an audit needs no data directory"


def test_what_the_billing_line_costs_is_shown_and_no_text(kvnet: Kvnet, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", *map(body, range(1, 5)))
    ran = kvnet("audit", str(log))
    assert ran.code == 0
    assert "billing-line" in ran.stdout
    assert "estimated" in ran.stdout
    assert "xylocarp" not in ran.stdout + ran.stderr
    assert kvnet.json("audit", str(log))["causes"][0]["cause"] == "billing-line"


def test_without_any_log_it_is_said_how_to_name_one(kvnet: Kvnet, tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path)]):
        ran = kvnet("audit", *arguments, CLAUDE_CONFIG_DIR="", CODEX_HOME="")
        assert (ran.code, ran.stdout) == (2, "")
        assert kvnet.typed("audit PATH") in ran.stderr


def test_a_fresh_ledger_says_that_nothing_was_noted(kvnet: Kvnet) -> None:
    ran = kvnet("savings")
    assert (ran.code, ran.stdout) == (0, "")
    assert "nothing noted yet" in ran.stderr


@pytest.mark.mlx
def test_an_added_context_pays_off_with_its_uses_and_its_account_outlives_it(kvnet: Kvnet, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "models" / "tiny", LLAMA))
    document = tmp_path / "handbook.txt"
    document.write_text(f"{SECRET}. " * 40, encoding="utf-8")
    added = kvnet.json("add", str(document), "--name", "handbook", "--model", model)
    kvnet.start()
    answer = kvnet.json("ask", "handbook", "What is it?", "--max-tokens", "4", "--model", model)
    assert answer["reused_tokens"] >= added["tokens"] - 1
    with_node = kvnet.json("savings", "--price-per-million-tokens", "2", "--currency", "EUR")
    assert with_node["saved_money"] == pytest.approx(2e-6 * answer["reused_tokens"])
    kvnet.json("node", "stop")
    kvnet.json("rm", "handbook")
    result = kvnet.json("savings")
    assert "saved_money" not in result
    (account,) = result["artifacts"]
    assert (account["artifact"], account["name"], account["origin"]) == (added["artifact"], "handbook", "add")
    assert (account["uses"], account["saved_tokens"]) == (1, answer["reused_tokens"])
    assert account["paid_s"] == pytest.approx(added["prefill_s"])
    assert result["requests"] == 1
    ledger = kvnet.data_dir / "savings.sqlite3"
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert b"xylocarp" not in ledger.read_bytes()
    assert json.dumps(result).count("xylocarp") == 0
