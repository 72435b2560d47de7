"""Which neighbours are dialled when, and how few of what a hostile network says are kept."""

from kvnet.exchange.neighbours import NeighbourLimits, NeighbourTable
from kvnet.network.lan.records import Sighting
from kvnet.protocol.ids import PeerId

OWN = PeerId(bytes([1]) * 38)
LIMITS = NeighbourLimits(
    neighbours=20, names=2, dials_per_s=1.0, burst=3, in_flight=2, strangers=2, stranger_s=30.0, retry_s=5.0,
    max_retry_s=600.0, yield_s=1.5,
)  # fmt: skip
NOBODY: frozenset[PeerId] = frozenset()


def peer(number: int) -> PeerId:
    return PeerId(bytes([2]) + number.to_bytes(37, "big"))


def sighting(number: int, *, name: str = "", port: int = 1, version: int = 1) -> Sighting:
    return Sighting(name or f"name {number}", peer(number), version, (f"/ip4/10.0.0.{number}/tcp/{port}/p2p/x",))


def dialled(table: NeighbourTable, now: float, connected: frozenset[PeerId] = NOBODY) -> list[PeerId]:
    return [each.peer for each in table.next_dials(connected, now)]


def test_a_neighbour_is_dialled_once_and_again_only_after_it_failed() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    assert dialled(table, 0.0) == [peer(1)]
    assert dialled(table, 1.0) == []
    table.dialled(peer(1), "nobody answers", 1.0)
    assert [dialled(table, now) for now in (1.0, 5.9, 6.0)] == [[], [], [peer(1)]]
    table.dialled(peer(1), "nobody answers", 6.0)
    assert [dialled(table, now) for now in (11.0, 15.9, 16.0)] == [[], [], [peer(1)]]
    (row,) = table.neighbours(lambda _: "")
    assert (row.state, row.reason) == ("unreachable", "nobody answers")


def test_pauses_grow_to_a_limit_and_no_further() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    now = 0.0
    for _ in range(30):
        (due,) = table.next_dials(NOBODY, now)
        table.dialled(due.peer, "nobody", now)
        now += 600.0


def test_one_that_is_connected_is_left_alone_until_it_is_lost() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    assert dialled(table, 0.0, frozenset({peer(1)})) == []
    assert dialled(table, 0.0) == [peer(1)]
    table.dialled(peer(1), "", 0.5)
    assert dialled(table, 2.0, frozenset({peer(1)})) == []
    assert dialled(table, 9.0) == [peer(1)]


def test_one_that_moved_is_tried_at_once_at_its_new_address() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    assert dialled(table, 0.0) == [peer(1)]
    table.dialled(peer(1), "nobody answers", 0.0)
    table.sighted(sighting(1, name="new name", port=2), 1.0)
    (again,) = table.next_dials(NOBODY, 1.0)
    assert again.addresses == ("/ip4/10.0.0.1/tcp/2/p2p/x",)


def test_being_seen_again_as_before_begins_nothing_anew() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    assert dialled(table, 0.0) == [peer(1)]
    table.dialled(peer(1), "nobody answers", 0.0)
    table.sighted(sighting(1), 1.0)
    assert dialled(table, 1.0) == []


def test_of_two_that_see_each_other_the_larger_id_lets_the_other_dial_first() -> None:
    larger = NeighbourTable(PeerId(bytes([255]) * 38), LIMITS)
    larger.sighted(sighting(1), 0.0)
    assert dialled(larger, 0.0) == []
    assert dialled(larger, 1.5) == [peer(1)]


def test_dials_are_few_at_a_time_and_paced() -> None:
    table = NeighbourTable(OWN, LIMITS)
    for number in range(1, 11):
        table.sighted(sighting(number), 0.0)
    first = dialled(table, 0.0)
    assert len(first) == 2
    assert dialled(table, 0.0) == []
    for each in first:
        table.dialled(each, "nobody", 0.0)
    third = dialled(table, 0.0)
    assert len(third) == 1, "the burst is used up"
    table.dialled(third[0], "nobody", 0.0)
    assert dialled(table, 0.5) == []
    assert len(dialled(table, 2.0)) == 2


def test_thousands_of_claims_are_few_neighbours_and_few_dials() -> None:
    table = NeighbourTable(OWN, LIMITS)
    n_dials = 0
    for number in range(3000):
        now = number / 100.0
        table.sighted(sighting(number), now)
        for each in dialled(table, now):
            n_dials += 1
            table.dialled(each, "nobody", now)
    assert len(table.neighbours(lambda _: "")) == 20
    assert n_dials <= 3 + 30


def test_whoever_was_reached_is_not_pushed_out_by_claims() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    dialled(table, 0.0, frozenset({peer(1)}))
    for number in range(2, 200):
        table.sighted(sighting(number), 1.0)
    assert peer(1) in [row.peer for row in table.neighbours(lambda _: "")]
    assert len(table.neighbours(lambda _: "")) == 20


def test_names_that_restarts_left_behind_are_few_and_the_last_one_that_goes_ends_the_neighbour() -> None:
    table = NeighbourTable(OWN, LIMITS)
    for number in range(5):
        table.sighted(sighting(1, name=f"run {number}"), float(number))
    table.gone("run 0")
    table.gone("run 4")
    assert len(table.neighbours(lambda _: "")) == 1
    table.gone("run 3")
    assert table.neighbours(lambda _: "") == []
    table.dialled(peer(1), "", 9.0)


def test_another_version_is_listed_and_not_dialled() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1, version=0), 0.0)
    assert dialled(table, 0.0) == []
    assert [row.state for row in table.neighbours(lambda _: "")] == ["other version"]


def test_connections_that_prove_nothing_are_let_go_when_they_are_many() -> None:
    table = NeighbourTable(OWN, LIMITS)
    for number in range(1, 5):
        table.sighted(sighting(number), 0.0)
    strangers = [(peer(number), float(number)) for number in range(1, 5)]
    assert table.too_many(strangers, 20.0) == []
    assert table.too_many(strangers, 40.0) == [peer(1), peer(2)]
    assert set(dialled(table, 40.0, frozenset({peer(3), peer(4)}))) == set()
    assert table.too_many([(peer(9), 0.0), *strangers[:2]], 40.0) == []


def test_after_a_change_of_network_everybody_is_due() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    assert dialled(table, 0.0) == [peer(1)]
    table.dialled(peer(1), "nobody", 0.0)
    table.retry_all(0.5)
    assert dialled(table, 0.5) == [peer(1)]


def test_the_last_seen_neighbour_comes_first_with_what_is_known_of_its_connection() -> None:
    table = NeighbourTable(OWN, LIMITS)
    table.sighted(sighting(1), 0.0)
    table.sighted(sighting(2), 1.0)
    states = {peer(1): "member"}
    found = [(row.peer, row.state) for row in table.neighbours(lambda each: states.get(each, ""))]
    assert found == [(peer(2), "found"), (peer(1), "member")]
