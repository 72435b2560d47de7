"""What people read about peers, their models, and what the node does for others."""

import msgspec
import pytest

from kvnet_node.commands.matching import render_match, render_peer_models, render_peers
from kvnet_node.commands.node import render_status
from kvnet_node.operations.requests import (
    MatchedModel,
    MatchedPeer,
    MatchResult,
    PeerEntry,
    PeerModelEntry,
    PeersResult,
    StatusResult,
)

PEER = "12D3KooWPeerOfSomebodyElse12345678"
SAME = PeerModelEntry("Model", "Model", "same", "exact", measured=True, difference=0.0)
ROUNDED = PeerModelEntry(
    "other-name", "Model", "same", "tolerant", measured=True, difference=1e-6, reasons=["mlx 0.32.4 here, 0.32.5 there"]
)
NEAR = PeerModelEntry(
    "Model-8bit",
    "Model-4bit",
    "near",
    "incompatible",
    reasons=["other quantisation: 4-bit here, 8-bit there"],
    advice="use the same quantisation on both",
)
HOSTILE = PeerModelEntry("evil\x1b[31m\nname", "", "other", "")
STATUS = StatusResult(
    running=True,
    data_dir="d",
    version="0",
    publisher="p",
    peer="",
    policy="trusted",
    artifacts=0,
    held_bytes=0,
    quota_bytes=1,
)


def peer(*models: PeerModelEntry, **changes: object) -> PeerEntry:
    entry = PeerEntry(PEER, ["/ip4/192.0.2.1/tcp/5864"], member=True, scopes=["mine"], models=list(models))
    return msgspec.structs.replace(entry, **changes)


def test_each_model_stands_with_each_peer_and_what_to_do_stands_once() -> None:
    result = MatchResult(
        [
            MatchedModel("Model", peers=[MatchedPeer(PEER, SAME, "studio"), MatchedPeer(PEER, ROUNDED)]),
            MatchedModel("Model-4bit", peers=[MatchedPeer(PEER, NEAR), MatchedPeer(PEER, NEAR)]),
            MatchedModel("Alone"),
            MatchedModel("Broken", "its state cannot be shared: layer 3 is a ring"),
        ],
        members=1,
    )
    shown = render_match(result)
    assert "studio" in shown
    assert f"…{PEER[-8:]}" in shown
    assert "exact, measured" in shown
    assert "mlx 0.32.4 here, 0.32.5 there" in shown
    assert "Model-8bit: other quantisation: 4-bit here, 8-bit there" in shown
    assert shown.count("Model-4bit: use the same quantisation on both") == 1
    assert "only here" in shown
    assert "layer 3 is a ring" in shown
    assert render_match(MatchResult([])) == ""
    assert "told by nobody yet" in render_match(MatchResult([MatchedModel("Alone")], silent=[PEER], members=1))


def test_a_peers_models_stand_with_their_names_here_and_nothing_it_sends_reaches_the_terminal_as_it_is() -> None:
    shown = render_peer_models(PeersResult([peer(SAME, ROUNDED, NEAR, HOSTILE)]))
    assert "other-name (here Model)" in shown
    assert "no such model here" in shown
    assert "\x1b" not in shown
    assert "evil" in shown
    assert render_peer_models(PeersResult([])) == ""


@pytest.mark.parametrize(("tells", "why"), [(True, "none was loaded there yet"), (False, "it does not tell")])
def test_a_member_without_models_says_why(tells: bool, why: str) -> None:
    assert why in render_peer_models(PeersResult([peer(tells_models=tells)]))


def test_a_peer_stands_with_what_is_known_of_it() -> None:
    known = peer(chunks="bulk", state="paused", rtt_s=0.002, rate_bytes_s=80e6, standing=0.5)
    shown = render_peers(PeersResult([known]))
    for expected in ("mine", "paused", "tcp, bulk", "80", "0.50", "/ip4/192.0.2.1/tcp/5864"):
        assert expected in shown
    unknown = render_peers(PeersResult([peer(scopes=[], banned=True)]))
    for expected in ("nothing", "?", "no chunks yet", "banned"):
        assert expected in unknown
    assert render_peers(PeersResult([])) == ""


def test_the_status_says_whether_peers_are_served_and_how_that_changes() -> None:
    assert "yes" in render_status(STATUS)
    paused = render_status(msgspec.structs.replace(STATUS, not_serving="paused", pause_left_s=1800.0))
    assert "nothing, paused" in paused
    assert "left: kvnet node resume" in paused
    endless = render_status(msgspec.structs.replace(STATUS, not_serving="paused"))
    assert "paused: kvnet node resume" in endless
    battery = render_status(msgspec.structs.replace(STATUS, not_serving="on battery"))
    assert "nothing, on battery" in battery
    assert "resume" not in battery
