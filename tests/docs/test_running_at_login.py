"""The recipes for running a node at login are what launchd and systemd understand."""

import plistlib
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kvnet.errors import ConfigError, DataDirLockedError, UsageError
from kvnet_node.dispatch import STOP_WAIT_S


@pytest.fixture
def recipe(repository_root: Path) -> str:
    text = (repository_root / "docs" / "operations.md").read_text(encoding="utf-8")
    return text.partition("## Running at login")[2].partition("\n## ")[0]


def block(recipe: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_launch_agent_starts_the_node_and_starts_it_again_after_a_crash_alone(recipe: str) -> None:
    agent = plistlib.loads(block(recipe, "xml").encode())
    assert agent["ProgramArguments"][1:] == ["node", "start"]
    assert agent["ProgramArguments"][0].endswith("/.venv/bin/kvnet")
    assert (agent["RunAtLoad"], agent["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert agent["ExitTimeOut"] > STOP_WAIT_S
    assert not any("~" in str(value) for value in agent.values()), "launchd expands none"


def test_what_does_not_mend_itself_is_not_tried_again(recipe: str) -> None:
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", block(recipe, "ini"), re.MULTILINE)
    assert {int(code) for code in codes.split()} == {
        error.exit_code for error in (UsageError, ConfigError, DataDirLockedError)
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(recipe: str, tmp_path: Path) -> None:
    unit = tmp_path / "kvnet.service"
    here = Path(sysconfig.get_path("scripts"), "kvnet")
    unit.write_text(block(recipe, "ini").replace("%h/kvnet/.venv/bin/kvnet", str(here)), encoding="utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    about_it = [line for line in (ran.stdout + ran.stderr).splitlines() if "kvnet" in line]
    assert (ran.returncode, about_it) == (0, []), ran.stderr
