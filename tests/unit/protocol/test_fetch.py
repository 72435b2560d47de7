"""Fetching: every chunk verified on arrival, liars named, nobody waited for without end."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvnet.errors import NotFoundError
from kvnet.format.chunks import ABSENT, ChunkEntry
from kvnet.format.hashes import blake3_hash
from kvnet.protocol.fetch import (
    MISCONDUCT,
    ChunkOrder,
    ChunkVerified,
    Completed,
    DropPeer,
    DropReason,
    Failed,
    FetchLimits,
    FetchMachine,
    Instruction,
    RequestChunks,
)
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.chunks import MAX_CHUNKS_PER_REQUEST
from tests.unit.protocol import swarm
from tests.unit.protocol.swarm import LIARS, Swarm, entries_of, honest, make_chunks, peer, refuses

# A least rate that 200-byte chunks of an honest peer meet.
LIMITS = FetchLimits(min_rate_bytes_s=50.0, active_peers=1, trials=0)


def test_one_honest_provider_gives_everything() -> None:
    done = Swarm(make_chunks(64), {"honest": honest}).run()
    done.assert_complete()
    assert done.reasons("honest") == [DropReason.DONE]


def test_first_request_is_small_and_the_window_grows_with_the_rate() -> None:
    done = Swarm(make_chunks(1000), {"honest": honest}).run()
    sizes = [len(indices) for _, _, indices in done.requests]
    assert sizes[0] == 2
    assert max(sizes) > 50
    assert all(size <= MAX_CHUNKS_PER_REQUEST for size in sizes)


def test_channel_that_can_have_more_on_its_way_is_asked_for_more() -> None:
    chunks = [bytes([index]) * 1000 for index in range(20)]
    asked: dict[int, int] = {}
    for window_bytes in (4000, 8000):
        limits = FetchLimits(max_window_bytes=4000)
        machine = FetchMachine(entries_of(chunks), range(20), [peer("a")], limits=limits)
        machine.window_known(peer("a"), window_bytes)
        machine.window_known(peer("nobody"), 1)
        instructions = machine.start(0.0)
        for index in (0, 1):
            instructions += machine.chunk_arrived(peer("a"), index, chunks[index], 0.0)
        asked[window_bytes] = sum(len(each.indices) for each in instructions if isinstance(each, RequestChunks))
    # More is asked for once half of it has come.
    assert asked == {4000: 2 + 3, 8000: 2 + 8}


def test_what_came_at_once_at_first_does_not_have_everything_asked_of_one_peer() -> None:
    """As many bytes in no time are no rate, and what one peer is asked for is there for no other who turns up."""
    chunks = [bytes([index]) * 1000 for index in range(100)]
    machine = FetchMachine(entries_of(chunks), range(100), [peer("a")], limits=LIMITS)
    machine.start(0.0)
    [_, asked] = machine.chunk_arrived(peer("a"), 0, chunks[0], 0.0)
    assert asked == RequestChunks(peer("a"), (2, 3, 4))


def test_no_more_is_asked_for_than_a_stream_can_buffer() -> None:
    limits = FetchLimits(max_window_bytes=1000, min_rate_bytes_s=50.0)
    chunks = make_chunks(50)
    machine = FetchMachine(entries_of(chunks), range(50), [peer("a")], limits=limits)
    asked: list[int] = []
    waiting = machine.start(0.0)
    while waiting:
        instruction = waiting.pop(0)
        if isinstance(instruction, RequestChunks):
            asked += instruction.indices
            assert sum(len(chunks[index]) for index in asked) <= 1000
        if not waiting and asked:
            index = asked.pop(0)
            waiting = machine.chunk_arrived(peer("a"), index, chunks[index], 0.0)
    assert machine.ended


def test_channel_that_buffers_nothing_may_have_more_on_its_way() -> None:
    chunks = make_chunks(400)
    limits = FetchLimits(max_window_bytes=1000, min_rate_bytes_s=50.0)

    def most_at_once(window_bytes: int) -> int:
        machine = FetchMachine(entries_of(chunks), range(400), [peer("a")], limits=limits)
        machine.window_known(peer("stranger"), window_bytes)
        waiting, asked, now, most = machine.start(0.0), list[int](), 0.0, 0
        machine.window_known(peer("a"), window_bytes)
        while waiting:
            instruction = waiting.pop(0)
            if isinstance(instruction, RequestChunks):
                asked += instruction.indices
                most = max(most, sum(len(chunks[index]) for index in asked))
            if not waiting and asked:
                now += 0.001
                index = asked.pop(0)
                waiting = machine.chunk_arrived(peer("a"), index, chunks[index], now)
        assert machine.ended
        return most

    assert most_at_once(1000) <= 1000
    assert 2000 < most_at_once(5000) <= 5000


def test_chunks_are_asked_for_in_plan_order() -> None:
    done = Swarm(make_chunks(40), {"honest": honest}, needed=[30, 2, 17, 5]).run()
    assert [index for _, _, indices in done.requests for index in indices] == [2, 5, 17, 30]


def test_chunks_already_held_are_not_asked_for() -> None:
    done = Swarm(make_chunks(40), {"honest": honest}, have=frozenset(range(0, 40, 2))).run()
    done.assert_complete()
    assert {index for _, _, indices in done.requests for index in indices} == set(range(1, 40, 2))


def test_nothing_to_fetch_is_done_at_once() -> None:
    machine = FetchMachine(entries_of(make_chunks(2)), [0, 1], [], have={0, 1})
    assert machine.start(0.0) == [Completed()]


def test_nobody_to_ask_fails_at_once_with_the_number_of_missing_chunks() -> None:
    machine = FetchMachine(entries_of(make_chunks(3)), range(3), [])
    [failed] = machine.start(0.0)
    assert failed == Failed((0, 1, 2), ())
    assert isinstance(failed, Failed)
    assert failed.text == "3 chunks are missing and no peer has them"


@pytest.mark.parametrize(
    ("missing", "reasons", "text"),
    [
        ((4,), [], "a chunk is missing and no peer has it"),
        ((4,), [DropReason.SILENT], "a chunk is missing: the only provider fell silent"),
        (
            tuple(range(1200)),
            [DropReason.GONE, DropReason.EXHAUSTED, DropReason.GONE],
            "1,200 chunks are missing: of 3 providers 2 broke off, 1 did not have what is missing",
        ),
    ],
)
def test_a_failure_says_what_became_of_each_provider(
    missing: tuple[int, ...], reasons: list[DropReason], text: str
) -> None:
    named = tuple((PeerId(bytes([number])), reason) for number, reason in enumerate(reasons))
    assert Failed(missing, named).text == text


@pytest.mark.parametrize("reason", sorted(set(DropReason) - {DropReason.DONE}))
def test_every_reason_to_ask_a_provider_no_further_is_told_in_words(reason: DropReason) -> None:
    assert " " in Failed((1,), ((PeerId(b"a"), reason),)).text.partition("the only provider ")[2]


def test_chunk_that_its_publisher_left_out_cannot_be_fetched() -> None:
    with pytest.raises(NotFoundError, match="found 1 that the artifact leaves out"):
        FetchMachine([*entries_of(make_chunks(2)), ABSENT], range(3), [peer("a")])


# --- liars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", LIARS)
def test_liar_is_named_at_its_first_lie_and_its_chunks_come_from_another(lie: str) -> None:
    done = Swarm(make_chunks(64), {"liar": LIARS[lie], "honest": honest}, LIMITS).run()
    done.assert_complete()
    [reason] = done.reasons("liar")
    assert reason in MISCONDUCT
    assert done.arrived.get(peer("liar"), 0) <= 2
    assert done.asked("liar") <= 2
    assert done.reasons("honest") == [DropReason.DONE]


@pytest.mark.parametrize("lie", LIARS)
def test_liar_alone_makes_the_fetch_fail_and_nothing_of_it_is_kept_unverified(lie: str) -> None:
    done = Swarm(make_chunks(64), {"liar": LIARS[lie]}, LIMITS).run()
    assert isinstance(done.outcome, Failed)
    assert all(data == done.chunks[index] for index, data in done.verified.items())
    assert len(done.outcome.missing) == 64 - len(done.verified)


def test_peer_that_flips_a_byte_in_every_chunk_wastes_at_most_three_chunks() -> None:
    """64 chunks, two providers: checked on arrival, completed from the good one, the bad one asked at most 3 times."""
    done = Swarm(make_chunks(64), {"bad": swarm.flips, "good": honest}, LIMITS).run()
    done.assert_complete()
    assert done.asked("bad") <= 3
    assert done.arrived[peer("bad")] <= 3
    assert set(done.senders.values()) == {peer("good")}


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.nightly)])
def test_thousands_of_deliveries_with_lies_among_them_let_none_through(rounds: int) -> None:
    """5 % of the peers lie, each in its own way: 0 accepted, each named within 1 bad chunk, 0 honest ones banned."""
    chunks = make_chunks(2000, size=40)
    rng = random.Random(5)
    delivered = 0
    for round_number in range(rounds):
        scripts = {}
        for number in range(20):
            lies = rng.random() < 0.05 or number == 0
            scripts[f"{'liar' if lies else 'honest'}-{number}"] = rng.choice(list(LIARS.values())) if lies else honest
        done = Swarm(chunks, scripts, FetchLimits(min_rate_bytes_s=1.0, active_peers=4), seed=round_number).run()
        done.assert_complete()
        delivered += sum(done.arrived.values())
        for _, who, reason in done.drops:
            assert reason not in MISCONDUCT or who.startswith(b"liar")
        for name in scripts:
            if name.startswith("liar"):
                assert (
                    done.arrived.get(peer(name), 0) - sum(1 for who in done.senders.values() if who == peer(name)) <= 1
                )
    assert delivered >= 2000 * rounds


@pytest.mark.parametrize("true", [True, False])
def test_hash_that_the_driver_computed_on_arrival_is_the_one_compared(true: bool) -> None:
    chunks = make_chunks(1)
    machine = FetchMachine(entries_of(chunks), [0], [peer("a")], limits=LIMITS)
    machine.start(0.0)
    digest = blake3_hash(chunks[0] if true else b"something else")
    view = memoryview(bytearray(chunks[0]))
    instructions = machine.chunk_arrived(peer("a"), 0, view, 1.0, digest=digest)
    if true:
        assert instructions[0] == ChunkVerified(0, view, peer("a"))
        assert isinstance(instructions[-1], Completed)
    else:
        assert instructions[0] == DropPeer(peer("a"), DropReason.BAD_CHUNK)


def test_wrong_length_is_noticed_before_the_bytes_are_read() -> None:
    chunks = make_chunks(2)
    machine = FetchMachine(entries_of(chunks), [0], [peer("a")])
    machine.start(0.0)
    assert machine.expected_length(peer("a"), 0) == len(chunks[0])
    assert machine.header_arrived(peer("a"), 0, len(chunks[0]), 0.1) == []
    dropped = machine.header_arrived(peer("a"), 0, 4 << 30, 0.2)
    assert dropped[0] == DropPeer(peer("a"), DropReason.BAD_CHUNK)
    assert machine.expected_length(peer("a"), 0) is None


def test_bytes_that_match_the_hash_but_not_the_length_of_the_chunk_list_are_not_accepted() -> None:
    """A publisher wrote a list that contradicts itself: nobody can fetch that chunk."""
    chunks = make_chunks(1)
    [entry] = entries_of(chunks)
    machine = FetchMachine([ChunkEntry(entry.length_bytes + 1, entry.hash)], [0], [peer("a")])
    machine.start(0.0)
    assert machine.chunk_arrived(peer("a"), 0, chunks[0], 0.1)[0] == DropPeer(peer("a"), DropReason.BAD_CHUNK)


# --- peers that stall -----------------------------------------------------------------------------------------

STALLERS = {
    "sends-nothing": swarm.silent,
    "stops-half-way": swarm.stops_half_way,
    "one-byte-a-second": swarm.one_byte_a_second,
    "breaks-off": swarm.disconnects,
}
LARGE = make_chunks(16, size=50_000)


@pytest.mark.parametrize("kind", STALLERS)
def test_stalled_transfer_moves_to_the_honest_peer_and_finishes(kind: str) -> None:
    done = Swarm(LARGE, {"stalls": STALLERS[kind], "honest": honest}).run()
    done.assert_complete()
    assert done.now < 10.0
    assert not MISCONDUCT.intersection(done.reasons("stalls"))


@pytest.mark.parametrize("kind", STALLERS)
def test_stalled_transfer_without_another_peer_fails_in_bounded_time_naming_the_missing_chunks(kind: str) -> None:
    done = Swarm(LARGE, {"stalls": STALLERS[kind]}).run()
    assert isinstance(done.outcome, Failed)
    assert done.outcome.text.startswith("16 chunks are missing: the only provider ")
    limits = FetchLimits()
    assert done.now <= limits.attempts * (limits.idle_s + limits.rate_window_s) + 8 * limits.retry_s


def test_silence_is_suffered_longer_when_nobody_else_could_be_asked() -> None:
    alone = Swarm(LARGE, {"silent": swarm.silent}).run()
    assert alone.drops[0] == (FetchLimits().idle_s, peer("silent"), DropReason.SILENT)
    together = Swarm(LARGE, {"silent": swarm.silent, "honest": honest}, FetchLimits(active_peers=1)).run()
    assert together.drops[0] == (FetchLimits().idle_with_others_s, peer("silent"), DropReason.SILENT)


def test_slow_but_steady_peer_above_the_least_rate_is_kept() -> None:
    def steady(index, chunks, rng):  # type: ignore[no-untyped-def]
        data = chunks[index]
        yield swarm.Event(0.1, "header", index, len(data))
        for _ in range(len(data) // 5000):
            yield swarm.Event(0.2, "bytes", index, 5000)
        yield swarm.Event(0.2, "chunk", index, len(data), data)

    done = Swarm(LARGE, {"steady": steady}).run()
    done.assert_complete()
    assert done.reasons("steady") == [DropReason.DONE]


@pytest.mark.parametrize("n_limited", [1, 2, 4])
def test_peers_that_may_send_only_slowly_are_kept_when_nobody_is_faster(n_limited: int) -> None:
    scripts = {f"limited {number}": swarm.at_rate(1000.0, pieces=400) for number in range(n_limited)}
    done = Swarm(LARGE, scripts).run()
    done.assert_complete()
    for name in scripts:
        assert done.reasons(name) == [DropReason.DONE]


def test_slow_peer_makes_room_for_one_that_was_not_tried() -> None:
    scripts = {"limited": swarm.at_rate(1000.0, pieces=400), "honest": honest}
    done = Swarm(LARGE, scripts, FetchLimits(active_peers=1, trials=0)).run()
    done.assert_complete()
    assert done.drops[0][1:] == (peer("limited"), DropReason.SLOW)
    assert done.drops[0][0] == pytest.approx(FetchLimits().rate_window_s, abs=0.1)
    assert done.reasons("honest") == [DropReason.DONE]


def test_byte_a_second_is_too_slow_even_from_the_only_provider() -> None:
    done = Swarm(LARGE, {"slow": swarm.one_byte_a_second}).run()
    assert done.reasons("slow") == [DropReason.SLOW] * FetchLimits().attempts


def test_time_in_which_we_do_not_read_is_not_held_against_the_peer() -> None:
    chunks = make_chunks(3)
    machine = FetchMachine(entries_of(chunks), range(3), [peer("a"), peer("b")], limits=LIMITS)
    machine.start(0.0)
    machine.chunk_arrived(peer("a"), 0, chunks[0], 1.0)
    machine.paused(peer("a"))
    assert machine.next_deadline() is None
    assert machine.on_time(100.0) == []
    machine.resumed(peer("a"), 100.0)
    assert machine.next_deadline() == 102.0
    assert machine.on_time(101.0) == []
    assert machine.on_time(102.0)[0] == DropPeer(peer("a"), DropReason.SILENT)
    # Neither does anything to a peer that is not asked.
    machine.paused(peer("a"))
    machine.resumed(peer("a"), 102.0)
    assert machine.next_deadline() is not None


def test_late_chunk_wakes_nobody_again_and_again_while_another_peer_is_paused() -> None:
    chunks = make_chunks(8)
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=2)
    machine = FetchMachine(entries_of(chunks), range(8), [peer("a"), peer("b")], limits=limits)
    machine.start(0.0)
    machine.chunk_arrived(peer("a"), 0, chunks[0], 0.1)
    machine.paused(peer("a"))
    # What b was asked for is late by now, and a, which has more to do, is only not read from.
    deadline = machine.next_deadline()
    assert deadline is not None
    assert deadline > 1.0
    assert machine.on_time(1.0) == []
    assert machine.next_deadline() == deadline


def test_pause_ends_with_the_attempt_in_which_it_began() -> None:
    chunks = make_chunks(3)
    machine = FetchMachine(entries_of(chunks), range(3), [peer("a")], limits=LIMITS)
    machine.start(0.0)
    machine.paused(peer("a"))
    machine.peer_failed(peer("a"), 1.0)
    assert machine.on_time(2.0) == [RequestChunks(peer("a"), (0,))]
    assert machine.next_deadline() == 10.0


def test_flaky_provider_is_tried_again_after_a_growing_pause() -> None:
    calls = 0

    def flaky(index, chunks, rng):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return swarm.disconnects(index, chunks, rng) if calls <= 3 else honest(index, chunks, rng)

    done = Swarm(make_chunks(20), {"flaky": flaky}, LIMITS).run()
    done.assert_complete()
    times = [time for time, _, _ in done.requests]
    assert done.reasons("flaky") == [DropReason.GONE, DropReason.GONE, DropReason.DONE]
    assert [round(later - earlier, 2) for earlier, later in pairwise(times[:3])] == [1.01, 2.01]


@pytest.mark.parametrize("late_events", [False, True])
def test_what_was_under_way_when_a_stream_was_closed_harms_no_honest_peer(late_events: bool) -> None:
    calls = 0

    def pauses_once(index, chunks, rng):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        wait = 30.0 if calls == 2 else 0.01
        return [
            swarm.Event(wait, "header", index, len(chunks[index])),
            swarm.Event(0.01, "chunk", index, len(chunks[index]), chunks[index]),
        ]

    done = Swarm(make_chunks(30), {"pauses": pauses_once}, LIMITS, late_events=late_events).run()
    done.assert_complete()
    assert done.reasons("pauses") == [DropReason.SLOW, DropReason.DONE]
    assert not MISCONDUCT.intersection(done.reasons("pauses"))


def test_late_answers_of_an_earlier_attempt_are_ignored_once() -> None:
    chunks = make_chunks(2)
    machine = FetchMachine(entries_of(chunks), range(2), [peer("a")], limits=LIMITS)
    machine.start(0.0)
    machine.on_time(10.0)
    assert machine.on_time(11.0) == [RequestChunks(peer("a"), (0,))]
    assert machine.header_arrived(peer("a"), 1, 5, 11.6) == []
    assert machine.chunk_refused(peer("a"), 1, "busy", 11.7) == []
    [dropped, *_] = machine.chunk_arrived(peer("a"), 1, chunks[1], 11.8)
    assert dropped == DropPeer(peer("a"), DropReason.UNASKED)


# --- refusals -------------------------------------------------------------------------------------------------


def test_chunk_that_one_peer_does_not_hold_comes_from_another() -> None:
    done = Swarm(make_chunks(30), {"part": refuses("not_held", range(10, 20)), "whole": honest}, LIMITS).run()
    done.assert_complete()
    assert {index for index, who in done.senders.items() if who == peer("whole")} == set(range(10, 20))
    assert done.reasons("part") == [DropReason.EXHAUSTED]


def test_two_peers_with_a_part_each_make_a_whole() -> None:
    scripts = {"first": refuses("not_held", range(15)), "second": refuses("not_held", range(15, 30))}
    Swarm(make_chunks(30), scripts, LIMITS).run().assert_complete()


def test_chunks_that_nobody_holds_are_named() -> None:
    scripts = {"first": refuses("not_held", [7, 9]), "second": refuses("not_held", [9, 11])}
    done = Swarm(make_chunks(30), scripts, LIMITS).run()
    assert isinstance(done.outcome, Failed)
    assert done.outcome.missing == (9,)
    assert set(done.outcome.reasons) == {(peer("first"), DropReason.EXHAUSTED), (peer("second"), DropReason.EXHAUSTED)}
    assert done.outcome.text == "a chunk is missing: of 2 providers 2 did not have what is missing"


@pytest.mark.parametrize("reason", ["unknown", "not_serving"])
def test_peer_that_does_not_know_the_artifact_is_not_asked_again(reason: str) -> None:
    done = Swarm(make_chunks(30), {"other": refuses(reason), "honest": honest}, LIMITS).run()
    done.assert_complete()
    assert done.reasons("other") == [DropReason.UNKNOWN]
    assert done.asked("other") == 1


@pytest.mark.parametrize("reason", ["busy", "a_reason_of_a_later_version"])
def test_busy_peer_is_tried_again_when_nobody_else_is_left(reason: str) -> None:
    done = Swarm(make_chunks(30), {"busy": refuses(reason)}, LIMITS).run()
    assert isinstance(done.outcome, Failed)
    assert done.reasons("busy") == [DropReason.BUSY] * 3


# --- several peers --------------------------------------------------------------------------------------------


def test_several_peers_can_be_asked_at_once() -> None:
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=3, trials=0, max_window_bytes=2000)
    done = Swarm(make_chunks(200), dict.fromkeys("abcd", honest), limits).run()
    done.assert_complete()
    assert {who for _, who, _ in done.requests} == {peer("a"), peer("b"), peer("c")}
    asked = [index for _, _, indices in done.requests for index in indices]
    assert len(asked) == len(set(asked)) == 200


def test_provider_that_turns_up_later_is_asked_when_it_is_needed() -> None:
    chunks = make_chunks(4)
    machine = FetchMachine(entries_of(chunks), range(4), [peer("a"), peer("a")], limits=LIMITS)
    assert machine.start(0.0) == [RequestChunks(peer("a"), (0, 1))]
    assert machine.provider_found(peer("b"), 0.1) == []
    assert machine.provider_found(peer("a"), 0.1) == []
    assert machine.peer_failed(peer("a"), 0.2) == [
        DropPeer(peer("a"), DropReason.GONE),
        RequestChunks(peer("b"), (0, 1)),
    ]


def test_events_of_peers_that_are_not_asked_change_nothing() -> None:
    chunks = make_chunks(4)
    machine = FetchMachine(entries_of(chunks), range(4), [peer("a"), peer("b")], limits=LIMITS)
    machine.start(0.0)
    stranger = peer("b")
    assert machine.header_arrived(stranger, 0, 1, 0.1) == []
    machine.bytes_arrived(stranger, 5, 0.1)
    machine.bytes_arrived(peer("a"), 0, 0.1)
    assert machine.chunk_arrived(stranger, 0, chunks[0], 0.1) == []
    assert machine.chunk_refused(stranger, 0, "busy", 0.1) == []
    assert machine.peer_failed(stranger, 0.1) == []
    assert machine.missing == 4
    assert machine.missing_bytes == sum(map(len, chunks))


def test_nothing_happens_after_the_end() -> None:
    chunks = make_chunks(1)
    machine = FetchMachine(entries_of(chunks), [0], [peer("a")])
    machine.start(0.0)
    *_, last = machine.chunk_arrived(peer("a"), 0, chunks[0], 0.0)
    assert last == Completed()
    assert machine.on_time(99.0) == []
    assert machine.start(99.0) == []
    assert machine.provider_found(peer("b"), 99.0) == []
    assert machine.next_deadline() is None


@given(
    st.lists(
        st.sampled_from([honest, *LIARS.values(), *STALLERS.values(), refuses("busy"), refuses("not_held", [1, 2, 3])]),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=150)
def test_one_honest_provider_among_any_others_is_enough(scripts: list[swarm.Script], active: int, late: bool) -> None:
    named = {f"peer-{number}": script for number, script in enumerate(scripts)} | {"honest": honest}
    limits = FetchLimits(min_rate_bytes_s=20.0, active_peers=active)
    done = Swarm(make_chunks(25), named, limits, late_events=late).run()
    done.assert_complete()
    for name, script in named.items():
        if script is honest:
            assert not MISCONDUCT.intersection(done.reasons(name))


# --- any order of events --------------------------------------------------------------------------------------

CHUNKS = make_chunks(12)
PEERS = [peer(name) for name in ("one", "two", "three")]
HONEST = peer("three")


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, also those no driver would make: whatever comes out was verified, and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asked: dict[PeerId, list[int]] = {}
        self.verified: set[int] = set()
        self.banned: set[PeerId] = set()
        self.paused: set[PeerId] = set()
        self.outcome: Instruction | None = None

    @initialize(active=st.integers(1, 3), order=st.sampled_from(ChunkOrder), patience_s=st.sampled_from([0.0, 20.0]))
    def begin(self, active: int, order: ChunkOrder, patience_s: float) -> None:
        limits = FetchLimits(
            min_rate_bytes_s=20.0, active_peers=active, start_chunks=3, order=order, patience_s=patience_s
        )
        self.machine = FetchMachine(entries_of(CHUNKS), range(12), PEERS, limits=limits)
        self.obey(self.machine.start(self.now))

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert self.outcome is None
            match instruction:
                case RequestChunks(who, indices):
                    assert who not in self.banned
                    assert not self.verified.intersection(indices)
                    self.asked.setdefault(who, []).extend(indices)
                case DropPeer(who, reason):
                    self.asked.pop(who, None)
                    if reason in MISCONDUCT:
                        self.banned.add(who)
                case ChunkVerified(index, data):
                    assert data == CHUNKS[index]
                    assert index not in self.verified
                    self.verified.add(index)
                case _:
                    self.outcome = instruction

    @rule(who=st.sampled_from(PEERS))
    def delivers_what_was_asked(self, who: PeerId) -> None:
        if self.asked.get(who):
            index = self.asked[who].pop(0)
            assert self.machine.header_arrived(who, index, len(CHUNKS[index]), self.now) == []
            self.obey(self.machine.chunk_arrived(who, index, CHUNKS[index], self.now))

    @rule(who=st.sampled_from(PEERS[:2]), index=st.integers(0, 13), other=st.integers(0, 11))
    def delivers_anything(self, who: PeerId, index: int, other: int) -> None:
        self.obey(self.machine.chunk_arrived(who, index, CHUNKS[other], self.now))

    @rule(who=st.sampled_from(PEERS[:2]), index=st.integers(0, 13), length=st.integers(1, 300))
    def announces_anything(self, who: PeerId, index: int, length: int) -> None:
        self.obey(self.machine.header_arrived(who, index, length, self.now))

    @rule(who=st.sampled_from(PEERS[:2]), index=st.integers(0, 13), reason=st.sampled_from(["busy", "not_held", "x"]))
    def refuses_anything(self, who: PeerId, index: int, reason: str) -> None:
        self.obey(self.machine.chunk_refused(who, index, reason, self.now))

    @rule(who=st.sampled_from([*PEERS, peer("four")]))
    def turns_up(self, who: PeerId) -> None:
        self.obey(self.machine.provider_found(who, self.now))

    @rule(who=st.sampled_from(PEERS[:2]), holds=st.sets(st.integers(0, 11)))
    def says_what_it_holds(self, who: PeerId, holds: set[int]) -> None:
        self.obey(self.machine.holds_changed(who, holds, self.now))

    @rule(who=st.sampled_from(PEERS))
    def pauses(self, who: PeerId) -> None:
        self.machine.paused(who)
        self.paused.add(who)

    @rule(who=st.sampled_from(PEERS))
    def resumes(self, who: PeerId) -> None:
        self.machine.resumed(who, self.now)
        self.paused.discard(who)

    @rule(who=st.sampled_from(PEERS))
    def breaks_off(self, who: PeerId) -> None:
        self.obey(self.machine.peer_failed(who, self.now))

    @rule(seconds=st.floats(0.0, 20.0))
    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.machine.on_time(self.now))

    @rule()
    @precondition(lambda self: not self.machine.ended)
    def waits_for_the_deadline(self) -> None:
        deadline = self.machine.next_deadline()
        self.now = max(self.now, self.now if deadline is None else deadline)
        self.obey(self.machine.on_time(self.now))

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "machine"):
            return
        assert self.machine.missing == 12 - len(self.verified)
        assert HONEST not in self.banned
        assert self.machine.ended == (self.outcome is not None)
        if isinstance(self.outcome, Completed):
            assert self.machine.missing == 0
        if isinstance(self.outcome, Failed):
            assert set(self.outcome.missing) == set(range(12)) - self.verified
        if self.outcome is not None or not self.paused:
            assert (self.machine.next_deadline() is None) == (self.outcome is not None)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=60)
