"""A body's parts and texts, in OpenAI's form and in Anthropic's."""

from typing import Any

import pytest

from kvnet_node.prompts.outline import PartKind, is_anthropic, outline, path_text, replaced
from kvnet_node.prompts.variation import another_request

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
OPENAI: dict[str, Any] = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Text"},
    ],
}
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "read", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {"b": 1, "a": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "Text"}]},
    ],
}


def test_parts_come_in_the_order_tools_system_messages() -> None:
    assert [part.label for part in outline(OPENAI).parts] == [
        "tools",
        "system",
        "messages[1] (user)",
        "messages[2] (assistant)",
        "messages[3] (tool)",
    ]
    assert [part.label for part in outline(ANTHROPIC).parts] == [
        "tools",
        "system",
        "messages[0] (user)",
        "messages[1] (assistant)",
        "messages[2] (user)",
    ]


def test_every_text_says_where_it_stands() -> None:
    pieces = [(path_text(piece.path), piece.text) for part in outline(OPENAI).parts for piece in part.pieces]
    assert pieces[1:4] == [
        ("messages[0].content", "Be brief."),
        ("messages[1].content[0].text", "One"),
        ("messages[1].content[1].text", "Two"),
    ]
    assert [path for path, _ in pieces][4:] == [
        "messages[2].tool_calls[0]",
        "messages[3].tool_call_id",
        "messages[3].content",
    ]


def test_json_keeps_the_order_of_its_keys_and_loses_what_is_no_part_of_a_prompt() -> None:
    parts = outline(ANTHROPIC).parts
    assert parts[0].text == '{"name": "read", "input_schema": {"type": "object"}}'
    assert parts[3].text == '{"type": "tool_use", "id": "1", "name": "read", "input": {"b": 1, "a": 2}}'


def test_a_plain_prompt_is_one_part() -> None:
    [part] = outline({"prompt": "Once upon"}).parts
    assert (part.kind, part.label, part.text) == (PartKind.PROMPT, "prompt", "Once upon")


def test_the_form_is_told_where_it_makes_a_difference() -> None:
    assert is_anthropic(ANTHROPIC)
    assert is_anthropic({"messages": ANTHROPIC["messages"]})
    assert not is_anthropic(OPENAI)
    assert not is_anthropic({"messages": [{"role": "user", "content": "One"}]})
    assert not is_anthropic({"system": "x", "prompt": "One"})


def test_other_texts_leave_the_body_as_it_was() -> None:
    other = replaced(OPENAI, {("messages", 0, "content"): "Be long.", ("tools", 0): '{"a": 1}'})
    assert (other["messages"][0]["content"], other["tools"]) == ("Be long.", [{"a": 1}])
    assert OPENAI["messages"][0]["content"] == "Be brief."


def test_another_request_varies_tools_and_system_and_not_the_conversation() -> None:
    today = "Today is 2026-11-29."
    body = {
        "system": [{"type": "text", "text": today}],
        "tools": [{"name": "run", "description": f"Runs. {today}", "input_schema": {}}],
        "messages": [{"role": "user", "content": today}],
    }
    other = another_request(body)
    assert other["system"][0]["text"] == "Today is 2026-11-20."
    assert other["tools"][0] == {"name": "run", "description": "Runs. Today is 2026-11-20.", "input_schema": {}}
    assert other["messages"] == body["messages"]


def test_a_tool_whose_json_would_break_is_left_as_it_is() -> None:
    body = {"tools": [{"name": "run", "description": "cwd: /opt/a\nb"}], "messages": []}
    assert another_request(body)["tools"][0]["name"] == "run"


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": [3, {"role": "user"}, {"role": 5, "content": {"a": 1}}]}, {"tools": "x", "messages": []}],
)
def test_unknown_forms_are_taken_as_their_json(body: dict[str, Any]) -> None:
    assert all(isinstance(piece.text, str) for part in outline(body).parts for piece in part.pieces)
