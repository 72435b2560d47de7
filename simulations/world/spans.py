"""Bandwidth that is shared: each flow runs over several spans, and every span is divided fairly among its flows.

Max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks, 6.5): the span that has least for each
of its flows settles those, and so on with what is left. Only flows that are connected with a change, through shared
spans, are looked at again.
"""

import math
from collections.abc import Iterable


class Span:
    """A piece of wire: a node's way up or down, a site's line.

    Attributes:
        bytes_s: what it carries.
        flows: those that run over it.
    """

    __slots__ = ("bytes_s", "flows")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.flows: dict[Flow, None] = {}


class Flow:
    """Bytes from one node to another.

    Attributes:
        spans: that it runs over.
        bytes_s: its share now; 0 while it does not run.
        owner: whoever is told that it has changed.
    """

    __slots__ = ("bytes_s", "owner", "spans")

    def __init__(self, spans: tuple[Span, ...], owner: object) -> None:
        self.spans = spans
        self.bytes_s = 0.0
        self.owner = owner


def start(flow: Flow) -> list[Flow]:
    """A flow runs from now on. Returns all whose rates may change by it; call `share` with them."""
    for span in flow.spans:
        span.flows[flow] = None
    return connected([flow])


def stop(flow: Flow) -> list[Flow]:
    """A flow runs no more. Returns the others whose rates may change by it; call `share` with them."""
    others = connected([flow])
    for span in flow.spans:
        span.flows.pop(flow, None)
    flow.bytes_s = 0.0
    return [other for other in others if other is not flow]


def connected(flows: Iterable[Flow]) -> list[Flow]:
    """Flows, and all that they share a span with, directly or through others."""
    found = dict.fromkeys(flows)
    waiting, seen = list(found), set()
    while waiting:
        for span in waiting.pop().spans:
            if span not in seen:
                seen.add(span)
                for other in span.flows:
                    if other not in found:
                        found[other] = None
                        waiting.append(other)
    return list(found)


def share(flows: list[Flow]) -> None:
    """Give each flow its rate. The flows are all that run over any of their spans."""
    if len(flows) == 1:
        flow = flows[0]
        flow.bytes_s = min(span.bytes_s for span in flow.spans)
        return
    left: dict[Span, float] = {}
    count: dict[Span, int] = {}
    for flow in flows:
        for span in flow.spans:
            left.setdefault(span, span.bytes_s)
            count[span] = count.get(span, 0) + 1
    unsettled = dict.fromkeys(flows)
    while unsettled:
        narrowest, least = None, math.inf
        for span, n_flows in count.items():
            if n_flows and left[span] / n_flows < least:
                narrowest, least = span, left[span] / n_flows
        assert narrowest is not None  # noqa: S101 - every unsettled flow counts on its spans
        for flow in [each for each in narrowest.flows if each in unsettled]:
            del unsettled[flow]
            flow.bytes_s = least
            for span in flow.spans:
                left[span] = max(0.0, left[span] - least)
                count[span] -= 1
