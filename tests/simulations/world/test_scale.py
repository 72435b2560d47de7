"""Many nodes: what a large swarm costs to simulate, and that its checks hold."""

import subprocess
import sys

import msgspec
import pytest

from simulations.policies import named
from simulations.scenario import Office, Scenario, load
from simulations.world import run_world
from simulations.world.building import build

MEASURE = """
import resource, sys, time
from simulations.policies import named
from simulations.scenario import load
from simulations.world import run_world
from simulations.world.building import build
began_s = time.perf_counter()
result = run_world(build(load(sys.argv[1]), 1), named("swarm"), 1)
print(result.n_requests, time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def cut(scenario: Scenario, requests: int) -> Scenario:
    """The same swarm at the same load, for a shorter time."""
    work = scenario.workload
    assert isinstance(work, Office)
    share = requests / work.requests
    return msgspec.structs.replace(
        scenario, workload=msgspec.structs.replace(work, requests=requests, days=work.days * share)
    )


def measured(name: str) -> tuple[int, float, float]:
    """Requests answered, seconds, and MiB at most; in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", MEASURE, name], capture_output=True, text=True, check=True)
    answered, seconds, rss_kib = ran.stdout.split()
    return int(answered), float(seconds), int(rss_kib) / 1024


def test_a_thousand_nodes_pass_every_check() -> None:
    setup = build(cut(load("thousand"), 3000), 1)
    result = run_world(setup, named("swarm"), 1)
    assert len(setup.nodes) == 1000
    assert result.n_requests > 2900
    assert result.total("peer_tokens") > 0
    assert result.checks["verified"] >= result.n_requests


@pytest.mark.nightly
def test_a_million_requests_over_a_thousand_nodes_take_two_minutes_and_four_gibibytes() -> None:
    answered, seconds, rss_mib = measured("thousand")
    assert answered > 950_000
    assert seconds <= 120
    assert rss_mib < 4096


@pytest.mark.nightly
def test_ten_thousand_nodes_are_simulated() -> None:
    answered, _, rss_mib = measured("ten_thousand")
    assert answered > 1_900_000
    assert rss_mib < 8192
