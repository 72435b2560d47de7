"""Shared bandwidth: nobody gets more than the wire carries, and nobody could have more without a poorer one's loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.world.spans import Flow, Span, connected, share, start, stop


def running(*ways: tuple[Span, ...]) -> list[Flow]:
    flows = [Flow(spans, None) for spans in ways]
    for flow in flows:
        share(start(flow))
    return flows


def test_two_flows_have_half_of_a_span_each() -> None:
    up, down, other = Span(100.0), Span(1000.0), Span(1000.0)
    one, two = running((up, down), (up, other))
    assert one.bytes_s == two.bytes_s == 50.0


def test_what_a_slow_receiver_leaves_goes_to_the_others() -> None:
    up, slow, fast = Span(100.0), Span(10.0), Span(1000.0)
    to_slow, to_fast = running((up, slow), (up, fast))
    assert (to_slow.bytes_s, to_fast.bytes_s) == (10.0, 90.0)


def test_a_flow_that_ends_leaves_its_share() -> None:
    up, one_down, other_down = Span(100.0), Span(1000.0), Span(1000.0)
    one, two = running((up, one_down), (up, other_down))
    others = stop(one)
    share(others)
    assert others == [two]
    assert (one.bytes_s, two.bytes_s) == (0.0, 100.0)


def test_flows_that_share_nothing_are_left_alone() -> None:
    one, two = running((Span(1.0), Span(2.0)), (Span(3.0), Span(4.0)))
    assert connected([one]) == [one]
    assert two.bytes_s == 3.0


@given(
    st.lists(st.floats(1.0, 1e9), min_size=3, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_shares_are_max_min_fair(capacities: list[float], ways: list[tuple[int, int, int]]) -> None:
    spans = [Span(capacity) for capacity in capacities]
    flows = running(*(tuple({spans[at % len(spans)]: None for at in way}) for way in ways))
    for span in spans:
        assert sum(flow.bytes_s for flow in span.flows) <= span.bytes_s * (1 + 1e-9)
    for flow in flows:
        # Somewhere it is held up: a full span on which nobody has more than it.
        assert any(
            sum(each.bytes_s for each in span.flows) == pytest.approx(span.bytes_s)
            and flow.bytes_s >= max(each.bytes_s for each in span.flows) * (1 - 1e-9)
            for span in flow.spans
        )
