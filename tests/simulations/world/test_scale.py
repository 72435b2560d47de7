"""Many nodes: what a large swarm costs to simulate, and that its checks hold."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from simulations.policies import named
from simulations.scenario import Office, Scenario
from simulations.scenario_files import load
from simulations.world import run_world
from simulations.world.building import build

MEASURE = """
import resource, sys, time
from simulations.policies import named
from simulations.scenario import load
from simulations.world import run_world
from simulations.world.building import build
from tests.simulations.world.test_scale import cut
setup = build(cut(load(sys.argv[1]), int(sys.argv[2])), 1)
began_s = time.process_time()
result = run_world(setup, named("swarm"), 1)
seconds = time.process_time() - began_s
print(result.n_requests, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def cut(scenario: Scenario, requests: int) -> Scenario:
    """The same swarm at the same load, for a shorter time."""
    work = scenario.workload
    assert isinstance(work, Office)
    share = requests / work.requests
    return msgspec.structs.replace(
        scenario, workload=msgspec.structs.replace(work, requests=requests, days=work.days * share)
    )


def measured(name: str, requests: int) -> tuple[int, float, float]:
    """Requests answered, seconds of processor time for each, and MiB at most; in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, name, str(requests)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    answered, seconds, rss_kib = ran.stdout.split()
    return int(answered), float(seconds) / int(answered), int(rss_kib) / 1024


def test_a_thousand_nodes_pass_every_check() -> None:
    setup = build(cut(load("thousand"), 3000), 1)
    result = run_world(setup, named("swarm"), 1)
    assert len(setup.nodes) == 1000
    assert result.n_requests > 2900
    assert result.total("peer_tokens") > 0
    assert result.checks["verified"] >= result.n_requests


@pytest.mark.nightly
def test_a_million_requests_take_ten_times_as_long_as_a_tenth_of_them() -> None:
    _, tenth_s, _ = measured("thousand", 100_000)
    answered, seconds, rss_mib = measured("thousand", 1_000_000)
    assert answered > 950_000
    assert seconds < 2 * tenth_s
    assert rss_mib < 4096


@pytest.mark.nightly
def test_ten_thousand_nodes_are_simulated() -> None:
    answered, _, rss_mib = measured("ten_thousand", 200_000)
    assert answered > 190_000
    assert rss_mib < 4096
