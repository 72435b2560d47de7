"""The world and the replay were written apart; where nothing limits the world, they must count the same."""

from typing import Any

import numpy as np
import pytest

from simulations.replay import prefix_hits
from simulations.scenario import Scenario
from simulations.scenario_files import parse
from simulations.workload.work import prepare
from simulations.world import run


def at_leisure(workload: dict[str, Any]) -> Scenario:
    """Three machines with room for everything, and so few requests that none waits for another."""
    machines = {"count": 3, "chip": "m4", "link": "10gbe", "ram_gb": 1e3, "disk_gb": 1e6, "ssd_write_gb_a_day": 0.0}
    return parse({"name": "leisure", "title": "t", "model": "qwen3-8b", "machines": [machines], "workload": workload})


AGENTS = {"kind": "trace", "file": "agent_sessions_excerpt.jsonl", "stretch": 1e4, "requests": 200}
CODEBASE = {"kind": "codebase", "days": 600.0, "codebase_tokens": 30_000, "queries_a_day": 0.05, "edits_a_day": 0.025}


@pytest.mark.parametrize(
    ("workload", "policy"), [(AGENTS, "central"), (CODEBASE, "central"), (CODEBASE, "swarm")], ids=str
)
def test_with_time_and_room_every_prompt_hits_what_a_replay_hits(workload: dict[str, Any], policy: str) -> None:
    scenario = at_leisure(workload)
    stream = prepare(scenario, 0).stream
    # One token is left to feed, also where all of a prompt is known.
    expected = np.minimum(prefix_hits(stream) * stream.block_tokens, stream.n_input - 1)
    assert run(scenario, policy, 0).hit_tokens.tolist() == expected.tolist()


def test_no_policy_hits_more_than_the_ceiling() -> None:
    scenario = at_leisure(AGENTS)
    hits = {policy: int(run(scenario, policy, 0).hit_tokens.sum()) for policy in ("none", "own", "swarm", "central")}
    assert hits["none"] == 0
    assert 0 < hits["own"] <= hits["swarm"] <= hits["central"]
