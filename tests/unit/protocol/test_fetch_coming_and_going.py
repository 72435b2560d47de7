"""Providers that turn up while a fetch is under way, and those that go and come back."""

import random
from collections.abc import Iterable, Sequence

import pytest

from kvnet.protocol.fetch import (
    ChunkVerified,
    Completed,
    DropPeer,
    DropReason,
    Failed,
    FetchLimits,
    FetchMachine,
    RequestChunks,
)
from kvnet.protocol.fetch_roster import MAX_COMEBACKS
from tests.unit.protocol import swarm
from tests.unit.protocol.swarm import Event, Swarm, entries_of, honest, make_chunks, peer, refuses

ONE = FetchLimits(min_rate_bytes_s=1.0, active_peers=1)
PATIENT = FetchLimits(min_rate_bytes_s=1.0, active_peers=2, patience_s=30.0)
A, B = peer("a"), peer("b")


def machine_of(n_chunks: int, *providers: bytes, limits: FetchLimits = PATIENT) -> tuple[FetchMachine, Sequence[bytes]]:
    chunks = make_chunks(n_chunks)
    return FetchMachine(
        entries_of(chunks), range(n_chunks), [peer(each.decode()) for each in providers], limits=limits
    ), chunks


def flaky(every: int) -> swarm.Script:
    """Its connection breaks at each chunk of that many, again and again."""
    asked = 0

    def script(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
        nonlocal asked
        asked += 1
        return [Event(0.01, "failed")] if asked % every == 0 else honest(index, chunks, rng)

    return script


# --- turning up -------------------------------------------------------------------------------------------------------


def test_provider_that_turns_up_is_asked_at_once_when_there_is_room_for_it() -> None:
    machine, _ = machine_of(8, b"a")
    assert machine.start(0.0) == [RequestChunks(A, (0, 1))]
    assert machine.provider_found(B, 0.1) == [RequestChunks(B, (2, 3))]


def test_provider_that_turns_up_with_a_part_is_asked_for_that() -> None:
    machine, _ = machine_of(8, b"a")
    machine.start(0.0)
    assert machine.provider_found(B, 0.1, holds={6, 7}) == [RequestChunks(B, (6, 7))]


def test_provider_that_turns_up_when_everything_is_asked_for_takes_over_what_is_late() -> None:
    """The only one there was has become slow, and everything was asked of it before."""
    machine, chunks = machine_of(6, b"a", limits=FetchLimits(min_rate_bytes_s=1.0, duplicate_share=0.5))
    machine.start(0.0)
    machine.chunk_arrived(A, 0, chunks[0], 0.01)
    assert machine.chunk_arrived(A, 1, chunks[1], 0.02)[-1] == RequestChunks(A, (5,))
    machine.bytes_arrived(A, 1, 1.0)
    assert machine.provider_found(B, 1.1) == [RequestChunks(B, (5,))]


def test_no_more_providers_are_remembered_than_the_limit() -> None:
    machine, _ = machine_of(8, b"a", limits=FetchLimits(active_peers=2, max_providers=1))
    machine.start(0.0)
    assert machine.provider_found(B, 0.1) == []


# --- going and coming back --------------------------------------------------------------------------------------------


def test_provider_that_was_given_up_is_asked_again_when_it_comes_back() -> None:
    machine, _ = machine_of(8, b"a", b"b", limits=FetchLimits(min_rate_bytes_s=1.0, active_peers=2, attempts=1))
    machine.start(0.0)
    machine.peer_failed(B, 0.1)
    assert machine.provider_found(B, 0.2) == [RequestChunks(B, (2, 3))]


def test_provider_that_did_not_know_the_artifact_is_asked_when_it_has_it() -> None:
    machine, _ = machine_of(8, b"a", b"b")
    machine.start(0.0)
    assert machine.chunk_refused(B, 2, "unknown", 0.1) == [DropPeer(B, DropReason.UNKNOWN)]
    assert machine.provider_found(B, 0.2, holds={2, 3, 4}) == [RequestChunks(B, (2, 3))]


@pytest.mark.parametrize("how", ["bad", "unasked"])
def test_provider_that_sent_something_wrong_is_not_asked_again_however_often_it_comes_back(how: str) -> None:
    machine, chunks = machine_of(8, b"a", b"b")
    machine.start(0.0)
    machine.chunk_arrived(B, 2 if how == "bad" else 7, chunks[0], 0.1)
    assert machine.provider_found(B, 0.2) == []


def test_provider_that_is_asked_or_waits_its_turn_does_not_count_as_back() -> None:
    machine, _ = machine_of(8, b"a", b"b", limits=ONE)
    machine.start(0.0)
    assert machine.provider_found(A, 0.1) == []
    assert machine.provider_found(B, 0.1) == []


def test_provider_that_only_ever_comes_back_is_not_waited_for_without_end() -> None:
    machine, chunks = machine_of(8, b"a", b"b", limits=FetchLimits(min_rate_bytes_s=1.0, active_peers=2, attempts=1))
    machine.start(0.0)
    for turn in range(MAX_COMEBACKS):
        machine.peer_failed(B, turn + 0.1)
        assert machine.provider_found(B, turn + 0.2) != []
    machine.peer_failed(B, 9.1)
    assert machine.provider_found(B, 9.2) == []
    # One that brought something in between has more to bring.
    machine, chunks = machine_of(20, b"a", b"b", limits=FetchLimits(min_rate_bytes_s=1.0, active_peers=2, attempts=1))
    [_, asked] = machine.start(0.0)
    for turn in range(2 * MAX_COMEBACKS):
        assert isinstance(asked, RequestChunks)
        index = asked.indices[0]
        assert ChunkVerified(index, chunks[index], B) in machine.chunk_arrived(B, index, chunks[index], turn + 0.1)
        machine.peer_failed(B, turn + 0.2)
        [asked] = machine.provider_found(B, turn + 0.3)


def test_only_provider_whose_connection_breaks_now_and_then_gives_everything() -> None:
    """More often than it would be tried in vain; what came in between counts."""
    done = Swarm(make_chunks(200), {"flaky": flaky(20)}, ONE).run()
    done.assert_complete()
    assert done.reasons("flaky").count(DropReason.GONE) > ONE.attempts


def test_provider_whose_session_was_replaced_is_asked_in_the_new_one() -> None:
    """It refuses what names the old session as if it knew nothing; it had it a moment ago."""
    machine, chunks = machine_of(8, b"a", limits=ONE)
    machine.start(0.0)
    machine.chunk_arrived(A, 0, chunks[0], 0.1)
    assert machine.chunk_refused(A, 1, "unknown", 0.2) == [DropPeer(A, DropReason.GONE)]
    assert machine.on_time(1.2) == [RequestChunks(A, (1,))]
    # That it says so once more is to be believed.
    [dropped, failed] = machine.chunk_refused(A, 1, "unknown", 1.3)
    assert dropped == DropPeer(A, DropReason.UNKNOWN)
    assert isinstance(failed, Failed)


# --- patience ---------------------------------------------------------------------------------------------------------


def test_fetch_with_patience_goes_on_with_a_provider_that_was_away() -> None:
    asked_s: list[float] = []

    def away_for_a_while(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
        asked_s.append(done.now)
        away = len(asked_s) > 3 and asked_s[3] <= done.now < asked_s[3] + 20.0
        return [Event(0.01, "failed")] if away else honest(index, chunks, rng)

    done = Swarm(make_chunks(100), {"only": away_for_a_while}, PATIENT)
    done.run()
    done.assert_complete()
    assert 20.0 < done.now < 30.0


def test_fetch_with_patience_ends_when_it_is_over() -> None:
    done = Swarm(make_chunks(10), {"only": swarm.disconnects}, PATIENT).run()
    assert isinstance(done.outcome, Failed)
    assert done.outcome.missing == tuple(range(10))
    assert PATIENT.patience_s <= done.now <= PATIENT.patience_s + PATIENT.patient_retry_s + 1.0


def test_lone_provider_that_says_nothing_is_tried_no_longer_than_patience_lasts() -> None:
    done = Swarm(make_chunks(10), {"only": swarm.silent}, PATIENT).run()
    assert isinstance(done.outcome, Failed)
    assert done.outcome.reasons[0][1] is DropReason.SILENT
    assert done.now == pytest.approx(PATIENT.patience_s)


def test_provider_that_was_silent_and_is_tried_late_has_time_to_answer() -> None:
    machine, chunks = machine_of(1, b"a")
    machine.start(0.0)
    for now in (10.0, 11.0, 21.0, 23.0, 29.0):
        machine.on_time(now)
    assert not machine.ended
    assert machine.expected_length(A, 0) == len(chunks[0])
    assert machine.chunk_arrived(A, 0, chunks[0], 29.5)[-1] == Completed()


@pytest.mark.parametrize("script", [swarm.flips, refuses("unknown")])
def test_patience_is_not_for_those_who_have_nothing_to_give(script: swarm.Script) -> None:
    done = Swarm(make_chunks(10), {"only": script}, PATIENT).run()
    assert isinstance(done.outcome, Failed)
    assert done.now < 1.0


def test_provider_that_turns_up_while_a_fetch_waits_is_asked_at_once() -> None:
    machine, chunks = machine_of(1)
    assert not machine.waiting
    assert machine.start(5.0) == []
    assert (machine.waiting, machine.next_deadline()) == (True, 35.0)
    assert machine.on_time(20.0) == []
    assert machine.provider_found(A, 21.0) == [RequestChunks(A, (0,))]
    assert (machine.waiting, machine.ended) == (False, False)
    assert machine.chunk_arrived(A, 0, chunks[0], 21.5)[-1] == Completed()
    assert (machine.waiting, machine.ended) == (False, True)


def test_fetch_that_waits_for_anybody_ends_when_patience_is_over() -> None:
    machine, _ = machine_of(3)
    machine.start(5.0)
    assert machine.on_time(35.0) == [Failed((0, 1, 2), ())]


# --- time -------------------------------------------------------------------------------------------------------------


def test_letting_one_silent_peer_go_may_let_another_go_that_was_silent_as_long() -> None:
    """The driver calls late, when two are overdue; the idle one takes over from the second on account of the first."""
    chunks = make_chunks(6)
    a, b, c = (peer(name) for name in "abc")
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=3, duplicate_share=0.0, start_chunks=1)
    holds = {a: {0, 2}, b: {1, 3}, c: {2, 4}}
    machine = FetchMachine(entries_of(chunks), range(5), [a, b, c], holds=holds, limits=limits)
    assert machine.start(0.0) == [RequestChunks(a, (0,)), RequestChunks(b, (1,)), RequestChunks(c, (2,))]
    machine.chunk_arrived(a, 0, chunks[0], 0.1)
    instructions = machine.on_time(60.0)
    assert [each for each in instructions if isinstance(each, DropPeer)] == [
        DropPeer(b, DropReason.SILENT),
        DropPeer(c, DropReason.SLOW),
    ]
    assert RequestChunks(a, (2,)) in instructions
