"""Fetching from many peers at once: everybody is busy, the slow ones cost little, and little is fetched twice."""

import random

import pytest

from kvnet.protocol.fetch import (
    MISCONDUCT,
    ChunkOrder,
    ChunkVerified,
    Completed,
    DropPeer,
    DropReason,
    FetchLimits,
    FetchMachine,
    RequestChunks,
)
from tests.unit.protocol import swarm
from tests.unit.protocol.swarm import Swarm, at_rate, dies, entries_of, honest, make_chunks, peer

GOOD_BYTES_S = 1_000_000.0
CHUNKS = make_chunks(400, size=100_000)
TOTAL_BYTES = sum(map(len, CHUNKS))


def ideal_s(n_good: int) -> float:
    return TOTAL_BYTES / (n_good * GOOD_BYTES_S)


def duplicate_share(done: Swarm) -> float:
    return (done.received_bytes - TOTAL_BYTES) / TOTAL_BYTES


def eight_sources(seed: int) -> dict[str, swarm.Script]:
    """Three are throttled to 1 %, two die in the middle of a chunk, one never answers; in any order."""
    rng = random.Random(seed)
    good = at_rate(GOOD_BYTES_S)
    scripts = {
        **{f"good-{number}": good for number in range(2)},
        **{f"throttled-{number}": at_rate(GOOD_BYTES_S / 100) for number in range(3)},
        **{f"dies-{number}": dies(good, rng.randrange(40)) for number in range(2)},
        "silent": swarm.silent,
    }
    names = list(scripts)
    rng.shuffle(names)
    return {name: scripts[name] for name in names}


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(25, 500))]
)
def test_throttled_dying_and_silent_sources_cost_at_most_a_quarter_of_the_ideal_time(seed: int) -> None:
    limits = FetchLimits(active_peers=8)
    done = Swarm(CHUNKS, eight_sources(seed), limits, seed=seed).run()
    done.assert_complete()
    assert done.now <= 1.25 * ideal_s(2)
    assert duplicate_share(done) <= 0.05
    assert not MISCONDUCT.intersection(reason for _, _, reason in done.drops)


@pytest.mark.parametrize("seed", range(5))
def test_four_providers_one_throttled_one_killed_take_little_longer_than_the_good_two(seed: int) -> None:
    good = at_rate(GOOD_BYTES_S)
    scripts = {"a": good, "b": good, "throttled": at_rate(GOOD_BYTES_S / 100), "killed": dies(good, 60 + seed)}
    done = Swarm(CHUNKS, scripts, seed=seed).run()
    done.assert_complete()
    assert done.now <= 1.25 * ideal_s(2)
    assert duplicate_share(done) <= 0.05


def test_equal_sources_share_the_work_evenly() -> None:
    done = Swarm(CHUNKS, dict.fromkeys("abcd", at_rate(GOOD_BYTES_S))).run()
    done.assert_complete()
    shares = [sum(1 for who in done.senders.values() if who == peer(name)) for name in "abcd"]
    assert max(shares) <= 1.2 * min(shares)
    assert done.now <= 1.1 * ideal_s(4)
    assert duplicate_share(done) <= 0.05


def test_fast_source_does_most_of_the_work() -> None:
    scripts = {"fast": at_rate(GOOD_BYTES_S), "slow": at_rate(GOOD_BYTES_S / 10)}
    done = Swarm(CHUNKS, scripts).run()
    done.assert_complete()
    fast = sum(1 for who in done.senders.values() if who == peer("fast"))
    assert 0.85 * len(CHUNKS) <= fast <= 0.95 * len(CHUNKS)
    assert done.now <= 1.1 * TOTAL_BYTES / (1.1 * GOOD_BYTES_S)


def test_source_that_drops_to_a_tenth_keeps_little_of_the_work() -> None:
    """The window follows the rate of late, so that what is asked for at the old rate is soon worked off."""
    sent = 0

    def slows_down(index, chunks, rng):  # type: ignore[no-untyped-def]
        nonlocal sent
        sent += 1
        return at_rate(GOOD_BYTES_S if sent <= 50 else GOOD_BYTES_S / 10)(index, chunks, rng)

    done = Swarm(CHUNKS, {"steady": at_rate(GOOD_BYTES_S), "slows": slows_down}).run()
    done.assert_complete()
    n_slow = sum(1 for who in done.senders.values() if who == peer("slows"))
    assert n_slow <= 50 + 0.2 * len(CHUNKS)
    assert done.now <= 1.25 * (50 * 100_000 / GOOD_BYTES_S + (TOTAL_BYTES - 100 * 100_000) / (1.1 * GOOD_BYTES_S))


def test_late_chunk_is_asked_for_once_more_and_the_first_copy_counts() -> None:
    chunks = make_chunks(50)
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=2, start_chunks=1, max_window_bytes=len(chunks[0]))
    machine = FetchMachine(entries_of(chunks), range(50), [peer("a"), peer("b")], limits=limits)
    machine.start(0.0)
    # "b" keeps chunk 1; "a" delivers everything else, one chunk each 10 ms.
    now, index = 0.0, 0
    while index != 1:
        now += 0.01
        instructions = machine.chunk_arrived(peer("a"), index, chunks[index], now)
        [asked] = [each for each in instructions if isinstance(each, RequestChunks) and each.peer == peer("a")]
        [index] = asked.indices
    assert machine.missing == 1
    # Both copies are under way; whichever comes first is handed out, and ends it.
    assert machine.expected_length(peer("b"), 1) == machine.expected_length(peer("a"), 1) == len(chunks[1])
    done = machine.chunk_arrived(peer("b"), 1, chunks[1], now + 0.005)
    assert done[0] == ChunkVerified(1, chunks[1], peer("b"))
    assert isinstance(done[-1], Completed)


def hedged(chunks: list[bytes]) -> tuple[FetchMachine, float]:
    """A fetch in which chunks 2 and 3 were asked of "b" first, and 2 of "a" too, the only others being here."""
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=2, duplicate_share=0.03)
    machine = FetchMachine(entries_of(chunks), range(len(chunks)), [peer("a"), peer("b")], limits=limits)
    machine.start(0.0)
    now = 0.0
    waiting = [0, 1]
    while waiting and waiting != [2]:
        now += 0.01
        index = waiting.pop(0)
        for each in machine.chunk_arrived(peer("a"), index, chunks[index], now):
            if isinstance(each, RequestChunks) and each.peer == peer("a"):
                waiting += each.indices
    assert waiting == [2]
    assert machine.missing == 2
    return machine, now


def test_second_copy_of_a_chunk_is_checked_and_not_handed_out_again() -> None:
    chunks = make_chunks(40)
    machine, now = hedged(chunks)
    machine.paused(peer("b"))
    [verified, *_] = machine.chunk_arrived(peer("a"), 2, chunks[2], now + 0.01)
    assert verified == ChunkVerified(2, chunks[2], peer("a"))
    assert machine.missing == 1
    assert all(not isinstance(each, ChunkVerified) for each in machine.chunk_arrived(peer("b"), 2, chunks[2], now + 1))
    [last, *_] = machine.chunk_arrived(peer("b"), 3, chunks[3], now + 2)
    assert last == ChunkVerified(3, chunks[3], peer("b"))
    assert machine.ended


def test_second_copy_that_is_wrong_names_its_sender() -> None:
    chunks = make_chunks(40)
    machine, now = hedged(chunks)
    machine.paused(peer("b"))
    machine.chunk_arrived(peer("a"), 2, chunks[2], now + 0.01)
    [dropped, *_] = machine.chunk_arrived(peer("b"), 2, chunks[3], now + 0.02)
    assert dropped == DropPeer(peer("b"), DropReason.BAD_CHUNK)


def test_chunk_asked_of_two_peers_is_asked_again_only_when_both_fail() -> None:
    chunks = make_chunks(40)
    machine, now = hedged(chunks)
    assert machine.peer_failed(peer("b"), now + 0.01) == [
        DropPeer(peer("b"), DropReason.GONE),
        RequestChunks(peer("a"), (3,)),
    ]
    assert machine.expected_length(peer("a"), 2) == len(chunks[2])
    machine.chunk_refused(peer("a"), 2, "not_held", now + 0.02)
    assert machine.missing == 2
    assert machine.on_time(now + 1.1) == [RequestChunks(peer("b"), (2,))]


def test_nothing_is_fetched_twice_where_the_budget_is_nothing() -> None:
    limits = FetchLimits(duplicate_share=0.0)
    scripts = {"fast": at_rate(GOOD_BYTES_S), "slow": at_rate(GOOD_BYTES_S / 100)}
    done = Swarm(CHUNKS, scripts, limits).run()
    done.assert_complete()
    assert done.now <= 1.25 * ideal_s(1)
    asked = [index for _, who, indices in done.requests for index in indices if who == peer("fast")]
    assert len(asked) == len(set(asked))
    assert DropReason.SLOW in done.reasons("slow")


def test_idle_peer_waits_for_what_others_have_to_give() -> None:
    """Everything is asked for and nothing is late: the idle one stays, and takes over what another leaves behind."""
    chunks = make_chunks(4)
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=3)
    machine = FetchMachine(entries_of(chunks), range(4), [peer(name) for name in "abc"], limits=limits)
    assert machine.start(0.0) == [RequestChunks(peer("a"), (0, 1)), RequestChunks(peer("b"), (2, 3))]
    machine.chunk_arrived(peer("a"), 0, chunks[0], 0.1)
    machine.chunk_arrived(peer("a"), 1, chunks[1], 0.1)
    assert machine.rates_bytes_s(0.2)[peer("a")] > 0
    assert machine.peer_failed(peer("b"), 0.2) == [
        DropPeer(peer("b"), DropReason.GONE),
        RequestChunks(peer("a"), (2, 3)),
    ]


@pytest.mark.parametrize("place", range(6))
def test_fast_source_is_found_among_more_than_are_asked_at_a_time(place: int) -> None:
    names = [f"slow-{number}" for number in range(5)]
    names.insert(place, "fast")
    scripts = {name: at_rate(GOOD_BYTES_S if name == "fast" else GOOD_BYTES_S / 20) for name in names}
    done = Swarm(CHUNKS, scripts, seed=place).run()
    done.assert_complete()
    # Four slow ones alone take five times as long as the fast one alone.
    assert done.now <= 1.5 * ideal_s(1)
    assert duplicate_share(done) <= 0.05
    assert not {DropReason.GONE, DropReason.SILENT}.intersection(reason for _, _, reason in done.drops)


def test_no_more_than_one_is_tried_beside_those_that_are_asked() -> None:
    done = Swarm(CHUNKS, dict.fromkeys("abcdefgh", at_rate(GOOD_BYTES_S))).run()
    done.assert_complete()
    asked: set[str] = set()
    events = [(now, who, True) for now, who, _ in done.requests] + [(now, who, False) for now, who, _ in done.drops]
    # Of what happens at one time, whoever is let go comes before whom it makes room for.
    for _, who, begun in sorted(events, key=lambda each: (each[0], each[2])):
        (asked.add if begun else asked.discard)(who.decode())
        assert len(asked) <= 5
    # Each trial takes its time, and the fetch takes ten seconds.
    assert len({who for _, who, _ in done.requests}) == 6
    assert done.now <= 1.1 * ideal_s(4)
    assert duplicate_share(done) <= 0.05


def test_as_many_as_are_to_be_tried_at_a_time_are_and_only_the_fastest_stays() -> None:
    limits = FetchLimits(active_peers=1, trials=2)
    scripts = {"a": at_rate(GOOD_BYTES_S / 4), "b": at_rate(GOOD_BYTES_S / 2), "c": at_rate(GOOD_BYTES_S)}
    done = Swarm(CHUNKS, scripts, limits).run()
    done.assert_complete()
    assert [(who, reason) for _, who, reason in done.drops] == [
        (peer("a"), DropReason.SPARE),
        (peer("b"), DropReason.SPARE),
        (peer("c"), DropReason.DONE),
    ]


def test_peer_with_nothing_to_do_makes_room_for_one_that_has_what_is_to_be_asked_for() -> None:
    chunks = make_chunks(6)
    a, b, c = (peer(name) for name in "abc")
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=2, trials=0)
    holds = dict.fromkeys((a, b), range(4))
    machine = FetchMachine(entries_of(chunks), range(6), [a, b], holds=holds, limits=limits)
    assert machine.start(0.0) == [RequestChunks(a, (0, 1)), RequestChunks(b, (2, 3))]
    machine.chunk_arrived(b, 2, chunks[2], 0.05)
    machine.chunk_arrived(a, 0, chunks[0], 0.1)
    machine.chunk_arrived(a, 1, chunks[1], 0.1)
    assert machine.provider_found(c, 0.11) == [DropPeer(a, DropReason.SPARE), RequestChunks(c, (4, 5))]


def test_what_providers_hold_is_respected() -> None:
    holds = {"front": frozenset(range(200)), "back": frozenset(range(200, 400))}
    scripts = dict.fromkeys(("front", "back"), at_rate(GOOD_BYTES_S))
    done = Swarm(CHUNKS, scripts, holds=holds).run()
    done.assert_complete()
    for _, who, indices in done.requests:
        assert holds[who.decode()].issuperset(indices)


def test_provider_that_gets_more_is_asked_for_it() -> None:
    chunks = make_chunks(4)
    machine = FetchMachine(
        entries_of(chunks), range(4), [peer("a")], holds={peer("a"): {0, 1}}, limits=FetchLimits(min_rate_bytes_s=1.0)
    )
    assert machine.start(0.0) == [RequestChunks(peer("a"), (0, 1))]
    machine.chunk_arrived(peer("a"), 0, chunks[0], 0.1)
    assert machine.holds_changed(peer("a"), {0, 1, 2, 3}, 0.2) == [RequestChunks(peer("a"), (2, 3))]
    assert machine.holds_changed(peer("stranger"), {0}, 0.2) == []


def test_replication_asks_for_the_rarest_chunks_first() -> None:
    chunks = make_chunks(60)
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=1, order=ChunkOrder.RAREST_FIRST)
    everything = frozenset(range(60))
    holds = {"all": everything, "most": everything - {7, 31}}
    done = Swarm(chunks, {"all": honest, "most": honest}, limits, holds=holds).run()
    done.assert_complete()
    order = [index for _, _, indices in done.requests for index in indices]
    assert set(order[:2]) == {7, 31}


def order_of(done: Swarm) -> list[int]:
    return [index for _, _, indices in done.requests for index in indices]


REPLICATION = FetchLimits(min_rate_bytes_s=1.0, active_peers=1, trials=0, order=ChunkOrder.RAREST_FIRST)


def test_equally_rare_chunks_are_asked_for_from_the_front() -> None:
    done = Swarm(make_chunks(60), {"all": honest, "too": honest}, REPLICATION).run()
    assert order_of(done) == list(range(60))


def test_what_the_rest_is_of_no_use_without_comes_before_what_is_rare() -> None:
    everything = frozenset(range(60))
    holds = {"all": everything, "most": everything - {7, 31}}
    done = Swarm(make_chunks(60), dict.fromkeys(holds, honest), REPLICATION, holds=holds, first=frozenset({0, 1})).run()
    assert order_of(done)[:4] == [0, 1, 7, 31]


def test_how_rare_a_chunk_is_counts_anew_when_providers_come_go_or_say_what_they_hold() -> None:
    chunks = make_chunks(40)
    a, b, c, d = (peer(name) for name in "abcd")
    limits = FetchLimits(
        min_rate_bytes_s=1.0, active_peers=2, start_chunks=1, max_window_bytes=1, order=ChunkOrder.RAREST_FIRST
    )
    machine = FetchMachine(entries_of(chunks), range(40), [a, b], holds={b: {0, 1, 2}}, limits=limits)

    def asked_of_a(index: int, now: float) -> int:
        """What is asked for when this chunk has come."""
        instructions = machine.chunk_arrived(a, index, chunks[index], now)
        [[after]] = [each.indices for each in instructions if isinstance(each, RequestChunks) and each.peer == a]
        return after

    assert machine.start(0.0) == [RequestChunks(a, (3,)), RequestChunks(b, (0,))]
    machine.holds_changed(b, set(range(10)), 0.1)
    assert asked_of_a(3, 0.2) == 10
    machine.provider_found(c, 0.3, holds=set(range(30)))
    assert asked_of_a(10, 0.4) == 30
    machine.provider_found(d, 0.5, holds=set(range(20, 40)))
    assert asked_of_a(30, 0.6) == 11
    assert asked_of_a(11, 0.7) == 12
    # Refused by "a" itself, 12 is wanted of others.
    machine.chunk_refused(a, 12, "not_held", 0.8)
    [*_, asked] = machine.chunk_refused(a, 13, "not_held", 0.8)
    assert asked == RequestChunks(a, (14,))
    # "b" is given up: what it shared with "c" is as rare as what "c" alone has.
    machine.header_arrived(b, 0, 1, 0.9)
    assert asked_of_a(14, 1.0) == 0
    assert asked_of_a(0, 1.1) == 1


def test_silent_peer_is_let_go_even_while_nothing_else_is_left_to_do() -> None:
    done = Swarm(make_chunks(2), {"silent": swarm.silent, "late": honest}, FetchLimits(min_rate_bytes_s=1.0)).run()
    done.assert_complete()
    assert done.now <= FetchLimits().idle_with_others_s + 0.1


def test_peer_that_lacks_what_nobody_is_asked_for_waits_before_anything_has_arrived() -> None:
    chunks = make_chunks(4)
    limits = FetchLimits(min_rate_bytes_s=1.0, active_peers=2)
    machine = FetchMachine(entries_of(chunks), range(4), [peer("a"), peer("b")], limits=limits)
    machine.start(0.0)
    assert machine.chunk_refused(peer("a"), 0, "not_held", 0.1) == []
    assert machine.chunk_refused(peer("a"), 1, "not_held", 0.1) == []
    assert machine.chunk_arrived(peer("b"), 2, chunks[2], 0.2)[-1] == RequestChunks(peer("b"), (0, 1))
