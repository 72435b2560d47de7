"""Announcing: paced, newest first, again on a timer, at once after a reconnect, and checked."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvnet.protocol.announce import MAX_USES, AnnouncedKey, AnnounceLimits, AnnounceMachine

LIMITS = AnnounceLimits(interval_s=1.2, reprovide_s=900.0, retry_s=30.0, verify_s=60.0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def run(machine: AnnounceMachine, start: float, end: float, n_peers: int = 3) -> list[tuple[float, bytes]]:
    """Drive a machine by its own deadlines, as its driver does."""
    announced = []
    now = start
    while now < end:
        if (due := machine.next_key(now)) is not None:
            announced.append((now, due))
            machine.announced(due, n_peers, now)
        if (check := machine.next_check(now)) is not None:
            machine.checked(check, found=True, now=now)
        deadline = machine.next_deadline()
        assert deadline is None or deadline > now, "a deadline in the past is a busy loop"
        now = end if deadline is None else deadline
    return announced


def test_empty_table_has_nothing_to_do() -> None:
    machine = AnnounceMachine()
    assert machine.next_deadline() is None
    assert machine.next_key(0.0) is None
    assert machine.next_check(0.0) is None


def test_newest_key_is_announced_first() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2), key(3)], now=0.0)
    assert [name for _, name in run(machine, 0.0, 10.0)] == [key(3), key(2), key(1)]


def test_key_added_later_overtakes_those_still_waiting() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2), key(3)], now=0.0)
    first = run(machine, 0.0, 1.0)
    machine.add([key(9)], now=1.0)
    assert [name for _, name in first + run(machine, 1.0, 10.0)] == [key(3), key(9), key(2), key(1)]


def test_announcements_keep_their_distance_so_that_no_server_drops_one() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add(map(key, range(100)), now=0.0)
    times = [time for time, _ in run(machine, 0.0, 300.0)]
    assert len(times) == 100
    for time in times:
        assert sum(1 for other in times if time <= other < time + 10.0) <= 10


def test_everything_is_announced_again_on_a_plain_timer() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2)], now=0.0)
    times = [time for time, name in run(machine, 0.0, 2000.0) if name == key(2)]
    assert times == [0.0, 900.0, 1800.0]


def test_provider_that_was_alone_at_first_is_announced_again_soon() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1)], now=0.0)
    assert run(machine, 0.0, 5.0, n_peers=0) == [(0.0, key(1))]
    assert machine.status(5.0).failed == 1
    assert machine.status(5.0).never == 1
    assert run(machine, 5.0, 100.0) == [(30.0, key(1))]
    assert machine.status(100.0).never == 0


def test_reconnect_makes_everything_due_at_once() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2)], now=0.0)
    run(machine, 0.0, 10.0)
    machine.reconnected(100.0)
    again = run(machine, 100.0, 110.0)
    assert {name for _, name in again} == {key(1), key(2)}
    assert again[0][0] == 100.0


def test_removed_key_is_not_announced_again() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2)], now=0.0)
    in_flight = machine.next_key(0.0)
    assert in_flight == key(2)
    machine.remove([key(2), key(7)])
    machine.announced(key(2), 3, 0.5)
    machine.checked(key(2), found=False, now=0.5)
    assert [name for _, name in run(machine, 1.2, 2000.0)] == [key(1), key(1), key(1)]


def test_key_in_flight_is_not_announced_twice() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1)], now=0.0)
    assert machine.next_key(0.0) == key(1)
    assert machine.next_deadline() is None
    assert machine.next_key(100.0) is None


def test_adding_a_key_again_makes_it_newest_and_keeps_its_timer() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2)], now=0.0)
    machine.add([key(1)], now=0.0)
    assert [name for _, name in run(machine, 0.0, 5.0)] == [key(1), key(2)]
    machine.add([key(1)], now=5.0)
    assert run(machine, 5.0, 800.0) == []


def test_key_that_a_check_does_not_find_is_announced_again_soon() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1)], now=0.0)
    run(machine, 0.0, 0.5)
    machine.checked(key(1), found=False, now=50.0)
    assert run(machine, 50.0, 100.0) == [(80.0, key(1))]
    assert machine.status(100.0).not_found == 1


def test_checks_go_round_the_table() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2), key(3)], now=0.0)
    for now in (0.0, 2.0, 4.0):
        announced = machine.next_key(now)
        assert announced is not None
        machine.announced(announced, 1, now)
    checked = []
    for turn in range(6):
        now = 100.0 + 60.0 * turn
        found = machine.next_check(now)
        assert found is not None
        machine.checked(found, found=True, now=now)
        checked.append(found)
        assert machine.next_check(now + 59.0) is None
    assert Counter(checked) == {key(1): 2, key(2): 2, key(3): 2}
    assert machine.status(500.0).verified == 6


def test_nothing_is_checked_before_it_was_announced() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1)], now=0.0)
    assert machine.next_check(0.0) is None


def test_checks_can_be_turned_off() -> None:
    machine = AnnounceMachine(AnnounceLimits(verify_s=0.0))
    machine.add([key(1)], now=0.0)
    assert run(machine, 0.0, 1.0) == [(0.0, key(1))]
    assert machine.next_check(10_000.0) is None
    assert machine.next_deadline() == 900.0


def test_more_keys_than_the_pace_allows_are_reported_as_falling_behind() -> None:
    machine = AnnounceMachine(AnnounceLimits(interval_s=1.2, reprovide_s=90.0))
    machine.add(map(key, range(70)), now=0.0)
    run(machine, 0.0, 200.0)
    assert not machine.status(200.0).falling_behind
    machine.add(map(key, range(70, 150)), now=200.0)
    run(machine, 200.0, 400.0)
    status = machine.status(400.0)
    assert status.crowded
    assert status.falling_behind
    assert status.behind_s > 0
    assert status.keys == 150
    assert status.never == 0


def test_keys_told_together_are_not_told_together_again() -> None:
    machine = AnnounceMachine(AnnounceLimits(interval_s=0.0, reprovide_s=900.0, verify_s=0.0, spread=0.2))
    machine.add([key(1), key(2)], now=0.0)
    for name, jitter in ((key(2), 0.0), (key(1), 1.0)):
        assert machine.next_key(0.0) == name
        machine.announced(name, 1, 0.0, jitter=jitter)
    assert machine.next_deadline() == 720.0
    assert machine.next_key(720.0) == key(2)
    machine.announced(key(2), 1, 720.0)
    assert machine.next_deadline() == 1080.0


def test_what_is_reused_most_is_announced_before_what_is_newer() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2), key(3)], now=0.0)
    machine.used([key(1), key(9)])
    assert [name for _, name in run(machine, 0.0, 5.0)] == [key(1), key(3), key(2)]
    machine.reconnected(100.0)
    assert [name for _, name in run(machine, 100.0, 105.0)] == [key(1), key(3), key(2)]


def test_however_much_one_key_is_used_no_other_waits_for_ever() -> None:
    machine = AnnounceMachine(AnnounceLimits(interval_s=10.0, reprovide_s=20.0, verify_s=0.0))
    machine.add(map(key, range(4)), now=0.0)
    for _ in range(3 * MAX_USES):
        machine.used([key(0)])
    names = [name for _, name in run(machine, 0.0, 400.0)]
    assert names.count(key(0)) > names.count(key(1))
    assert all(names.count(key(other)) >= 5 for other in range(1, 4))


def test_what_was_kept_goes_on_after_a_restart_and_all_of_it_is_due() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2), key(3)], now=0.0)
    machine.used([key(1)])
    machine.next_key(0.0)
    machine.announced(key(1), 2, 0.0)
    kept, removed = machine.take_changes(10.0)
    assert removed == []
    assert sorted(kept, key=lambda each: each.order) == [
        AnnouncedKey(key(1), 1, 1, 10.0),
        AnnouncedKey(key(2), 2),
        AnnouncedKey(key(3), 3),
    ]
    assert machine.take_changes(10.0) == ([], [])

    again = AnnounceMachine(LIMITS)
    again.restore(kept, now=1000.0)
    again.add([key(2), key(1), key(4)], now=1000.0)
    assert again.status(1000.0).never == 2
    assert again.forget_unused_history() == [key(3)]
    assert [name for _, name in run(again, 1000.0, 1005.0)] == [key(4), key(2), key(1)]


def test_what_is_cleared_and_added_again_keeps_what_became_of_it() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1), key(2)], now=0.0)
    run(machine, 0.0, 5.0)
    machine.clear(10.0)
    assert machine.status(10.0).keys == 0
    machine.add([key(1)], now=20.0)
    assert machine.status(20.0).never == 0
    machine.take_changes(20.0)
    machine.remove([key(1)])
    assert machine.take_changes(20.0) == ([], [key(1)])
    machine.add([key(1)], now=30.0)
    assert machine.status(30.0).never == 1
    assert machine.take_changes(30.0) == ([AnnouncedKey(key(1), 3)], [])


def test_a_peer_that_comes_makes_everything_due_but_not_again_and_again() -> None:
    machine = AnnounceMachine(AnnounceLimits(interval_s=1.0, reprovide_s=900.0, verify_s=0.0, rounds_s=60.0))
    machine.add([key(1)], now=0.0)
    assert run(machine, 0.0, 10.0) == [(0.0, key(1))]
    machine.peers_came(10.0)
    assert run(machine, 10.0, 20.0) == [(10.0, key(1))]
    machine.peers_came(20.0)
    machine.peers_came(30.0)
    assert run(machine, 30.0, 200.0) == [(70.0, key(1))]


def test_a_round_after_a_night_off_is_late_and_not_behind() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add(map(key, range(100)), now=0.0)
    run(machine, 0.0, 200.0)
    machine.reconnected(30_000.0)
    status = machine.status(30_001.0)
    assert status.overdue == 100
    assert status.behind_s == 120.0
    assert not status.falling_behind


def test_that_keys_wait_for_somebody_to_tell_is_counted() -> None:
    machine = AnnounceMachine(LIMITS)
    machine.add([key(1)], now=0.0)
    machine.found_nobody()
    assert machine.status(1.0).alone == 1


@given(st.lists(st.sampled_from(["add", "remove", "fail", "reconnect", "lost", "came", "use"]), max_size=40))
def test_whatever_happens_every_key_is_announced_within_a_round(happenings: list[str]) -> None:
    machine = AnnounceMachine(LIMITS)
    now = 0.0
    count = 0
    for what in happenings:
        if what == "add":
            count += 1
            machine.add([key(count)], now)
        elif what == "remove" and count:
            machine.remove([key(count)])
            count -= 1
        elif what == "reconnect":
            machine.reconnected(now)
        elif what == "came":
            machine.peers_came(now)
        elif what == "use":
            machine.used([key(1)])
        elif what == "lost" and count:
            machine.checked(key(1), found=False, now=now)
        run(machine, now, now + 7.0, n_peers=0 if what == "fail" else 2)
        now += 7.0
    names = {name for _, name in run(machine, now, now + 960.0)}
    assert names == {key(number) for number in range(1, count + 1)}
