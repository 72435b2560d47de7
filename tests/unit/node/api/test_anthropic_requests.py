"""Requests of Anthropic-style clients become chat bodies that ask the same."""

import copy
import json
from contextlib import suppress
from typing import Any, cast

import pytest
from anthropic.types import MessageCreateParams
from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.api.anthropic_requests import Translated, translate
from kvnet_node.api.failures import ApiError
from kvnet_node.api.forced_tools import ForcedTool

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
TIME = {"name": "time", "input_schema": {"type": "object"}}


def asked(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return {name: value for name, value in body.items() if value is not ...}


def translated(**fields: Any) -> Translated:
    return translate(asked(**fields))


def messages(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_least_request_becomes_the_least_body() -> None:
    made = translated()
    assert made.body == {"model": "m", "max_tokens": 16, "messages": messages(("user", "Hi"))}
    assert (made.model, made.stream, made.marks, made.mark_ttl_s) == ("m", False, (), 0.0)


def test_a_request_typed_by_the_client_is_taken() -> None:
    typed: MessageCreateParams = {
        "model": "m",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
        ],
        "tools": [{"name": "time", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "stream": True,
    }
    made = translate(cast("dict[str, Any]", typed))
    assert made.body["chat_template_kwargs"] == {"enable_thinking": True}
    assert made.body["stream_options"] == {"include_usage": True}
    assert not {"metadata", "service_tier", "output_config", "tool_choice", "thinking"} & set(made.body)


def test_parameters_are_carried_over_and_absent_ones_stay_absent() -> None:
    made = translated(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"], thinking={"type": "disabled"})
    assert {name: made.body[name] for name in ("temperature", "top_p", "top_k", "stop")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["END"],
    }
    assert made.body["chat_template_kwargs"] == {"enable_thinking": False}
    assert made.shape.stop_sequences == ("END",)


def test_system_text_and_system_blocks_lead_the_conversation() -> None:
    assert translated(system="Be brief.").body["messages"][0] == {"role": "system", "content": "Be brief."}
    blocks = [{"type": "text", "text": "One."}, {"type": "text", "text": ""}, {"type": "text", "text": "Two."}]
    assert translated(system=blocks).body["messages"][0] == {"role": "system", "content": "One.\n\nTwo."}
    assert translated(system="").body["messages"] == messages(("user", "Hi"))


def test_a_system_message_inside_the_conversation_becomes_marked_user_text() -> None:
    made = translated(messages=messages(("user", "Hi"), ("system", "Be kind."), ("user", "Well?")))
    assert made.body["messages"] == messages(("user", "Hi\n\n<system>\nBe kind.\n</system>\n\nWell?"))


def test_turns_of_one_role_that_follow_each_other_are_one_turn() -> None:
    turns = (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    made = translated(messages=messages(*turns))
    assert made.body["messages"] == messages(("user", "a\n\nb"), ("assistant", "cd"), ("user", "e"))


def test_a_tool_turn_keeps_its_order_its_ids_and_the_key_order_of_inputs() -> None:
    tool_use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"z": 1, "a": {"é": [2]}}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    made = translated(
        messages=messages(
            ("user", "Weather?"),
            ("assistant", [{"type": "text", "text": "I look."}, tool_use]),
            ("user", [result, {"type": "text", "text": "And?"}]),
        )
    )
    _, said, returned, asked_on = made.body["messages"]
    assert said["content"] == "I look."
    call = {"name": "weather", "arguments": '{"z": 1, "a": {"é": [2]}}'}
    assert said["tool_calls"] == [{"id": "t1", "type": "function", "function": call}]
    assert returned == {"role": "tool", "tool_call_id": "t1", "content": "rain", "name": "weather"}
    assert asked_on == {"role": "user", "content": "And?"}


def test_a_failed_tool_says_so_once() -> None:
    def content(text: str, is_error: bool) -> str:
        result = {"type": "tool_result", "tool_use_id": "t", "content": text, "is_error": is_error}
        return str(translated(messages=messages(("user", [result]))).body["messages"][0]["content"])

    assert content("no such town", is_error=True) == "Error: no such town"
    assert content("Error: no such town", is_error=True) == "Error: no such town"
    assert content("fine", is_error=False) == "fine"


def test_a_tool_result_may_be_empty() -> None:
    made = translated(messages=messages(("user", [{"type": "tool_result", "tool_use_id": "t"}])))
    assert made.body["messages"] == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_earlier_thinking_goes_where_templates_look_for_it() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "text", "text": "Yes."},
    ]
    made = translated(messages=messages(("user", "?"), ("assistant", blocks), ("user", "!")))
    assert made.body["messages"][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_tools_become_functions() -> None:
    assert translated(tools=[WEATHER, {**TIME, "type": "custom"}]).body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": WEATHER["description"],
                "parameters": WEATHER["input_schema"],
            },
        },
        {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
    ]


def test_tool_choice_none_leaves_the_tools_out() -> None:
    assert "tools" not in translated(tools=[WEATHER], tool_choice={"type": "none"}).body


def test_a_tool_that_must_be_called_is_forced_by_its_schema() -> None:
    made = translated(tools=[TIME, WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert made.shape.forced == ForcedTool("weather")
    assert made.body["response_format"]["json_schema"]["schema"] == WEATHER["input_schema"]
    assert len(made.body["tools"]) == 2
    assert made.body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_any_tool_is_forced_by_a_choice_of_schemas() -> None:
    made = translated(tools=[TIME, WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert made.shape.forced == ForcedTool("")
    assert made.shape.one_tool_call
    assert made.body["tool_choice"] == "required"
    choices = made.body["response_format"]["json_schema"]["schema"]["anyOf"]
    assert [choice["properties"]["name"]["const"] for choice in choices] == ["time", "weather"]
    assert translated(tools=[TIME], tool_choice={"type": "any"}).shape.forced == ForcedTool("time")


def test_an_output_format_becomes_a_response_format() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    made = translated(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert made.body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


# --- Cache breakpoints ---------------------------------------------------------------------------------------------


def block(text: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": control} if control else {})


def test_breakpoints_become_message_counts_and_leave_no_trace() -> None:
    made = translated(
        system=[block("a"), block("b", EPHEMERAL)],
        tools=[{**TIME, "cache_control": EPHEMERAL}],
        messages=messages(
            ("user", [block("c"), block("d", HOUR)]),
            ("assistant", "e"),
            ("user", [{"type": "tool_result", "tool_use_id": "t", "content": "f", "cache_control": EPHEMERAL}]),
        ),
    )
    assert made.marks == (1, 2, 4)
    assert made.mark_ttl_s == made.shape.mark_ttl_s == 3600.0
    assert "cache_control" not in json.dumps(made.body)


def test_the_shorter_lifetime_is_meant_when_none_is_named() -> None:
    assert translated(system=[block("a", EPHEMERAL)]).mark_ttl_s == 300.0


def test_a_breakpoint_on_the_whole_request_is_behind_the_last_message() -> None:
    made = translated(system="s", cache_control=EPHEMERAL)
    assert made.marks == (2,)


def test_a_breakpoint_on_tools_alone_marks_no_message() -> None:
    made = translated(tools=[{**TIME, "cache_control": EPHEMERAL}])
    assert (made.marks, made.mark_ttl_s) == ((), 300.0)


def test_a_breakpoint_in_a_merged_turn_counts_the_merged_message() -> None:
    made = translated(messages=messages(("user", [block("a", EPHEMERAL)]), ("user", "b")))
    assert made.marks == (1,)


# --- Sameness ------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.builds(block, st.text(max_size=8), st.sampled_from([None, EPHEMERAL, HOUR]))
TOOL_USE = st.fixed_dictionaries(
    {
        "type": st.just("tool_use"),
        "id": st.sampled_from(["t1", "t2"]),
        "name": st.just("weather"),
        "input": st.dictionaries(st.text(max_size=3), JSON, max_size=4),
    }
)
TOOL_RESULT = st.fixed_dictionaries(
    {
        "type": st.just("tool_result"),
        "tool_use_id": st.sampled_from(["t1", "t2"]),
        "content": st.lists(TEXT, max_size=2),
    }
)
USER = st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(TEXT | TOOL_RESULT, max_size=3)})
ASSISTANT = st.fixed_dictionaries({"role": st.just("assistant"), "content": st.lists(TEXT | TOOL_USE, max_size=3)})
HISTORY = st.lists(USER | ASSISTANT, max_size=6)


@given(HISTORY, st.lists(TEXT, max_size=2))
def test_equal_requests_give_equal_bytes_and_are_left_as_they_were(history: list[Any], system: list[Any]) -> None:
    body = asked(system=system, messages=[*history, {"role": "user", "content": "?"}])
    before = copy.deepcopy(body)
    first, second = translate(body), translate(json.loads(json.dumps(body)))
    assert json.dumps(first.body) == json.dumps(second.body)
    assert (first.marks, first.mark_ttl_s) == (second.marks, second.mark_ttl_s)
    assert body == before


@given(HISTORY, ASSISTANT)
def test_a_longer_conversation_begins_with_the_shorter_one(history: list[Any], answer: dict[str, Any]) -> None:
    short = [*history, {"role": "user", "content": "?"}]
    longer = [*short, answer, {"role": "user", "content": "!"}]
    before, after = (translated(messages=each).body["messages"] for each in (short, longer))
    if answer["content"]:
        assert after[: len(before)] == before
    else:
        assert after[: len(before) - 1] == before[:-1]
        assert after[len(before) - 1]["content"].startswith(before[-1]["content"])


@given(HISTORY)
def test_marks_lie_within_the_messages_in_order(history: list[Any]) -> None:
    made = translated(messages=[*history, {"role": "user", "content": "?"}])
    assert list(made.marks) == sorted(set(made.marks))
    assert all(1 <= mark <= len(made.body["messages"]) for mark in made.marks)


# --- Refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": ...}, "max_tokens: expected a number of tokens"),
        ({"max_tokens": "8"}, "max_tokens: Expected `int | null`"),
        ({"max_tokens": -1}, "max_tokens: expected 0 or more"),
        ({"model": ...}, "Object missing required field `model`"),
        ({"messages": ...}, "Object missing required field `messages`"),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": "hi"}, "messages: Expected `array`"),
        ({"messages": messages(("robot", "x"))}, "messages.0.role: Invalid enum value 'robot'"),
        ({"messages": messages(("user", 5))}, "messages.0.content: Expected"),
        ({"messages": messages(("user", [{"type": "text"}]))}, "messages.0.content.0: Object missing"),
        ({"messages": messages(("user", [{"type": "image"}]))}, "messages.0.content.0: pictures are not supported"),
        ({"messages": messages(("user", [{"type": "document"}]))}, "documents are not supported"),
        ({"messages": messages(("user", [{}]))}, "messages.0.content.0.type: expected the kind"),
        ({"messages": messages(("user", [{"type": "tool_use"}]))}, "content blocks of type 'tool_use'"),
        ({"messages": messages(("assistant", [{"type": "server_tool_use"}]))}, "type 'server_tool_use'"),
        ({"messages": messages(("user", "a"), ("assistant", "{"))}, "(prefill) is not supported"),
        (
            {
                "messages": messages(
                    ("user", [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}])
                )
            },
            "messages.0.content.0.content.0: pictures",
        ),
        ({"system": [{"type": "image"}]}, "system.0: pictures"),
        ({"system": [block("a", {"type": "forever"})]}, "system.0.cache_control.type: Invalid enum value"),
        ({"system": [block("a", {"type": "ephemeral", "ttl": "2d"})]}, "system.0.cache_control.ttl: Invalid enum"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: the tool 'web_search_20250305'"),
        ({"tools": [{"name": "x"}]}, "tools.0: Object missing required field `input_schema`"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice: expected tools"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: expected one of time"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type: Invalid enum value"),
        ({"thinking": {"type": "loud"}}, "thinking.type: Invalid enum value"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: MCP servers"),
        ({"container": {"id": "c"}}, "container: containers"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as caught:
        translated(**fields)
    assert named in caught.value.message
    assert caught.value.failure.status == 400


@given(st.dictionaries(st.sampled_from([*asked(), "system", "tools", "thinking"]), JSON))
def test_no_body_breaks_the_translation(fields: dict[str, Any]) -> None:
    with suppress(ApiError):
        assert json.loads(json.dumps(translated(**fields).body))["messages"]


def test_counting_needs_no_max_tokens() -> None:
    made = translate(asked(max_tokens=...), counting=True)
    assert "max_tokens" not in made.body


def test_a_request_to_warm_the_cache_asks_for_nothing_to_be_shown() -> None:
    made = translated(max_tokens=0)
    assert made.body["max_tokens"] == 1
    assert made.shape.prefill_only
