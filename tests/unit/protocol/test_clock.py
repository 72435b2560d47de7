"""The time a peer says it is."""

import pytest

from kvnet.protocol.clock import clock_of, clock_word


def test_the_time_told_is_the_time_read() -> None:
    assert clock_of({"serve", clock_word(1_800_000_000.9), "bulk"}) == 1_800_000_000


@pytest.mark.parametrize("word", ["clock", "clock/", "clock/x", "clock/-5", "clock/1.5", "clock/" + "9" * 13, "serve"])
def test_what_is_no_time_is_none(word: str) -> None:
    assert clock_of([word]) is None
