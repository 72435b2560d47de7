"""Server-sent events come out the same however the bytes are cut."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.api.event_stream import Comment, EventParser, ServerEvent, event_bytes

STREAM = (
    ": keepalive 1/2\n\n"
    'data: {"a": "é €"}\n\n'
    "event: ping\r\ndata: one\r\ndata:two\r\n\r\n"
    "data\rdata: \r\r"
    "id: 7\nretry: 5\n\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = [
    Comment("keepalive 1/2"),
    ServerEvent("", '{"a": "é €"}'),
    ServerEvent("ping", "one\ntwo"),
    ServerEvent("", "\n"),
    ServerEvent("", "[DONE]"),
]


def parsed(pieces: list[bytes]) -> list[ServerEvent | Comment]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_lines_may_end_in_any_of_the_three_ways() -> None:
    assert parsed([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_cut_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    assert parsed([STREAM[a:b] for a, b in pairwise(ends)]) == EVENTS


def test_an_event_is_given_as_soon_as_it_is_whole_and_not_before() -> None:
    parser = EventParser()
    assert list(parser.feed(b"data: x\n")) == []
    assert list(parser.feed(b"\n")) == [ServerEvent("", "x")]


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))))
def test_what_is_written_is_read_again(data: dict[str, str]) -> None:
    (event,) = parsed([event_bytes("message", data)])
    assert event == ServerEvent("message", json.dumps(data))


def test_half_a_surrogate_pair_does_not_break_the_stream() -> None:
    assert json.loads(event_bytes("x", {"a": "\ud83d"}).splitlines()[1][6:]) == {"a": "\ud83d"}
