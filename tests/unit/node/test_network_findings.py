"""Why two nodes do not see each other: every case has its words and its next step."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvnet.errors import PeerRefusedError, PeerUnreachableError, UnsupportedVersionError
from kvnet.protocol.ids import PeerId, peer_text
from kvnet_node.findings import Finding
from kvnet_node.network_findings import OUTCOMES, judge, privacy_blocks
from kvnet_node.operations.requests import NeighbourEntry, NetworkCheckResult, PeerClock, Reach
from kvnet_node.session_reasons import explain_no_session
from kvnet_node.suggesting import unmarked
from kvnet_node.system_network import parse_firewall, parse_gateway

PEER = peer_text(PeerId(bytes.fromhex("002408011220") + bytes([7]) * 32))
OTHER = peer_text(PeerId(bytes.fromhex("002408011220") + bytes([8]) * 32))
ADDRESS = f"/ip4/192.168.1.7/tcp/5864/p2p/{PEER}"
OWN = f"/ip4/192.168.1.5/tcp/5864/p2p/{OTHER}"
WELL = NetworkCheckResult(
    running=True,
    platform="linux",
    addresses=[OWN],
    own=[Reach(OWN, "open")],
    discovery="on en0 (192.168.1.5)",
    hears_itself=True,
    neighbours=[NeighbourEntry(PEER, [ADDRESS], "member")],
    connected=1,
    members=1,
    clocks=[PeerClock(PEER, 2)],
)


def found(**changes: Any) -> list[Finding]:
    return judge(msgspec.structs.replace(WELL, **changes))


def only(findings: list[Finding], subject: str) -> Finding:
    (finding,) = [each for each in findings if each.subject == subject]
    return replace(finding, hint=unmarked(finding.hint))


def test_when_all_is_well_nothing_is_a_problem_and_no_step_is_left() -> None:
    findings = found(asked=Reach(ADDRESS, "member", near=True, agent="kvnet/1"))
    assert {each.state for each in findings} == {"ok"}
    assert [each.hint for each in findings if each.hint] == []


def test_without_a_node_that_comes_first() -> None:
    findings = judge(NetworkCheckResult(running=False, platform="darwin"))
    assert [(each.state, each.hint) for each in findings] == [("problem", "kvnet node start")]


def test_a_node_on_loopback_alone_is_reached_by_nobody() -> None:
    findings = found(addresses=["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip6/::1/tcp/1/p2p/x"], own=[])
    assert only(findings, "node").state == "problem"


def test_an_own_address_that_does_not_answer_points_to_a_firewall_here() -> None:
    finding = only(found(own=[Reach(OWN, "timeout", "no answer within 4 s")]), "port")
    assert finding.state == "problem"
    assert "5864" in finding.hint


def test_the_application_firewall_of_macos_is_named() -> None:
    assert only(found(platform="darwin", firewall="on"), "firewall").state == "note"
    assert not [each for each in found(firewall="off") if each.subject == "firewall"]


@pytest.mark.parametrize(
    ("discovery", "state", "hint"),
    [
        ("off (lan.discovery)", "note", "lan.discovery = true"),
        ("off: this node listens on no address of a private network", "note", "--bootstrap ADDRESS"),
        ("failed: OSError: address already in use", "problem", "UDP 5353"),
    ],
)
def test_where_nobody_is_looked_for_it_says_why(discovery: str, state: str, hint: str) -> None:
    finding = only(found(discovery=discovery, hears_itself=None), "discovery")
    assert finding.state == state
    assert hint in finding.hint


def test_a_node_on_loopback_is_told_how_to_listen_where_neighbours_are() -> None:
    finding = only(
        found(
            discovery="off: this node listens on no address of a private network",
            hears_itself=None,
            addresses=["/ip4/127.0.0.1/tcp/1"],
        ),
        "discovery",
    )
    assert "without --listen" in finding.hint


def test_multicast_that_does_not_even_come_back_is_blocked_here() -> None:
    finding = only(found(hears_itself=False), "discovery")
    assert finding.state == "problem"
    assert "UDP 5353" in finding.hint


def test_a_network_on_which_nobody_is_heard_says_what_to_try() -> None:
    finding = only(found(neighbours=[], members=0), "neighbours")
    assert "kvnet node start on the other machine" in finding.hint
    assert "--peer" in finding.hint


@pytest.mark.parametrize(
    ("state", "level", "hint"),
    [
        ("member", "ok", ""),
        ("found", "ok", ""),
        ("connected", "ok", ""),
        ("stranger", "note", "kvnet join"),
        ("other version", "problem", "same kvnet"),
        ("no session", "problem", "kvnet --version"),
        ("unreachable", "problem", f"kvnet doctor --network --peer {ADDRESS}"),
    ],
)
def test_each_neighbour_is_judged_by_its_state(state: str, level: str, hint: str) -> None:
    finding = only(found(neighbours=[NeighbourEntry(PEER, [ADDRESS], state, "why")]), "neighbour")
    assert finding.state == level
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("platform", "reach", "level", "text", "hint"),
    [
        (
            "linux",
            Reach(ADDRESS, "timeout"),
            "problem",
            "TCP 5864 gives no answer: a firewall",
            "let TCP 5864 and 5865 in",
        ),
        ("linux", Reach(ADDRESS, "refused"), "problem", "nothing listens on TCP 5864", "kvnet node start there"),
        ("darwin", Reach(ADDRESS, "no_route", near=True), "problem", "macOS keeps this program", "Local Network"),
        ("linux", Reach(ADDRESS, "no_route", "No route"), "problem", "not reached: No route", f"--peer {ADDRESS}"),
        ("linux", Reach(ADDRESS, "open"), "note", "takes connections now", f"--peer {ADDRESS}"),
    ],
)
def test_a_neighbour_that_is_heard_and_not_reached_is_tried_once_more(
    platform: str, reach: Reach, level: str, text: str, hint: str
) -> None:
    neighbours = [NeighbourEntry(PEER, [ADDRESS], "unreachable", "a long story")]
    finding = only(found(platform=platform, neighbours=neighbours, unreached=[reach]), "neighbour")
    assert (finding.state, text in finding.text, hint in finding.hint) == (level, True, True)


def test_one_that_was_heard_and_does_not_answer_points_to_a_firewall() -> None:
    asked = Reach(ADDRESS, "timeout")
    assert "a firewall drops it" in only(found(asked=asked), "peer").text
    assert "a firewall drops it" not in only(found(asked=asked, neighbours=[]), "peer").text


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"neighbours": [NeighbourEntry(PEER, [ADDRESS], "stranger")]}, "kvnet join"),
        ({"neighbours": []}, "kvnet join"),
        ({"remembered": 2}, "kvnet doctor --network --peer"),
        ({"neighbours": [NeighbourEntry(PEER, [ADDRESS], "other version")]}, ""),
    ],
)
def test_only_who_has_no_member_yet_is_told_to_invite_one(changes: dict[str, Any], hint: str) -> None:
    finding = only(found(members=0, **changes), "peers")
    assert finding.state == "note"
    assert hint in finding.hint
    assert bool(finding.hint) is bool(hint)


@pytest.mark.parametrize(
    ("connected", "members", "text"),
    [
        (0, 0, "0 peers connected"),
        (1, 0, "1 peer connected, which shares no namespace"),
        (1, 1, "1 peer connected, which shares a namespace"),
        (3, 1, "3 peers connected, 1 of them shares a namespace"),
        (3, 2, "3 peers connected, 2 of them share a namespace"),
    ],
)
def test_how_many_peers_are_members_is_told(connected: int, members: int, text: str) -> None:
    assert only(found(connected=connected, members=members), "peers").text.partition(";")[0] == text


@pytest.mark.parametrize(("skew_s", "said"), [(-61, "1 min 1 s behind"), (86400, "24 h 0 min ahead of")])
def test_clocks_that_are_far_apart_are_said(skew_s: int, said: str) -> None:
    finding = only(found(clocks=[PeerClock(PEER, skew_s)]), "clock")
    assert said in finding.text
    assert finding.state == "problem"
    asked = only(found(clocks=[], asked=Reach(ADDRESS, "member", clock_skew_s=skew_s)), "clock")
    assert said in asked.text


def test_clocks_that_differ_a_little_are_not() -> None:
    assert not [each for each in found(clocks=[PeerClock(PEER, 60)]) if each.subject == "clock"]


@pytest.mark.parametrize("outcome", [each for each in OUTCOMES if each not in {"member", "open"}])
def test_whatever_a_dial_comes_to_is_a_problem_with_a_next_step(outcome: str) -> None:
    finding = only(found(asked=Reach(ADDRESS, outcome, "what was found")), "peer")
    assert finding.state == "problem"
    assert finding.hint


def test_another_swarm_is_told_how_to_join() -> None:
    finding = only(found(asked=Reach(ADDRESS, "stranger", agent="kvnet/1")), "peer")
    assert "kvnet invite --device here, then kvnet join - there" in finding.hint


def test_somebody_elses_address_names_who_answers() -> None:
    finding = only(found(asked=Reach(ADDRESS, "other_peer", answered_by=OTHER)), "peer")
    assert finding.hint.endswith(f"/ip4/192.168.1.7/tcp/5864/p2p/{OTHER}")


def test_no_route_although_the_router_answers_is_local_network_privacy() -> None:
    blocked = Reach(ADDRESS, "no_route", "No route to host", near=True, gateway_answers=True)
    finding = only(found(platform="darwin", asked=blocked), "peer")
    assert "Local Network Privacy" in finding.text
    assert "Privacy & Security > Local Network" in finding.hint


@pytest.mark.parametrize(
    ("platform", "changes"),
    [
        ("linux", {}),
        ("darwin", {"gateway_answers": False}),
        ("darwin", {"gateway_answers": None}),
        ("darwin", {"near": False}),
        ("darwin", {"outcome": "timeout"}),
    ],
)
def test_everything_else_is_not(platform: str, changes: dict[str, Any]) -> None:
    blocked = Reach(ADDRESS, "no_route", near=True, gateway_answers=True)
    assert privacy_blocks("darwin", blocked)
    assert not privacy_blocks(platform, msgspec.structs.replace(blocked, **changes))


def test_a_node_that_answers_and_is_not_heard_has_its_multicast_kept_back() -> None:
    asked = Reach(ADDRESS, "stranger", near=True)
    assert only(found(neighbours=[], asked=asked), "multicast").state == "note"
    for changes in ({}, {"neighbours": [], "discovery": "off (lan.discovery)"}):
        assert not [each for each in found(asked=asked, **changes) if each.subject == "multicast"]


def test_why_a_session_did_not_open_is_told_apart() -> None:
    version = UnsupportedVersionError("expected version 1, found 2")
    assert explain_no_session(version) == ("version", "expected version 1, found 2")
    refused = PeerRefusedError("expected the peer to speak /kvnet/control/1.0.0, it does not", reason="protocol")
    assert explain_no_session(refused)[0] == "not_kvnet"
    assert explain_no_session(PeerUnreachableError("silence")) == ("no_session", "silence")
    assert explain_no_session(None)[0] == "no_session"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Firewall is enabled. (State = 1)\n", "on"),
        ("Firewall is disabled. (State = 0)\n", "off"),
        ("Firewall is blocking all non-essential incoming connections. (State = 2)\n", "on"),
        ("", ""),
    ],
)
def test_what_macos_says_of_its_firewall_is_read(text: str, state: str) -> None:
    assert parse_firewall(text) == state


def test_the_router_is_read_from_the_routing_table() -> None:
    assert parse_gateway("   route to: default\n    gateway: 192.168.1.1\n  interface: en0\n") == "192.168.1.1"
    assert parse_gateway("route: writing to routing socket: not in table") is None
