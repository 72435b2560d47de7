"""What happens in small worlds, by hand and as a whole."""

from dataclasses import replace

import pytest

from kvnet.exchange.lookups import DHT_SHARE
from kvnet.exchange.planning import SHOWING_ROUND_TRIPS
from simulations.policies import POLICIES, named
from simulations.policies.policy import Policy
from simulations.results import RunResult, summary
from simulations.scenario_files import load
from simulations.workload.churn import Change, PresenceChange
from simulations.workload.requests import ROOT
from simulations.world import run, run_world
from simulations.world.building import build
from simulations.world.clock import SimpyClock
from simulations.world.setup import Partition
from tests.simulations.world.worlds import LINK, MACHINE, TOKEN_BYTES, TOKENS_S, node, world

SWARM = named("swarm")
DOCUMENT = 2560  # ten blocks
COLD_S = DOCUMENT / TOKENS_S + LINK.rtt_s
"""Computed after the only other node, as a server of the DHT, has said that it knows of nobody."""


def two(policy: Policy = SWARM, *, exact: bool = False, second_at_s: float = 100.0) -> RunResult:
    """A prompt at one node, and the same with a question more at the other."""
    asked = [(0.0, 0, 0, DOCUMENT, 0), (second_at_s, 1, 1, DOCUMENT + 200, 0)]
    return run_world(world([node(), node()], asked, ((ROOT, 0), (0, 10))), policy, 0, exact_transfers=exact)


def test_a_prompt_is_fetched_when_a_peer_has_computed_it() -> None:
    result = two()
    assert result.hit_tokens.tolist() == [0, DOCUMENT]
    assert result.requests["peer_tokens"].tolist() == [0, DOCUMENT]
    fetched = DOCUMENT * (TOKEN_BYTES + 4)
    assert result.requests["fetched_bytes"].tolist() == [0, fetched]
    # A question, three round trips to be shown the artifact, one for the first chunk; then bytes, restore and prefill.
    expected_s = (1 + SHOWING_ROUND_TRIPS + 1) * LINK.rtt_s + fetched / LINK.up_bytes_s
    expected_s += MACHINE.restore_s(DOCUMENT * TOKEN_BYTES) + 200 / TOKENS_S
    assert result.requests["ttft_s"].tolist() == pytest.approx([COLD_S, expected_s])


def test_chunks_take_as_long_as_what_flows() -> None:
    fluid, exact = two(), two(exact=True)
    assert exact.hit_tokens.tolist() == fluid.hit_tokens.tolist()
    assert exact.requests["fetched_bytes"].tolist() == fluid.requests["fetched_bytes"].tolist()
    assert exact.requests["ttft_s"].tolist() == pytest.approx(fluid.requests["ttft_s"].tolist(), rel=0.01)


@pytest.mark.parametrize(
    ("policy", "hits"), [("none", [0, 0]), ("own", [0, 0]), ("swarm", [0, DOCUMENT]), ("central", [0, DOCUMENT])]
)
def test_each_policy_reaches_as_far_as_it_says(policy: str, hits: list[int]) -> None:
    assert two(named(policy)).hit_tokens.tolist() == hits


def test_a_link_below_the_break_even_is_not_used_twice() -> None:
    slow = replace(LINK, up_bytes_s=5e6, down_bytes_s=5e6)
    asked = [(0.0, 0, 0, DOCUMENT, 0), (0.0, 0, 1, DOCUMENT, 0)]
    asked += [(100.0, 1, 0, DOCUMENT, 0), (200.0, 1, 1, DOCUMENT, 0)]
    result = run_world(world([node(link=slow), node(link=slow)], asked, ((ROOT, 0), (ROOT, 0))), SWARM, 0)
    assert result.requests["peer_tokens"].sum() == 0
    # The first time nobody knows how fast it is; half a second of it says so, and it is known the second time.
    assert (result.counts["given_up"], result.counts["not_asked"]) == (1, 1)
    assert COLD_S < result.requests["ttft_s"][2] < COLD_S + 0.6
    assert result.requests["ttft_s"][3] == pytest.approx(COLD_S)


@pytest.mark.parametrize("exact", [False, True])
def test_liars_are_found_out_and_others_asked(exact: bool) -> None:
    asked = [
        (0.0, 0, 0, DOCUMENT, 0),
        (50.0, 1, 0, DOCUMENT, 0),
        (100.0, 2, 0, DOCUMENT, 0),
        (200.0, 3, 0, DOCUMENT, 0),
    ]
    nodes = [node(liar=True), node(), node(), node()]
    result = run_world(world(nodes, asked), SWARM, 0, exact_transfers=exact)
    # Nobody but the liar has it at first: the second node computes it, and the others have it from there.
    assert result.requests["peer_tokens"].tolist() == [0, 0, DOCUMENT - 1, DOCUMENT - 1]
    assert result.counts["lost_bytes"] > 0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [Change.SLEEP, Change.CRASH])
def test_a_provider_that_goes_in_the_middle_costs_little_more_than_computing(kind: Change, exact: bool) -> None:
    asked = [(0.0, 0, 0, DOCUMENT, 0), (100.0, 1, 0, DOCUMENT + 1, 0)]
    changes = [PresenceChange(0.0, Change.JOIN, 0), PresenceChange(101.0, kind, 0)]
    result = run_world(world([node(), node()], asked, changes=changes), SWARM, 0, exact_transfers=exact)
    # What had come by then is used; the rest is computed after a short silence.
    assert 0 < result.requests["peer_tokens"][1] < DOCUMENT
    assert result.requests["ttft_s"][1] < (DOCUMENT + 1) / TOKENS_S + 1.0
    assert result.counts["given_up"] == 1


def test_a_node_that_goes_takes_its_requests_with_it() -> None:
    asked = [(0.0, 0, 0, DOCUMENT, 0), (100.0, 1, 0, DOCUMENT, 0), (100.1, 1, 0, DOCUMENT, 0), (200.0, 1, 0, 300, 0)]
    changes = [PresenceChange(101.0, Change.CRASH, 1), PresenceChange(150.0, Change.WAKE, 1)]
    result = run_world(world([node(), node()], asked, changes=changes), SWARM, 0)
    assert result.counts["lost_requests"] == 2
    assert result.n_requests == 2


def test_a_sleeping_peer_is_waited_for_until_its_session_ends() -> None:
    def second(at_s: float) -> float:
        asked = [(0.0, 0, 0, DOCUMENT, 0), (at_s, 1, 0, DOCUMENT, 0)]
        changes = [PresenceChange(50.0, Change.SLEEP, 0)]
        return float(run_world(world([node(), node()], asked, changes=changes), SWARM, 0).requests["ttft_s"][1])

    plain_s = DOCUMENT / TOKENS_S
    assert second(60.0) == pytest.approx(plain_s + SWARM.lookup_share * plain_s)
    assert second(200.0) == pytest.approx(COLD_S)


def test_sites_that_are_cut_off_compute_for_themselves() -> None:
    asked = [(0.0, 0, 0, DOCUMENT, 0), (100.0, 1, 0, DOCUMENT, 0), (300.0, 2, 0, DOCUMENT, 0)]
    nodes = [node(site=0), node(site=1), node(site=1)]
    cut = Partition(50.0, 200.0, frozenset({1}))
    result = run_world(world(nodes, asked, partitions=[cut]), SWARM, 0)
    assert result.requests["peer_tokens"].tolist() == [0, 0, DOCUMENT - 1]


def test_a_turn_continues_from_ram_and_after_a_crash_from_disk() -> None:
    asked = [(0.0, 0, 0, 2000, 100), (60.0, 0, 0, 2300, 100), (120.0, 0, 0, 2600, 0)]
    changes = [PresenceChange(100.0, Change.CRASH, 0), PresenceChange(110.0, Change.WAKE, 0)]
    result = run_world(world([node(live_bytes=10**9)], asked, changes=changes), SWARM, 0)
    assert result.requests["own_ram_tokens"].tolist() == [0, 2100, 0]
    assert result.requests["own_disk_tokens"].tolist() == [0, 0, 2400 // 256 * 256]


def test_disk_and_writes_stay_within_their_bounds() -> None:
    asked = [(100.0 * at, 0, at, 2560, 0) for at in range(40)]
    texts = tuple((ROOT, 0) for _ in asked)
    small = node(quota_bytes=10**9, write_budget_bytes_day=3 * 10**9)
    result = run_world(world([small], asked, texts), SWARM, 0)
    assert result.counts["evicted"] > 0
    assert result.nodes["stored_bytes"][0] <= 10**9
    assert result.nodes["ssd_written_bytes"][0] <= 3 * 10**9 * (1 + 4000 / 86400)
    assert result.counts["not_kept"] > 0


def test_others_than_members_are_found_through_the_dht() -> None:
    nodes = [node() for _ in range(8)]
    asked = [(0.0, 0, 0, DOCUMENT, 0), *((100.0 * at, at, 0, DOCUMENT, 0) for at in range(1, 8))]
    result = run_world(world(nodes, asked, members=2), SWARM, 0)
    assert result.requests["peer_tokens"][1:].tolist() == [DOCUMENT - 1] * 7
    assert result.counts["found_in_dht"] > 0
    without = run_world(world(nodes, asked, members=2), named("swarm-members"), 0)
    assert without.requests["peer_tokens"].sum() < result.requests["peer_tokens"].sum()
    assert DHT_SHARE < 1


def test_hot_beginnings_can_be_copied_before_anybody_asks() -> None:
    copied = run_world(build(load("classroom"), 1), named("swarm-replicated"), 1)
    assert copied.counts["copies"] > 0


# --- as a whole -------------------------------------------------------------------------------------------------------


def test_one_seed_one_digest() -> None:
    scenario = load("small")
    assert run(scenario, "swarm", 1).digest == run(scenario, "swarm", 1).digest
    assert run(scenario, "swarm", 1).digest != run(scenario, "swarm", 2).digest


def test_both_clocks_give_one_digest() -> None:
    setup = build(load("mixed"), 1)
    assert run_world(setup, SWARM, 1).digest == run_world(setup, SWARM, 1, clock=SimpyClock()).digest


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_passes_every_check(policy: str) -> None:
    result = run(load("small"), policy, 3)
    assert set(result.checks) >= {"verified", "progress", "conserved"}
    assert result.n_requests == 60


def test_the_swarm_lies_between_own_caches_and_the_ceiling() -> None:
    setup = build(load("mixed"), 1)
    none, own, swarm, central = (
        summary(run_world(setup, named(name), 1)) for name in ("none", "own", "swarm", "central")
    )
    assert none.hit_token_fraction == 0
    assert own.hit_token_fraction < swarm.hit_token_fraction <= central.hit_token_fraction
    assert none.ttft_s["mean"] > own.ttft_s["mean"] > swarm.ttft_s["mean"] > central.ttft_s["mean"]


def test_both_ways_of_fetching_agree_on_a_scenario() -> None:
    setup = build(load("mixed"), 1)
    fluid, exact = (run_world(setup, SWARM, 1, exact_transfers=each) for each in (False, True))
    assert exact.total("fetched_bytes") == pytest.approx(fluid.total("fetched_bytes"), rel=0.02)
    assert exact.percentile(50) == pytest.approx(fluid.percentile(50), rel=0.10)
    assert exact.counts["fetches"] > 50
