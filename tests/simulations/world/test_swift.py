"""What is computed sooner in another way is the same, to the last bit."""

from hypothesis import given
from hypothesis import strategies as st

from kvnet.exchange.write_budget import WriteBudget, Writing
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet.protocol.scoring import PeerScores, ScoreLimits
from kvnet.protocol.speeds import PrefillSpeed, SpeedPoint
from simulations.world.swift import Bucket, RememberedSpeed, Scores

TOKENS = st.integers(0, 200_000)


@given(
    st.dictionaries(TOKENS, st.floats(0.1, 1e6), min_size=1, max_size=4),
    st.lists(st.tuples(TOKENS, TOKENS)),
    st.floats(1e-6, 10.0),
)
def test_a_remembered_speed_is_the_speed(
    points: dict[int, float], asked: list[tuple[int, int]], token_s: float
) -> None:
    speed = PrefillSpeed(SpeedPoint(*point) for point in points.items())
    remembered = RememberedSpeed(speed)
    for first, end in [*asked, *asked]:
        assert remembered.seconds(first, end) == speed.seconds(first, end)
    assert remembered.turns(token_s) == speed.turns(token_s)
    assert remembered.tokens_s(5000) == speed.tokens_s(5000)


@given(
    st.integers(0, 10**12),
    st.lists(
        st.tuples(st.floats(-100.0, 1e6), st.integers(-5, 10**11), st.sampled_from([Writing.KEPT, Writing.FETCHED]))
    ),
)
def test_a_bucket_holds_what_the_write_budget_holds(day_bytes: int, spent: list[tuple[float, int, Writing]]) -> None:
    budget, bucket, now_s = WriteBudget(day_bytes, 0.0), Bucket(day_bytes, 0.0), 0.0
    for elapsed_s, n_bytes, writing in spent:
        now_s += elapsed_s
        assert bucket.left_bytes(now_s) == budget.left_bytes(now_s)
        budget.spend(n_bytes, writing, now_s)
        bucket.spend(n_bytes, now_s)
        assert bucket.left_bytes(now_s + 1) == budget.left_bytes(now_s + 1)


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(0, 2), st.sampled_from(DropReason))))
def test_whoever_is_banned_is_banned(dropped: list[tuple[float, int, DropReason]]) -> None:
    peers = [PeerId(bytes([number])) for number in range(3)]
    scores, swift, now_s = PeerScores(ScoreLimits()), Scores(ScoreLimits()), 0.0
    for elapsed_s, number, reason in dropped:
        now_s += elapsed_s
        scores.dropped(peers[number], reason, now_s)
        swift.dropped(peers[number], reason, now_s)
        assert [swift.banned(peer, now_s) for peer in peers] == [scores.banned(peer, now_s) for peer in peers]
        assert swift.order(peers, now_s) == scores.order(peers, now_s)
    assert swift.all_welcome == all(scores.banned_until_s(peer) < 0 for peer in peers)
