"""``tool_choice``: tools that may not be called, and a call that has to be made."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.api.failures import ApiError
from kvnet_node.api.forced_tools import ForcedTool
from kvnet_node.api.openai_tools import ForcedCall, chosen_tools

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}


def body(choice: Any, *tools: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [], "tools": list(tools), "tool_choice": choice, **more}


@pytest.mark.parametrize("choice", [None, "auto"])
def test_free_choice_leaves_the_request_as_it_is(choice: Any) -> None:
    chosen, forced = chosen_tools(body(choice, WEATHER))
    assert chosen == {"messages": [], "tools": [WEATHER]}
    assert forced is None


def test_no_choice_leaves_the_tools_out() -> None:
    chosen, forced = chosen_tools(body("none", WEATHER))
    assert chosen == {"messages": []}
    assert forced is None


def test_named_tool_binds_the_answer_to_its_parameters() -> None:
    asked = body({"type": "function", "function": {"name": "weather"}}, TIME, WEATHER)
    before = json.dumps(asked)
    chosen, forced = chosen_tools(asked)
    assert forced == ForcedTool("weather")
    assert chosen["response_format"]["json_schema"]["schema"] == WEATHER["function"]["parameters"]
    assert chosen["tools"] == [TIME, WEATHER]
    assert json.dumps(asked) == before


def test_any_tool_binds_the_answer_to_a_call_of_one_of_them() -> None:
    chosen, forced = chosen_tools(body("required", TIME, WEATHER))
    assert forced == ForcedTool("")
    names = [each["properties"]["name"] for each in chosen["response_format"]["json_schema"]["schema"]["anyOf"]]
    assert names == [{"const": "time"}, {"const": "weather"}]


def test_tool_without_parameters_takes_none() -> None:
    chosen, forced = chosen_tools(body("required", TIME))
    assert forced == ForcedTool("time")
    assert chosen["response_format"]["json_schema"]["schema"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (body("required"), "found none"),
        (body({"type": "function", "function": {"name": "sun"}}, WEATHER), "weather"),
        (body("sometimes", WEATHER), "required"),
        (body({"type": "function"}, WEATHER), "required"),
        (body({"type": "allowed_tools", "function": {"name": "weather"}}, WEATHER), "required"),
        (body(7, WEATHER), "required"),
        (body("required", 7), r"tools\[0\]"),
        (body("required", {"type": "function", "function": {}}), r"tools\[0\]"),
        ({"messages": [], "tools": 7, "tool_choice": "required"}, "found none"),
        (body("required", WEATHER, response_format={"type": "json_object"}), "response_format"),
    ],
)
def test_choice_that_cannot_be_made_is_refused(asked: dict[str, Any], word: str) -> None:
    with pytest.raises(ApiError, match=word):
        chosen_tools(asked)


# --- answers ----------------------------------------------------------------------------------------------------------


def whole(text: str, forced: ForcedTool, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    answer = {"id": "chatcmpl-7", "choices": [{"index": 0, "finish_reason": finish, "message": message}]}
    found: dict[str, Any] = json.loads(ForcedCall(forced).whole(json.dumps(answer).encode()))
    return found["choices"][0]


def test_answer_becomes_the_call_it_stands_for() -> None:
    choice = whole('{"town": "Ulm"}', ForcedTool("weather"))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["id"] == "call_7"
    assert call["function"] == {"name": "weather", "arguments": '{"town": "Ulm"}'}


def test_answer_says_which_of_several_tools_it_calls() -> None:
    choice = whole('{"name": "time", "input": {}}', ForcedTool())
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


@pytest.mark.parametrize("text", ['{"town": "U', "", "[1]", '{"name": 7, "input": {}}'])
def test_answer_that_was_cut_short_stays_text(text: str) -> None:
    choice = whole(text, ForcedTool(), "length")
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "chatcmpl-7", "choices": [{"index": 0, "finish_reason": finish, "delta": delta}]}


CHUNKS = [
    chunk({"role": "assistant", "reasoning": "hm"}),
    chunk({"role": "assistant", "content": '{"town"'}),
    chunk({"role": "assistant", "content": ': "Ulm"}'}),
    chunk({"role": "assistant"}, "stop"),
    {"id": "chatcmpl-7", "choices": [], "usage": {"prompt_tokens": 3}},
]


def stream(chunks: list[dict[str, Any]]) -> bytes:
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks)
    return f": keepalive 1/2\n\n{events}data: [DONE]\n\n".encode()


def told(data: bytes, cuts: list[int], forced: ForcedTool) -> list[Any]:
    renderer = ForcedCall(forced)
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    out = renderer.start(None) + b"".join(map(renderer.feed, pieces)) + renderer.end()
    lines = [line for line in out.decode().split("\n\n") if line]
    assert lines[0] == ": keepalive 1/2"
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[1:-1]]


@given(st.lists(st.integers(0, len(stream(CHUNKS))), max_size=6).map(sorted))
def test_stream_ends_with_the_call_however_it_arrives(cuts: list[int]) -> None:
    first, last, usage = told(stream(CHUNKS), cuts, ForcedTool("weather"))
    assert first["choices"][0]["delta"]["reasoning"] == "hm"
    [choice] = last["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["delta"]["tool_calls"]
    assert (call["index"], call["id"]) == (0, "call_7")
    assert json.loads(call["function"]["arguments"]) == {"town": "Ulm"}
    assert usage["usage"] == {"prompt_tokens": 3}


def test_stream_that_was_cut_short_ends_with_its_text() -> None:
    cut = [CHUNKS[1], chunk({"role": "assistant"}, "length")]
    [last] = told(stream(cut), [], ForcedTool("weather"))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["delta"]["content"] == '{"town"'


def test_stream_of_nothing_stays_nothing() -> None:
    [last] = told(stream([chunk({"role": "assistant"}, "length")]), [], ForcedTool("weather"))
    assert last["choices"][0]["delta"] == {"role": "assistant"}
