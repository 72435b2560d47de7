"""Request bodies are found in every form people keep them in; what is none is named by file and line."""

import json
from typing import Any

import pytest

from kvnet.errors import UsageError
from kvnet_node.prompts.reading import read_requests

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
OTHER = {"model": "m", "prompt": "Once upon"}


def read(text: str) -> list[tuple[dict[str, Any], int]]:
    return [(each.body, each.line) for each in read_requests(text, "log")]


def test_a_body_over_several_lines_is_one_request() -> None:
    assert read("\n\n" + json.dumps(BODY, indent=2)) == [(BODY, 3)]


def test_a_list_holds_one_request_each() -> None:
    assert read(json.dumps([BODY, OTHER])) == [(BODY, 1), (OTHER, 1)]
    assert read(json.dumps({"requests": [BODY]})) == [(BODY, 1)]


def test_a_log_has_one_request_a_line_and_may_have_empty_lines() -> None:
    assert read(f"{json.dumps(BODY)}\r\n\n{json.dumps(OTHER)}\n") == [(BODY, 1), (OTHER, 3)]


@pytest.mark.parametrize(
    "record",
    [
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"custom_id": "1", "params": BODY},
        {"request": {"headers": {}, "body": BODY}, "response": {"body": {}}},
        {"time": "x", "request_body": json.dumps(BODY)},
    ],
)
def test_a_record_of_a_log_or_a_batch_is_unwrapped(record: dict[str, Any]) -> None:
    assert read(json.dumps(record)) == [(BODY, 1)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{json.dumps(BODY)}\n{{'a'}}", "log:2: expected JSON"),
        ('{\n  "messages": [\n}', "log:3: expected JSON"),
        (json.dumps(BODY) + "\n" + json.dumps({"role": "user", "content": "x"}), "log:2: expected a request body"),
        ("[1]", "log:1: expected a request body with messages or prompt, found a number"),
        ('{"messages": {}}', "log:1: expected a request body with messages or prompt, found an object with messages"),
        (" \n", "log: expected a request body, found an empty file"),
        ("[]", "log: expected at least one request body, found an empty list"),
        (json.dumps({"messages": [], "x": json.loads("[" * 70 + "]" * 70)}), "log:1: expected JSON nested at most"),
        ("[" * 100_000, "log:1: expected JSON"),
    ],
)
def test_what_is_no_request_is_named_by_file_and_line(text: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_requests(text, "log")
    assert str(caught.value).startswith(wanted)
