"""Weighing an offer: which figures count, and what the decision says of itself."""

import math
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.events import FetchProgress
from kvnet.exchange.planning import Missing, Weigher, link_to, missing_chunks
from kvnet.exchange.race import GRACE_S, PlannedRace
from kvnet.format.chunks import ChunkEntry, ChunkPlan, layer_groups
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.hashes import ChunkHash, LookupKey
from kvnet.format.tensor import DType, LayerKind
from kvnet.protocol.cost import PrefillStep, RestoreStep
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate
from kvnet.protocol.scoring import PeerScores
from kvnet.protocol.speeds import Link, Machine, PrefillSpeed, SpeedPoint
from tests.unit.protocol.swarm import peer

A, B = peer("a"), peer("b")
RAW = 1000
BLOCK = 256 * RAW
MACHINE = Machine(PrefillSpeed([SpeedPoint(0, 1000.0)]), 1e9, 0.0, {Codec.SHUFFLE_ZSTD1: 5e8})
"""The break-even rate of raw K/V is about 1 MB/s."""


def weigher(*, held: int = 0, live: int = 0, n_prompt: int = 2049) -> Weigher:
    return Weigher(MACHINE, n_prompt, held, live, RAW)


def blocks(n: int, start: int = 0) -> Missing:
    return Missing({index: (index, BLOCK) for index in range(start, n)}, {})


def test_rates_of_several_peers_add_up_and_one_that_is_not_known_may_be_as_fast_as_it_likes() -> None:
    scores = PeerScores()
    scores.answered(A, 0.2, 0.0)
    scores.answered(B, 0.1, 0.0)
    scores.delivered(A, 1_000_000, 1.0, 0.0)
    assert link_to([A, B], scores, 0.0).bytes_s == math.inf
    scores.delivered(B, 3_000_000, 1.0, 0.0)
    both = link_to([A, B], scores, 0.0, 7.0)
    assert (both.peer, both.rtt_s, both.bytes_s, both.decode_bytes_s) == (B, 0.1, 4e6, 7.0)


def test_a_banned_peer_does_not_count() -> None:
    scores = PeerScores()
    scores.delivered(A, 1_000_000, 1.0, 0.0)
    scores.delivered(B, 9_000_000, 1.0, 0.0)
    scores.dropped(B, DropReason.BAD_CHUNK, 0.0)
    assert link_to([A, B], scores, 0.0).bytes_s == 1e6
    assert link_to([B], scores, 0.0).peer == PeerId(b"")


def test_state_in_memory_needs_no_restore() -> None:
    assert weigher(held=1024, live=1024).local.steps == (RestoreStep(1024, 0.0), PrefillStep(1024, 2049, 1.025))
    restored = weigher(held=1024, live=100).local.steps[0]
    assert isinstance(restored, RestoreStep)
    assert restored.seconds == pytest.approx(1024 * RAW / 1e9)


@pytest.mark.parametrize(
    ("link", "could"),
    [
        (Link(A, 0.0, math.inf), True),
        (Link(A, 0.0, 1e6), True),
        (Link(A, 0.0, 2e5), False),
        (Link(A, 0.6, math.inf), False),
    ],
)
def test_nobody_need_be_asked_who_is_too_slow_or_too_far_for_all_of_the_prompt(link: Link, could: bool) -> None:
    assert weigher().could_win(link) is could


def test_beside_a_speed_that_was_only_guessed_distance_decides_nothing() -> None:
    guessed = Weigher(replace(MACHINE, calibrated=False), 2049, 0, 0, RAW)
    assert guessed.could_win(Link(A, 0.6, math.inf))
    assert not guessed.could_win(Link(A, 0.6, 2e5))
    far = guessed.weigh(guessed.offer(Link(A, 9.0, 4e6), 2048, blocks(8)))
    assert far.plan.fetch is not None


def test_a_claim_is_weighed_by_the_size_it_says() -> None:
    def claimed(size_bytes: int) -> Candidate:
        return Candidate(LookupKey(bytes(32)), 0, 8, 2048, 2048, Codec.RAW, size_bytes, (A,))

    link = Link(A, 0.01, 2e6)
    assert weigher().claim(link, claimed(2048 * RAW)).plan.fetch is not None
    refused = weigher().claim(link, claimed(10 * 2048 * RAW))
    assert refused.plan.fetch is None
    assert "computing was expected to be sooner" in refused.words
    # Of what is held nothing needs to come.
    held = weigher(held=1792).claim(link, claimed(2048 * RAW)).plan.fetch
    assert held is not None
    assert held.n_bytes == BLOCK + 4 * 2048


def test_what_was_decided_says_how_much_it_expects_to_gain() -> None:
    one = weigher()
    report = one.weigh(one.offer(Link(A, 0.0, 4e6), 2048, blocks(8)))
    assert report.words == "fetching 2,048 tokens at 4 MB/s was expected to pay: 0.52 s, against 2.05 s without"
    assert [plan.prefilled_tokens for plan in report.alternatives] == [2049]
    unknown = one.weigh(one.offer(Link(A, 0.0, math.inf), 2048, blocks(8)))
    assert "at a rate not measured yet" in unknown.words


def test_where_the_rest_is_dear_to_fetch_only_the_beginning_is_taken() -> None:
    one = weigher()
    missing = Missing({index: (index, BLOCK if index < 4 else 20 * BLOCK) for index in range(8)}, {})
    report = one.weigh(one.offer(Link(A, 0.0, 4e6), 2048, missing))
    assert report.plan.fetch is not None
    assert report.plan.fetch.n_tokens == 1024
    assert report.words.startswith("of 2,048 tokens a peer offered, the first 1,024 pay at 4 MB/s: ")
    assert len(report.alternatives) == 2


def test_only_chunks_that_are_not_here_are_missing() -> None:
    kind = LayerKind(cache="kv", heads=1, k_dim=8, v_dim=8, dtype=DType.FLOAT32)
    layers = LayerLayout(kinds=(kind,), order=bytes(2))
    plan = ChunkPlan(n_tokens=1000, layers=layers, groups=layer_groups(layers), context_size_bytes=10)
    entries = [ChunkEntry(plan[index].raw_size_bytes, ChunkHash(bytes([1]) * 32)) for index in range(len(plan))]
    absent = [*plan.context_chunks, *plan.tiles_of_block(1), *plan.tiles_of_block(3)]
    missing = missing_chunks(plan, entries, 600, absent)
    assert set(missing.tiles) == set(plan.tiles_of_block(1))
    assert {block for block, _ in missing.tiles.values()} == {1}
    assert missing.heads == {plan.context_chunks.start: 10}
    assert set(missing.sizes()) == {*missing.tiles, *missing.heads}


def progress(index: int) -> FetchProgress:
    return FetchProgress(0, 0, 0, 0, A, index=index)


def started(one: Weigher, n_blocks: int, *, n_peers: int = 1) -> PlannedRace:
    missing = blocks(n_blocks)
    race = PlannedRace(
        one, one.offer(Link(A, 0.0, 4e6), n_blocks * 256, missing), n_blocks * 256, missing, n_peers, None
    )
    race.begin(n_blocks * BLOCK)
    return race


async def test_a_race_goes_on_as_long_as_what_is_to_come_comes_sooner_than_it_is_computed(
    autojump_clock: MockClock,
) -> None:
    race = started(weigher(), 8)
    scope = race.scope()
    for index in range(8):
        await trio.sleep(0.2)
        race.judge(progress(index))
        assert not scope.cancel_called
    assert race.arrived_tokens == 2048


async def test_a_race_ends_when_the_rate_has_dropped_and_not_before_it_was_given_time(
    autojump_clock: MockClock,
) -> None:
    race = started(weigher(), 8)
    scope = race.scope()
    for index in range(4):
        await trio.sleep(0.1)
        race.judge(progress(index))
    # A block that took longer than computing it would have.
    await trio.sleep(0.6)
    race.judge(progress(4))
    await trio.sleep(0.6)
    race.judge(progress(5))
    assert scope.cancel_called
    assert race.arrived_tokens == 6 * 256


async def test_silence_is_waited_for_no_longer_than_the_chunks_under_way_are_worth(autojump_clock: MockClock) -> None:
    race = started(weigher(), 8)
    began_s = trio.current_time()
    with race.scope():
        await trio.Event().wait()
    assert trio.current_time() - began_s <= GRACE_S + 2 * 0.256 + 0.01


async def test_chunks_that_were_here_or_come_twice_count_once(autojump_clock: MockClock) -> None:
    race = started(weigher(held=256), 4)
    for index in (1, 1, 77, -1):
        race.judge(progress(index))
    assert race.arrived_tokens == 256
    race.judge(progress(0))
    assert race.arrived_tokens == 512
