"""Streamed chat completions become message streams as an Anthropic-style client reads them."""

import json
from itertools import pairwise
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kvnet_node.api.anthropic_answers import PromptCounts, message_of
from kvnet_node.api.anthropic_requests import AnswerShape
from kvnet_node.api.anthropic_stream import MessageStream
from kvnet_node.api.event_stream import EventParser, ServerEvent
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.forced_tools import ForcedTool

SHAPE = AnswerShape(model="m")
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 8},
    "cache_read_input_tokens": 8,
    "cache_creation_input_tokens": 12,
}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    """A chunk as mlx-lm's server writes it."""
    choice = {"index": 0, "finish_reason": finish_reason, "delta": {"role": "assistant", **delta}}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "local", "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


def usage_chunk(usage: dict[str, Any] = USAGE) -> bytes:
    return f"data: {json.dumps({'object': 'chat.completion', 'choices': [], 'usage': usage})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def streamed(pieces: list[bytes], shape: AnswerShape = SHAPE) -> bytes:
    stream = MessageStream(shape, "msg_1", PromptCounts(20, 8, 12))
    return stream.start() + b"".join(stream.feed(piece) for piece in pieces) + stream.end()


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in EventParser().feed(data):
        assert isinstance(event, ServerEvent)
        body = json.loads(event.data)
        assert body["type"] == event.name
        found.append(body)
    return found


def message(data: bytes) -> dict[str, Any]:
    """The message that the client puts together, without nulls; every event is one that it knows."""
    snapshot = None
    buffers: dict[int, bytes] = {}
    for body in events(data):
        if body["type"] == "ping":
            continue
        event = EVENT.validate_python(body)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot.model_dump(exclude_none=True)


ANSWER = [
    b": keepalive 10/20\n\n",
    chunk(reasoning="H"),
    chunk(reasoning="m."),
    chunk(content="I "),
    chunk(content="look."),
    chunk(tool_calls=[call(0, "weather", '{"town": "Ulm"}'), call(1, "time", "{}")]),
    chunk("tool_calls"),
    usage_chunk(),
    DONE,
]
WHOLE = {
    "choices": [
        {
            "finish_reason": "tool_calls",
            "message": {
                "content": "I look.",
                "reasoning": "Hm.",
                "tool_calls": [call(0, "weather", '{"town": "Ulm"}'), call(1, "time", "{}")],
            },
        }
    ],
    "usage": USAGE,
}


def test_the_events_come_in_their_order() -> None:
    kinds = [event["type"] for event in events(streamed(ANSWER))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    text = ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
    assert kinds == [
        "message_start", "ping", "ping", *thinking, *text, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip


def test_the_streamed_message_is_the_whole_one() -> None:
    expected = message_of(WHOLE, SHAPE, "msg_1")
    del expected["stop_sequence"]
    assert message(streamed(ANSWER)) == expected


@given(st.lists(st.integers(0, len(b"".join(ANSWER))), max_size=60))
def test_any_cut_of_the_bytes_gives_the_same_stream(cuts: list[int]) -> None:
    data = b"".join(ANSWER)
    ends = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(ends)]
    assert streamed(pieces) == streamed(ANSWER)


def test_the_start_says_what_was_reused() -> None:
    start = events(streamed(ANSWER))[0]["message"]
    assert start["usage"]["cache_read_input_tokens"] == 8
    assert start["usage"]["cache_creation_input_tokens"] == 12
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (0, 0)
    assert (start["content"], start["stop_reason"]) == ([], None)


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    pieces = [chunk(content="a"), chunk(tool_calls=[call(0, "x", "{}")]), chunk(content="b"), chunk("tool_calls")]
    found = message(streamed([*pieces, usage_chunk(), DONE]))
    assert [block["type"] for block in found["content"]] == ["text", "tool_use", "text"]


def test_a_call_in_pieces_is_put_together() -> None:
    rest = [{"index": 0, "function": {"arguments": part}} for part in ('{"to', 'wn": "Ulm"}')]
    pieces = [chunk(tool_calls=[call(0, "weather", "")]), *(chunk(tool_calls=[part]) for part in rest)]
    found = message(streamed([*pieces, chunk("tool_calls"), usage_chunk(), DONE]))
    assert found["content"][0]["input"] == {"town": "Ulm"}


def test_only_the_first_call_is_given_when_parallel_ones_are_unwanted() -> None:
    found = message(streamed(ANSWER, AnswerShape(model="m", one_tool_call=True)))
    assert [block.get("name") for block in found["content"] if block["type"] == "tool_use"] == ["weather"]


def test_a_forced_tool_is_given_as_a_call() -> None:
    pieces = [chunk(content='{"town"'), chunk(content=': "Ulm"}'), chunk("stop"), usage_chunk(), DONE]
    found = message(streamed(pieces, AnswerShape(model="m", forced=ForcedTool("weather"))))
    assert found["content"] == [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ulm"}}]
    assert found["stop_reason"] == "tool_use"


def test_a_forced_answer_cut_short_stays_text() -> None:
    pieces = [chunk(content='{"to'), chunk("length"), usage_chunk(), DONE]
    found = message(streamed(pieces, AnswerShape(model="m", forced=ForcedTool("weather"))))
    assert (found["content"], found["stop_reason"]) == ([{"type": "text", "text": '{"to'}], "max_tokens")


def test_the_stop_sequence_that_was_met_is_named() -> None:
    body = {"choices": [{"index": 0, "finish_reason": "stop", "stop_reason": "END", "delta": {}}]}
    pieces = [chunk(content="a"), f"data: {json.dumps(body)}\n\n".encode(), usage_chunk(), DONE]
    found = message(streamed(pieces, AnswerShape(model="m", stop_sequences=("END",))))
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_an_answer_without_text_still_ends_in_order() -> None:
    found = message(streamed([chunk("stop"), usage_chunk(), DONE]))
    assert (found["content"], found["stop_reason"]) == ([], "end_turn")


def test_a_warmed_cache_shows_nothing() -> None:
    pieces = [chunk(content="x"), chunk("length"), usage_chunk(), DONE]
    found = message(streamed(pieces, AnswerShape(model="m", prefill_only=True)))
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_an_engine_that_stops_in_the_middle_is_an_error_event() -> None:
    last = events(streamed([chunk(content="a")]))[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


def test_an_error_chunk_is_an_error_event_and_nothing_follows() -> None:
    data = streamed([chunk(content="a"), b'data: {"error": {"message": "why"}}\n\n', chunk(content="b"), DONE])
    assert events(data)[-1] == {"type": "error", "error": {"type": "api_error", "message": "why"}}


def test_a_failure_of_the_node_is_said_once() -> None:
    stream = MessageStream(SHAPE, "msg_1", PromptCounts())
    (event,) = events(stream.fail(ApiFailure(503, "server_error", "busy")))
    assert event["error"] == {"type": "overloaded_error", "message": "busy"}
    assert stream.fail(ApiFailure(500, "x", "again")) == stream.end() == stream.feed(chunk(content="b")) == b""
