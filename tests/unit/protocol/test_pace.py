"""Shares of a limited rate."""

import pytest

from kvnet.protocol.ids import PeerId
from kvnet.protocol.pace import BURST_S, UNDER_WAY_S, Pace, Purpose, purpose_of

A, B = PeerId(b"a"), PeerId(b"b")
CHUNK = 1_000


def moved(pace: Pace, flows: list[tuple[PeerId, Purpose]], seconds: float) -> dict[tuple[PeerId, Purpose], int]:
    """Bytes that each flow moves when all of them always want more."""
    done = dict.fromkeys(flows, 0)
    free_s = dict.fromkeys(flows, 0.0)
    while (now := min(free_s.values())) < seconds:
        flow = min(free_s, key=lambda each: free_s[each])
        free_s[flow] = now + pace.spread_s(*flow, CHUNK, now)
        done[flow] += CHUNK
    return done


@pytest.mark.parametrize("n_peers", [1, 2, 5])
def test_all_together_get_the_rate_and_peers_get_the_same(n_peers: int) -> None:
    flows = [(PeerId(bytes([number])), Purpose.REPLICATION) for number in range(n_peers)]
    done = moved(Pace(100_000.0), flows, 20.0)
    assert sum(done.values()) == pytest.approx(100_000 * 20, rel=0.05)
    assert max(done.values()) <= 1.1 * min(done.values())


def test_who_waits_for_an_answer_gets_most_and_the_rest_does_not_starve() -> None:
    interactive, copy, scrub = [(A, purpose) for purpose in Purpose]
    done = moved(Pace(100_000.0), [interactive, copy, scrub], 60.0)
    assert done[interactive] / done[copy] == pytest.approx(4, rel=0.1)
    assert done[copy] / done[scrub] == pytest.approx(4, rel=0.1)


def test_what_nobody_uses_is_there_for_the_others() -> None:
    pace = Pace(100_000.0)
    assert pace.spread_s(A, Purpose.INTERACTIVE, 100_000, 0.0) == pytest.approx(1 - BURST_S)
    # The other has its sixteenth part until the first is done, and then everything.
    assert pace.spread_s(B, Purpose.SCRUB, CHUNK, 0.5) < 17 * CHUNK / 100_000
    later = 1.0 + UNDER_WAY_S
    assert pace.spread_s(B, Purpose.SCRUB, 100_000, later) == pytest.approx(1 - BURST_S)


def test_flows_that_are_over_are_forgotten() -> None:
    pace = Pace(100_000.0)
    for number in range(50):
        pace.spread_s(PeerId(bytes([number])), Purpose.INTERACTIVE, CHUNK, 0.0)
    assert pace.n_flows == 50
    pace.spread_s(A, Purpose.INTERACTIVE, CHUNK, 100.0)
    assert pace.n_flows == 1


def test_without_a_limit_nothing_is_spread() -> None:
    pace = Pace(0.0)
    assert not pace.limited
    assert pace.spread_s(A, Purpose.SCRUB, 1 << 40, 0.0) == 0.0
    assert pace.n_flows == 0


def test_an_unknown_purpose_is_the_least_pressing() -> None:
    assert [purpose_of(word) for word in ("interactive", "replication", "scrub", "urgent")] == [*Purpose, Purpose.SCRUB]
