import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet_node import app
from kvnet_node.app import main


@pytest.mark.parametrize(
    ("arguments", "found", "next_step"),
    [
        (["stop"], "expected a verb, found 'stop'", "kvnet node stop"),
        (["node", "restart"], "expected a verb, found 'node restart'", "kvnet node stop, then kvnet node start"),
        (["lst"], 'Did you mean "list"?', "kvnet --help"),
        (["key", "tust"], 'Did you mean "trust"?', "kvnet key --help"),
        (["key", "trust"], "PUBLISHER", "kvnet key trust --help"),
        (["status", "extra"], "expected no further argument, found 'extra'", "kvnet status --help"),
        (["--all", "list"], "expected a verb before its flags, found '--all'", "kvnet --help"),
    ],
)
def test_a_wrong_command_line_names_a_help_text_that_exists(
    capsys: pytest.CaptureFixture[str], arguments: list[str], found: str, next_step: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert found in captured.err
    assert captured.err.splitlines()[-1].strip() == next_step


def test_no_verb_is_said_to_have_another_name() -> None:
    verbs = {name for name, _, _ in (*app._VERBS, *app._GROUPS)}
    verbs |= {f"{group} {name}" for group, _, below in app._GROUPS for name, _, _ in below}
    assert not verbs & app._CALLED_HERE.keys()


def test_what_has_another_name_here_is_named_by_a_verb_that_exists() -> None:
    verbs = {name for name, _, _ in app._VERBS}
    verbs |= {f"{group} {name}" for group, _, below in app._GROUPS for name, _, _ in below}
    named = [found for step in app._CALLED_HERE.values() for found in re.findall(r"kvnet (\w+)(?: (\w+))?", step)]
    assert len(named) > len(app._CALLED_HERE)
    assert all(verb in verbs or f"{verb} {below}" in verbs for verb, below in named)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"\u2026"), ("latin-1", rb"\u2026"), ("utf-8", "…".encode())]
)
def test_a_locale_without_a_character_gets_it_escaped(encoding: str, shown: bytes) -> None:
    ran = in_locale(encoding, "no…verb")
    assert ran.returncode == 2
    assert shown in ran.stderr


def test_json_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    ran = in_locale("latin-1", "size", str(tmp_path / "ä…"), "--json")
    assert "ä…" in json.loads(ran.stderr)["message"]


def test_what_is_printed_for_people_fits_any_locale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ran = in_locale("ascii", "size", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert rb"1 layers \xd7 2" in ran.stdout


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 64,
    "torch_dtype": "float32",
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def in_locale(encoding: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A command whose streams have this encoding and refuse what it has no character for."""
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    return subprocess.run(
        [sys.executable, "-m", "kvnet_node.app", *arguments], capture_output=True, env=environment, check=False
    )


def test_every_verb_stands_under_one_heading_of_the_help() -> None:
    verbs = [name for name, _, _ in (*app._VERBS, *app._GROUPS)]
    listed = [verb for _, below in app._HEADINGS for verb in below]
    assert sorted(listed) == sorted(verbs)


def test_what_ends_every_help_text_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert app._EPILOGUE.strip() in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
