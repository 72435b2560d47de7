"""The line for accounting is taken out, and nothing else ever is."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.prompts.normalise import BILLING_LINE, Removed, Rules, describe_removed, normalise

LINE = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=56445;"
OTHER = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=0aaa9;"
PROMPT = "You are a careful assistant.\n\nAnswer: yes=1; no=0;"


def openai(content: Any, role: str = "system") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content}, {"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    "head",
    [
        f"{LINE}\n",
        f"{LINE}\r\n",
        LINE,
        f"{LINE} ",
        f"{LINE[:-1]}\n",
        f"{LINE.replace(' cch=56445;', '')}\n",
        f"{LINE} cc_workload=cron;\n",
        f"{LINE.replace('; cc', ';cc')}\n",
        f"{LINE}\n{OTHER}\n",
        "x-anthropic-billing-header: a form of the future (1)\n",
        f"{LINE.replace('x-anthropic', 'X-Anthropic')}\n",
    ],
)
def test_the_line_at_the_head_of_a_system_text_goes_in_each_of_its_forms(head: str) -> None:
    for body in ({"system": head + PROMPT}, openai(head + PROMPT)):
        result = normalise(body)
        where = "system" if "system" in body else "messages"
        assert result.removed == (Removed(BILLING_LINE, len(head), where),)
        wanted = {"system": PROMPT} if "system" in body else openai(PROMPT)
        assert result.body == wanted


def test_a_block_that_is_only_the_line_goes_whole_and_the_others_keep_their_marks() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    rest = [{"type": "text", "text": PROMPT, **mark}, {"type": "text", "text": "More."}]
    body = {"system": [{"type": "text", "text": LINE}, *rest], "messages": []}
    assert normalise(body).body == {"system": rest, "messages": []}
    assert normalise(openai([{"type": "text", "text": LINE}, *rest])).body == openai(rest)


def test_a_block_that_begins_with_the_line_keeps_its_other_text_and_fields() -> None:
    block = {"type": "text", "text": f"{LINE}\n{PROMPT}", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert normalise({"system": [block]}).body == {"system": [{**block, "text": PROMPT}]}


def test_a_system_message_of_nothing_but_the_line_goes() -> None:
    rest = openai("")["messages"][1:]
    for content in (LINE, [{"type": "text", "text": LINE}]):
        assert normalise(openai(content, "developer")).body["messages"] == rest
        assert normalise({"system": content, "messages": rest}).body == {"messages": rest}


def test_two_requests_that_differ_in_the_line_alone_become_the_same() -> None:
    assert normalise({"system": f"{LINE}\n{PROMPT}"}).body == normalise({"system": f"{OTHER}\n{PROMPT}"}).body


@pytest.mark.parametrize(
    "body",
    [
        {"system": f"{PROMPT}\n{LINE}\n"},
        {"system": [{"type": "text", "text": PROMPT}, {"type": "text", "text": LINE}]},
        {"system": "About x-anthropic-billing-header: it is a line."},
        {"system": "x-anthropic-billing-headers: none"},
        openai(LINE, "user"),
        openai([{"type": "text", "text": f"What is this?\n{LINE}"}]),
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "system", "content": LINE}]},
        {"messages": [{"role": "system", "content": "First."}, {"role": "system", "content": LINE}]},
        {"prompt": f"{LINE}\n{PROMPT}"},
        {"tools": [{"type": "function", "function": {"name": "f", "description": LINE}}]},
    ],
)
def test_the_same_text_anywhere_else_stays(body: dict[str, Any]) -> None:
    assert normalise(body).body == body
    assert normalise(body).removed == ()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": None},
        {"system": 5, "messages": "x"},
        {"messages": []},
        {"messages": [None]},
        {"messages": ["system"]},
        {"messages": [{"role": "system"}]},
        {"messages": [{"role": ["system"], "content": LINE}]},
        {"system": [None, 3, {"text": 4}, {"type": "text"}]},
        {"system": [{"type": "text", "text": ""}]},
    ],
)
def test_a_malformed_body_is_left_to_its_reader(body: dict[str, Any]) -> None:
    assert normalise(body).body == body


def test_the_body_given_is_not_changed() -> None:
    body = {"system": [{"type": "text", "text": f"{LINE}\n{PROMPT}"}], **openai([{"type": "text", "text": LINE}])}
    before = copy.deepcopy(body)
    normalise(body)
    assert body == before


def test_it_can_be_turned_off() -> None:
    body = {"system": f"{LINE}\n{PROMPT}"}
    result = normalise(body, Rules(billing_line=False))
    assert (result.body, result.removed) == (body, ())


def test_what_was_removed_is_said_without_its_text() -> None:
    removed = normalise({"system": f"{LINE}\n{PROMPT}"}).removed
    assert describe_removed(removed) == f"billing line ({len(LINE) + 1} characters)"
    assert "cch" not in repr(removed)
    assert describe_removed(()) == ""


@given(st.text(), st.text())
def test_removing_is_done_once_and_leaves_a_tail_of_the_text(head: str, text: str) -> None:
    for system in (text, LINE + head + "\n" + text, LINE + "\n" + text):
        once = normalise({"system": system}).body
        assert system.endswith(once.get("system", "").lstrip())
        assert normalise(once).body == once
