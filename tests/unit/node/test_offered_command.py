"""What ``kvnet list --peers`` shows: what can be had now, what cannot, and why."""

import pytest

from kvnet_node.commands.offered import remarks, render_offered
from kvnet_node.operations.requests import HolderEntry, OfferedEntry, OfferedResult

BOB = HolderEntry("bob", "12D3KooWbob", "serving", 1.0)
CAT = HolderEntry("cat", "12D3KooWcat", "away", 1.0)


def entry(*holders: HolderEntry, here: bool = False, refused: str = "") -> OfferedEntry:
    return OfferedEntry(
        "project", 1, "bafyr4ia", "team", 600, 600_000, "raw", "tiny", "kvpub1b", "bob", list(holders), here, refused
    )


@pytest.mark.parametrize(
    ("offered", "state", "held_by"),
    [
        (entry(BOB), "ready", "bob"),
        (entry(BOB, CAT), "ready", "bob, cat (seen "),
        (entry(CAT), "away", "cat (seen "),
        (entry(HolderEntry("cat", "12D3KooWcat", "away")), "away", "cat (away)"),
        (entry(HolderEntry("bob", "12D3KooWbob", "paused", 1.0)), "away", "bob (paused)"),
        (entry(CAT, here=True), "here too", "cat (seen "),
        (entry(BOB, refused="it is revoked"), "not used", "bob"),
    ],
)
def test_an_artifact_is_ready_when_a_holder_serves_now(offered: OfferedEntry, state: str, held_by: str) -> None:
    headers, row = render_offered(OfferedResult([offered])).splitlines()
    assert row[headers.index("HELD BY") :].startswith(held_by)
    assert row[headers.index("STATE") :].startswith(state)


def test_a_command_is_named_where_it_works_and_what_is_away_is_explained() -> None:
    assert [line.split()[:3] for line in remarks(OfferedResult([entry(BOB)]))] == [["kvnet", "fetch", "NAME"]]
    (away,) = remarks(OfferedResult([entry(CAT)]))
    assert away.startswith("away: nobody who holds it is connected and serving")
    assert "kvnet peers" in remarks(OfferedResult([]))[0]


def test_of_a_swarm_that_this_machine_was_removed_from_that_alone_is_said() -> None:
    (gone,) = remarks(OfferedResult([], removed=["team"]))
    assert gone.startswith("this machine was removed from team")
    assert remarks(OfferedResult([entry(BOB)], removed=["team"]), "other") == [
        "kvnet fetch NAME gets one; a hash where a name is there twice"
    ]
