import pytest

from kvnet.exchange.scrubber import ScrubPace

NOW_S = 1_800_000_000.0
PACE = ScrubPace(interval_s=1000.0)


@pytest.mark.parametrize(
    ("last_s", "due_in_s"),
    [
        (NOW_S, 1000.0),
        (NOW_S - 400.0, 600.0),
        (NOW_S - 5000.0, 0.0),
        # The clock was years ahead when it was last done.
        (NOW_S + 400_000_000.0, 1000.0),
        # This one was wrong then.
        (0.0, 0.0),
    ],
)
def test_a_scrub_is_due_an_interval_after_the_last_whatever_the_clock_did(last_s: float, due_in_s: float) -> None:
    assert PACE.due_in_s(last_s, NOW_S) == due_in_s
