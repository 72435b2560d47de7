"""Suggested commands work as they are pasted: with the data directory this command was given."""

from pathlib import Path

import pytest

from kvnet.errors import elsewhere
from kvnet_node.app import _suggestions
from kvnet_node.arguments import GlobalFlags, split_global_flags
from kvnet_node.neighbours_text import JOIN_STEPS

HERE = _suggestions(GlobalFlags(data_dir=Path("/data/my node")))


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("next: kvnet node start", "next: kvnet --data-dir '/data/my node' node start"),
        ("`kvnet list` shows names", "`kvnet --data-dir '/data/my node' list` shows names"),
        (
            "kvnet rm a, then kvnet gc",
            "kvnet --data-dir '/data/my node' rm a, then kvnet --data-dir '/data/my node' gc",
        ),
        ("run the same version of kvnet on both machines", "run the same version of kvnet on both machines"),
        ("kvnet 0.1.0, process 7", "kvnet 0.1.0, process 7"),
        ("/opt/kvnet node", "/opt/kvnet node"),
        (elsewhere("kvnet join - "), "kvnet join - "),
        (
            f"run {elsewhere('kvnet node start')} on the other machine; kvnet peers shows who is there",
            "run kvnet node start on the other machine; kvnet --data-dir '/data/my node' peers shows who is there",
        ),
        (JOIN_STEPS, "kvnet --data-dir '/data/my node' invite --device here, then kvnet join - there"),
    ],
)
def test_commands_for_this_machine_name_its_data_directory_and_no_others_do(text: str, completed: str) -> None:
    assert HERE.complete(text) == completed


def test_a_completed_command_is_understood() -> None:
    flags, rest = split_global_flags(["--data-dir", "/data/my node", "node", "start"])
    assert (flags.data_dir, rest) == (Path("/data/my node"), ["node", "start"])


def test_without_the_flag_nothing_is_added() -> None:
    assert (
        _suggestions(GlobalFlags()).complete("kvnet list; " + elsewhere("kvnet join -")) == "kvnet list; kvnet join -"
    )


def test_a_relative_directory_is_named_from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"--data-dir {tmp_path}/here " in _suggestions(GlobalFlags(data_dir=Path("here"))).complete("kvnet list")
