import itertools

import pytest

from kvnet.errors import UsageError
from kvnet_node.guest.policy import LINGER_S, Situation, Why, conduct, keep_awake, parse_duration_s


@pytest.mark.parametrize(
    ("situation", "serve", "replicate", "why"),
    [
        (Situation(), True, True, Why.NOTHING),
        (Situation(on_battery=False, metered=False), True, True, Why.NOTHING),
        (Situation(on_battery=True), False, False, Why.BATTERY),
        (Situation(on_battery=True, serve_on_battery=True), True, True, Why.NOTHING),
        (Situation(metered=True), False, False, Why.METERED),
        (Situation(on_battery=True, metered=True, serve_on_battery=True), False, False, Why.METERED),
        (Situation(paused=True), False, True, Why.PAUSED),
        (Situation(paused=True, on_battery=True), False, False, Why.PAUSED),
        (Situation(paused=True, on_battery=True, serve_on_battery=True), False, True, Why.PAUSED),
    ],
)
def test_what_is_served_follows_from_the_situation(
    situation: Situation, serve: bool, replicate: bool, why: Why
) -> None:
    found = conduct(situation)
    assert (found.serve, found.replicate, found.why) == (serve, replicate, why)


def test_in_no_situation_is_something_refused_without_a_reason() -> None:
    for battery, metered in itertools.product((None, False, True), repeat=2):
        for paused, setting in itertools.product((False, True), repeat=2):
            found = conduct(Situation(battery, metered, paused=paused, serve_on_battery=setting))
            assert found.serve == (found.why is Why.NOTHING)
            assert found.replicate or not found.serve


def test_the_machine_is_kept_awake_for_an_upload_on_mains_and_for_nothing_else() -> None:
    assert keep_awake(uploading=True, idle_s=0.0, on_battery=False)
    assert keep_awake(uploading=True, idle_s=0.0, on_battery=None)
    assert not keep_awake(uploading=True, idle_s=0.0, on_battery=True)
    assert keep_awake(uploading=False, idle_s=LINGER_S / 2, on_battery=False)
    assert not keep_awake(uploading=False, idle_s=LINGER_S, on_battery=False)
    assert not keep_awake(uploading=False, idle_s=float("inf"), on_battery=None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h", 3600), ("1h30m", 5400), (" 2d ", 172800), ("366d", 31622400)],
)
def test_a_time_is_written_with_its_units(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "1", "h", "1x", "-1h", "1h 30m", "367d", "30m1h", "1" * 40 + "s"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="such as 30m, 1h or 2d"):
        parse_duration_s(text)
