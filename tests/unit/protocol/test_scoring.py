"""Scores: misconduct bans for longer each time, faults put back, both fade."""

import math

import pytest

from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.scoring import DOUBT_S, FADE_S, PeerScores, ScoreLimits
from tests.unit.protocol.swarm import peer

A, B, C = peer("a"), peer("b"), peer("c")


def test_liar_is_banned_at_once_and_for_longer_each_time() -> None:
    scores = PeerScores()
    scores.dropped(A, DropReason.BAD_CHUNK, 0.0)
    assert scores.banned(A, 59.0)
    assert not scores.banned(A, 60.0)
    scores.dropped(A, DropReason.UNASKED, 60.0)
    first, second = 60.0, scores.banned_until_s(A) - 60.0
    assert second > 7 * first
    for _ in range(10):
        scores.dropped(A, DropReason.BAD_CHUNK, 100.0)
    assert scores.banned_until_s(A) == 100.0 + ScoreLimits().max_ban_s


def test_second_lie_makes_a_liar_whom_time_forgives_and_nobody_bans() -> None:
    scores = PeerScores()
    assert not scores.liar(A, 0.0)
    scores.lied(A, 0.0)
    assert not scores.liar(A, 0.0)
    assert scores.standing(A, 0.0) == pytest.approx(1 / 5)
    scores.lied(A, 1.0)
    assert scores.liar(A, 2.0)
    assert scores.order([A, B], 2.0) == [B, A]
    assert not scores.banned(A, 2.0)
    assert not scores.liar(A, FADE_S)
    assert scores.standing(A, 20 * FADE_S) > 0.99


def test_ban_of_long_ago_no_longer_makes_the_next_one_longer() -> None:
    scores = PeerScores()
    scores.dropped(A, DropReason.BAD_CHUNK, 0.0)
    later = 20 * FADE_S
    scores.dropped(A, DropReason.BAD_CHUNK, later)
    assert scores.banned_until_s(A) - later == pytest.approx(60.0, rel=1e-4)


@pytest.mark.parametrize("reason", [DropReason.SILENT, DropReason.SLOW, DropReason.GONE, DropReason.BUSY])
def test_only_provider_flaky_once_is_put_back_and_never_banned(reason: DropReason) -> None:
    scores = PeerScores()
    for _ in range(20):
        scores.dropped(A, reason, 0.0)
    assert scores.order([A], 0.0) == [A]
    assert scores.order([A, B], 0.0) == [B, A]
    assert scores.standing(A, 0.0) < 0.1
    assert scores.standing(A, 20 * FADE_S) > 0.99


@pytest.mark.parametrize("reason", [DropReason.DONE, DropReason.UNKNOWN, DropReason.EXHAUSTED])
def test_what_is_no_fault_costs_nothing(reason: DropReason) -> None:
    scores = PeerScores()
    scores.dropped(A, reason, 0.0)
    assert scores.standing(A, 0.0) == 1.0


def test_delivering_makes_good_for_faults() -> None:
    scores = PeerScores()
    scores.dropped(A, DropReason.GONE, 0.0)
    before = scores.standing(A, 0.0)
    scores.delivered(A, 1000, 1.0, 0.0)
    assert scores.standing(A, 0.0) > before


def test_faster_peer_comes_first_and_an_unknown_one_is_worth_a_try() -> None:
    scores = PeerScores()
    scores.delivered(A, 1000, 1.0, 0.0)
    scores.delivered(B, 9000, 1.0, 0.0)
    assert scores.order([A, B, C], 0.0) == [B, C, A]
    assert scores.order([A], 0.0) == [A]
    assert scores.order([], 0.0) == []


def test_rates_and_round_trips_follow_what_is_measured() -> None:
    scores = PeerScores()
    assert (scores.rate_bytes_s(A), scores.rtt_s(A), scores.banned_until_s(A)) == (0.0, 0.0, float("-inf"))
    assert scores.standing(A, 0.0) == 1.0
    scores.delivered(A, 1000, 1.0, 0.0)
    scores.delivered(A, 3000, 1.0, 0.0)
    scores.delivered(A, 0, 1.0, 0.0)
    scores.delivered(A, 10, 0.0, 0.0)
    assert scores.rate_bytes_s(A) == 2000.0
    scores.answered(A, 0.8, 0.0)
    scores.answered(A, 0.0, 0.0)
    assert scores.rtt_s(A) == pytest.approx(0.7)


def test_memory_is_bounded_and_banned_peers_are_forgotten_last() -> None:
    scores = PeerScores(ScoreLimits(max_peers=3))
    scores.dropped(A, DropReason.BAD_CHUNK, 0.0)
    for number in range(10):
        scores.delivered(peer(f"peer-{number}"), 10, 1.0, 1.0 + number)
    assert scores.banned(A, 12.0)
    assert scores.rate_bytes_s(peer("peer-0")) == 0.0
    assert scores.rate_bytes_s(peer("peer-9")) == 10.0


def test_a_quick_delivery_is_no_measure_of_how_fast_a_far_peer_is() -> None:
    scores = PeerScores()
    scores.answered(A, 0.1, 0.0)
    scores.delivered(A, 6000, 0.3, 0.0)
    assert scores.expected_bytes_s(A, 0.0) == math.inf
    scores.delivered(A, 9_000_000, 0.9, 0.0)
    scores.delivered(A, 6000, 0.3, 0.0)
    assert scores.rate_bytes_s(A) == 1e7
    # But it came at least that fast.
    scores.delivered(A, 6_000_000, 0.3, 0.0)
    assert scores.rate_bytes_s(A) == 2e7


def test_a_peer_that_brought_nothing_for_long_is_slower_than_a_chunk_in_that_time() -> None:
    scores = PeerScores()
    scores.waited(A, 1_000_000, 0.04, 0.0)
    assert scores.rate_bytes_s(A) == 0.0
    scores.waited(A, 1_000_000, 0.5, 0.0)
    assert scores.rate_bytes_s(A) == 2e6
    scores.waited(A, 1_000_000, 0.1, 0.0)
    assert scores.rate_bytes_s(A) == 2e6


def test_the_longer_ago_a_rate_was_measured_the_more_is_expected() -> None:
    scores = PeerScores()
    assert scores.expected_bytes_s(A, 0.0) == math.inf
    scores.answered(A, 0.001, 0.0)
    assert scores.expected_bytes_s(A, 0.0) == math.inf
    scores.delivered(A, 1000, 1.0, 10.0)
    assert scores.expected_bytes_s(A, 10.0) == 1000.0
    assert scores.expected_bytes_s(A, 10.0 + 2 * DOUBT_S) == 4000.0
    assert math.isfinite(scores.expected_bytes_s(A, 1e9))
