"""How long prefill takes by what was measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.protocol.speeds import PrefillSpeed, SpeedPoint

SPEED = PrefillSpeed([SpeedPoint(0, 200.0), SpeedPoint(1024, 100.0), SpeedPoint(4096, 40.0)])


def test_prefill_time_follows_the_measured_points() -> None:
    assert SPEED.tokens_s(0) == pytest.approx(200.0)
    assert SPEED.tokens_s(1024) == pytest.approx(100.0)
    assert SPEED.tokens_s(100_000) == pytest.approx(40.0)
    assert SPEED.seconds(0, 1024) == pytest.approx(1024 * (1 / 200 + 1 / 100) / 2)
    assert SPEED.seconds(4096, 5096) == pytest.approx(1000 / 40)
    assert SPEED.seconds(10, 10) == SPEED.seconds(10, 5) == 0.0


@given(st.integers(0, 6000), st.integers(0, 6000), st.integers(0, 6000))
def test_prefill_time_of_two_parts_is_that_of_the_whole(one: int, two: int, three: int) -> None:
    first, middle, last = sorted((one, two, three))
    whole = SPEED.seconds(first, last)
    assert SPEED.seconds(first, middle) + SPEED.seconds(middle, last) == pytest.approx(whole, abs=1e-9)


def test_one_measured_point_is_enough() -> None:
    assert PrefillSpeed([SpeedPoint(512, 100.0)]).seconds(0, 2000) == pytest.approx(20.0)


def test_the_last_measured_position_is_told_whatever_the_order_of_points() -> None:
    assert SPEED.last_position == 4096
    assert PrefillSpeed([SpeedPoint(768, 90.0), SpeedPoint(256, 100.0)]).last_position == 768


@pytest.mark.parametrize("points", [[], [SpeedPoint(0, 0.0)], [SpeedPoint(0, -1.0)], [SpeedPoint(0, math.inf)]])
def test_speed_that_was_not_measured_is_refused(points: list[SpeedPoint]) -> None:
    with pytest.raises(ValueError, match="at least one measured speed"):
        PrefillSpeed(points)


def test_positions_at_which_a_token_takes_as_long_lie_between_the_measured_ones() -> None:
    assert SPEED.turns(0.0075) == [0, 1024, 4096, pytest.approx(512.0)]
    assert SPEED.turns(0.001) == SPEED.turns(1.0) == [0, 1024, 4096]
