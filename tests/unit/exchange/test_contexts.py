"""Named contexts as bytes that came from a peer."""

import json
from typing import Any

import pytest
import rfc8785

from kvnet.errors import MalformedError
from kvnet.exchange.contexts import MAX_MESSAGES, NamedContext, decode_context, document_context, encode_context

SOUND: dict[str, Any] = {"messages": [{"content": "a", "role": "system"}], "template_inputs": {"date": "2026-11-29"}}


def test_a_context_reads_back_and_takes_a_question_last() -> None:
    context = document_context("text of the document, ü", {"date": "2026-11-29"})
    assert decode_context(encode_context(context)) == context
    assert context.with_question("why?") == [
        {"role": "system", "content": "text of the document, ü"},
        {"role": "user", "content": "why?"},
    ]


def test_one_context_has_one_encoding_whatever_the_order_of_its_fields() -> None:
    one = NamedContext(({"role": "user", "content": "b"},), {"x": "1", "a": "2"})
    other = NamedContext(({"content": "b", "role": "user"},), {"a": "2", "x": "1"})
    assert encode_context(one) == encode_context(other)


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(SOUND).encode(),  # spaces after the separators
        rfc8785.dumps(SOUND) + b"\n",
        rfc8785.dumps(SOUND).replace(b'"a"', b'"\\u0061"'),
        b'{"template_inputs":{"date":"2026-11-29"},"messages":[{"content":"a","role":"system"}]}',
        rfc8785.dumps(SOUND).replace(b'"content":"a"', b'"content":"b","content":"a"'),
    ],
    ids=["spaces", "trailing byte", "escape", "order of fields", "a field twice"],
)
def test_a_second_spelling_of_a_context_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_context(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a", "role": "root"}]}, "roles system, user, assistant, tool"),
        ({"messages": [{"content": "a", "role": "x" * 1000}]}, "roles"),
        ({"messages": [{"content": "a", "role": "user", "tool": "rm"}]}, "unknown field"),
        ({"messages": [{"content": 1, "role": "user"}]}, "str"),
        ({"messages": [{"content": "a", "role": "user"}] * (MAX_MESSAGES + 1)}, "length"),
        ({"template_inputs": {"date": 1}}, "str"),
        ({"template_inputs": {f"n{number}": "" for number in range(65)}}, "length"),
        ({"template": "{{ 1 }}"}, "unknown field"),
    ],
)
def test_what_is_no_context_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedError, match=reason) as refused:
        decode_context(rfc8785.dumps({**SOUND, **change}))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("data", [b"", b"\xff", b"null", b"[" * 100_000, b'{"messages":' * 50_000])
def test_bytes_that_are_no_json_are_refused_however_deep(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_context(data)
