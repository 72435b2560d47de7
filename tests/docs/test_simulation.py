"""Commands of the simulator that documents show can be typed; those marked `run` are run, one after the other."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from simulations.cli import arguments_parser
from simulations.scenario_files import names, parse
from simulations.world.building import build
from tests.docs.test_commands import ROOT, Shown, shown_commands, words_of

PAGE = ROOT / "docs" / "simulation.md"
SHOWN = [each for each in shown_commands("python") if each.line.startswith("python -m simulations")]


@pytest.mark.docs
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.line)
def test_a_shown_command_of_the_simulator_is_understood(shown: Shown) -> None:
    arguments_parser().parse_args(words_of(shown.line)[2:])


@pytest.mark.docs
def test_the_commands_marked_run_succeed_one_after_the_other(tmp_path: Path) -> None:
    lines = [shown.line for shown in SHOWN if shown.run]
    assert len(lines) >= 5
    for line in lines:
        done = subprocess.run(
            [sys.executable, *words_of(line)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.docs
def test_the_scenario_shown_can_be_run() -> None:
    content = PAGE.read_text().partition("```toml\n")[2].partition("```")[0]
    scenario = parse(tomllib.loads(content))
    assert len(build(scenario, 0).nodes) == scenario.n_nodes == 10


@pytest.mark.docs
def test_every_scenario_that_comes_with_it_is_described() -> None:
    page = PAGE.read_text()
    assert [name for name in names() if f"`{name}`" not in page] == []
