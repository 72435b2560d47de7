"""What is said of members that are not connected."""

from kvnet_node.away_text import MAX_AWAY, away_text, last_seen
from kvnet_node.commands.node import nobody_connected
from kvnet_node.operations.requests import AwayMember, PeersResult

NOW_S = 1_800_000_000.0


def test_paired_machines_that_are_away_are_named_and_not_paired_again() -> None:
    result = PeersResult([], discovery="on", away=[AwayMember("lab"), AwayMember("vm", NOW_S - 120)])
    said = nobody_connected(result, NOW_S)
    assert "away: vm (seen 2 min 0 s ago), lab:" in said
    assert "node start on one of them" in said
    assert "invite" not in said


def test_who_has_paired_with_nobody_is_told_how_and_who_runs_no_node_starts_one() -> None:
    assert "kvnet invite --device here" in nobody_connected(PeersResult([], discovery="on"), NOW_S)
    assert nobody_connected(PeersResult([], away=[AwayMember("vm")]), NOW_S).endswith("kvnet node start")


def test_of_many_that_are_away_those_seen_last_are_named() -> None:
    said = away_text([(f"m{i}", NOW_S - 60 * i) for i in range(1, MAX_AWAY + 3)][::-1], NOW_S)
    assert said.startswith("no peers connected; away: m1 (seen ")
    assert f"m{MAX_AWAY} (seen " in said
    assert f"m{MAX_AWAY + 1} " not in said
    assert " and 2 more" in said


def test_a_clock_that_was_set_back_makes_nobody_seen_in_the_future() -> None:
    assert last_seen("vm", NOW_S + 500, NOW_S) == last_seen("vm", NOW_S, NOW_S)
    assert last_seen("vm", 0.0, NOW_S) == "vm"
