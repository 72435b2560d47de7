"""Flags, settings, exit codes, and what goes to which stream."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet

pytestmark = pytest.mark.e2e

UNKNOWN_HASH = "bafyr4i" + "a" * 52


def test_help_loads_neither_libp2p_nor_mlx_nor_trio() -> None:
    program = (
        "import sys; from kvnet_node.app import main; main(['--help']); "
        "bad = {'libp2p', 'mlx', 'mlx_lm', 'trio', 'structlog', 'nacl'} & sys.modules.keys(); "
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "generate" in completed.stdout


@pytest.mark.parametrize("module", ["dispatch", "commands.node", "commands.artifacts", "commands.generation"])
def test_a_verb_that_asks_the_running_node_loads_nothing_to_do_the_work_with(module: str) -> None:
    program = (
        f"import sys; import kvnet_node.{module}; "
        "bad = {'libp2p', 'mlx', 'trio', 'structlog', 'rich', 'nacl', 'kvnet.exchange'} & sys.modules.keys(); "
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("verb", ["add", "ask", "generate", "fetch", "size", "demo", "node start", "key trust"])
def test_every_verb_has_a_help_text(kvnet: Kvnet, verb: str) -> None:
    ran = kvnet(*verb.split(), "--help")
    assert (ran.code, ran.stderr) == (0, "")
    assert f"kvnet {verb}" in ran.stdout


def test_json_works_before_and_after_the_verb(kvnet: Kvnet) -> None:
    before, after = kvnet("--json", "key", "list").stdout, kvnet("key", "list", "--json").stdout
    assert before == after
    assert before.startswith('{"type":"key list"')


@pytest.mark.parametrize(
    "arguments",
    [
        ["lst"],
        ["key", "tust"],
        ["list", "--all-of-it"],
        ["show"],
        ["show", "a", "b"],
        ["ask", "name", "question", "--max-tokens", "many"],
        ["ask", "name", "question", "--max-tokens", "0"],
        ["ask", "name", " "],
        ["generate"],
        ["generate", "--prompt", "a", "--chat", "b"],
        ["generate", "--chat", "/nonexistent/chat.json"],
        ["add", "--name", "x"],
        ["add", "/nonexistent/file", "--name", "x"],
        ["--data-dir"],
        ["import", "/nonexistent.kva"],
        ["demo", "--question", "why?"],
        ["size", "no-such-model"],
        ["model", "import", "/nonexistent.gguf"],
    ],
)
def test_usage_errors_exit_with_2_and_leave_stdout_empty(kvnet: Kvnet, arguments: list[str]) -> None:
    ran = kvnet(*arguments)
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")


def test_an_error_with_json_is_one_object_on_stderr(kvnet: Kvnet) -> None:
    ran = kvnet("--json", "show", "@@@")
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.error["type"] == "error"
    assert ran.error["exit_code"] == 2
    assert {"code", "message", "hint"} <= ran.error.keys()


def test_a_misspelt_setting_names_the_nearest(kvnet: Kvnet) -> None:
    kvnet.data_dir.mkdir()
    (kvnet.data_dir / "config.toml").write_text('[trust]\npolcy = "own"\n', encoding="utf-8")
    ran = kvnet("config", "show")
    assert ran.code == 2
    assert "trust.policy" in ran.stderr


def test_config_show_says_where_every_value_came_from(kvnet: Kvnet) -> None:
    kvnet.data_dir.mkdir()
    (kvnet.data_dir / "config.toml").write_text('[model]\ndefault = "m"\n', encoding="utf-8")
    settings = kvnet.json("config", "show", KVNET_TRUST_POLICY="own")["settings"]
    assert settings["model.default"] == {"value": "m", "origin": "config.toml"}
    assert settings["trust.policy"] == {"value": "own", "origin": "environment"}
    assert settings["reuse.numerics"] == {"value": "compatible", "origin": "default"}


def test_a_fresh_store_lists_nothing_and_says_what_to_do(kvnet: Kvnet) -> None:
    ran = kvnet("list")
    assert (ran.code, ran.stdout) == (0, "")
    assert kvnet.typed("add") in ran.stderr
    assert kvnet.json("list") == {"type": "list", "artifacts": []}


def test_quiet_says_nothing_beside_the_result(kvnet: Kvnet) -> None:
    ran = kvnet("list", "--quiet")
    assert (ran.code, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("verb", ["show", "verify", "pin", "unpin", "rm"])
def test_an_unknown_hash_is_not_in_the_store(kvnet: Kvnet, verb: str) -> None:
    ran = kvnet(verb, _well_formed())
    assert (ran.code, ran.stdout) == (50, "")


MALFORMED = ["Not A Name", "bafyr4i!!!", "../../etc/passwd", UNKNOWN_HASH + "a" * 9, "@2", "x@"]


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        *(("show", target) for target in MALFORMED),
        *(("fetch", target) for target in MALFORMED),
        *((verb, MALFORMED[0]) for verb in ("verify", "pin", "unpin", "rm")),
    ],
)
def test_a_malformed_target_is_a_usage_error(kvnet: Kvnet, verb: str, target: str) -> None:
    ran = kvnet(verb, target)
    assert (ran.code, ran.stdout) == (2, "")


@pytest.mark.parametrize("target", ["bafyr4", "bafyr4i", "bafyr4iabc", "größe", "abc!"])
def test_what_is_neither_a_name_nor_a_hash_is_told_how_both_look(kvnet: Kvnet, target: str) -> None:
    ran = kvnet("show", target)
    assert ran.code == 2
    assert "`bafyr4i` and at least 8 more characters" in ran.stderr
    assert target in ran.stderr
    assert kvnet.typed("add") not in ran.stderr


def test_an_unknown_name_is_a_usage_error(kvnet: Kvnet) -> None:
    ran = kvnet("show", "handbook")
    assert ran.code == 2
    assert "handbook" in ran.stderr


def _well_formed() -> str:
    from kvnet.format.hashes import ArtifactHash, artifact_text

    return artifact_text(ArtifactHash(bytes(range(32))))


def test_fetch_of_an_unknown_hash_without_peers_exits_with_60_and_leaves_no_message_in_the_output(
    kvnet: Kvnet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        completed = subprocess.run(
            [kvnet.command, "--data-dir", kvnet.data_dir, "fetch", _well_formed()],
            stdout=file, stderr=subprocess.PIPE, env=kvnet.environment, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert completed.returncode == 60
    assert out.read_bytes() == b""
    assert completed.stderr.startswith(b"error: ")


@pytest.mark.parametrize("length", [12, 40, 58])
def test_fetch_of_a_truncated_hash_is_a_usage_error(kvnet: Kvnet, length: int) -> None:
    ran = kvnet("fetch", _well_formed()[:length])
    assert (ran.code, ran.stdout) == (2, "")


def test_a_reader_that_has_had_enough_is_no_failure(kvnet: Kvnet) -> None:
    process = kvnet.popen("config", "show")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert process.stderr.read() == ""


def test_doctor_names_what_it_looked_at(kvnet: Kvnet) -> None:
    subjects = {finding["subject"] for finding in kvnet.json("doctor")["findings"]}
    assert {"python", "libp2p", "mlx", "settings", "models"} <= subjects
