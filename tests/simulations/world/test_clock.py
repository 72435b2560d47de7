"""Two clocks, one order."""

import pytest

from simulations.world.clock import Clock, HeapClock, SimpyClock


@pytest.mark.parametrize("make", [HeapClock, SimpyClock])
def test_things_happen_in_time_and_in_the_order_they_were_asked_for(make: type[HeapClock] | type[SimpyClock]) -> None:
    clock: Clock = make()
    seen: list[tuple[float, str]] = []

    def note(word: str) -> None:
        seen.append((clock.now, word))
        if word == "b":
            clock.at(clock.now, note, "after b")
            clock.at(2.5, note, "c")

    for at_s, word in [(2.0, "b"), (1.0, "a"), (2.0, "b too"), (3.0, "d")]:
        clock.at(at_s, note, word)
    clock.run_until(2.0)
    assert seen == [(1.0, "a")]
    clock.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "b too"), (2.0, "after b"), (2.5, "c"), (3.0, "d")]
