"""Bandwidth that is shared: each flow runs over several spans, and every span is divided fairly among its flows.

Max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks, 6.5): the span that has least for each
of its flows settles those, and so on with what is left. Only flows that are connected with a change, through shared
spans, are looked at again.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Final


class Span:
    """A piece of wire: a node's way up or down, a site's line.

    Attributes:
        bytes_s: what it carries.
        flows: those that run over it.
        left, count, each: while it is shared: what is not given away yet, to how many flows it will be, and what that
            is for each of them.
    """

    __slots__ = ("bytes_s", "count", "each", "flows", "left")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.flows: dict[Flow, None] = {}
        self.left = self.each = bytes_s
        self.count = 0


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
    spans = list(dict.fromkeys(span for flow in flows for span in flow.spans))
    for span in spans:
        span.left, span.count = span.bytes_s, len(span.flows)
        span.each = span.left / span.count
    for flow in flows:
        flow.bytes_s = UNSETTLED
    while spans:
        narrowest = min(spans, key=_EACH)
        least = narrowest.each
        for flow in narrowest.flows:
            if flow.bytes_s < 0:
                flow.bytes_s = least
                for span in flow.spans:
                    span.left -= least
                    span.count -= 1
                    if span.count:
                        # Never below 0 by rounding.
                        span.each = span.left / span.count if span.left > 0 else 0.0
        spans = [span for span in spans if span.count]


UNSETTLED: Final = -1.0
_EACH: Final = attrgetter("each")
