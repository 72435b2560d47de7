"""The style of Anthropic's clients: what is run for them, and how its answer is written."""

import json
from typing import Any

import pytest

from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.exchange.answers import Reuse, Started
from kvnet_node.api.answering import EVENT_STREAM
from kvnet_node.api.anthropic import COUNT_PATH, MESSAGES_PATH, AnthropicStyle, is_anthropic_path, new_message_id
from kvnet_node.api.failures import ApiError, ApiFailure

BODY: dict[str, Any] = {
    "model": "claude-opus-5",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [{"role": "user", "content": "Hi"}],
}


def style(*, counting: bool = False) -> AnthropicStyle:
    return AnthropicStyle(counting=counting, new_id=lambda: "msg_1")


def reuse(prompt: int, reused: int, created: int) -> Reuse:
    return Reuse(
        prompt_tokens=prompt,
        reused_tokens=reused,
        created_tokens=created,
        source="ram",
        sources=(),
        saved_s=0.0,
        lookup_s=0.0,
        restore_s=0.0,
        window_tokens=0,
        verdict=None,
        rejected=(),
        reasons=(),
        prepared=PreparedPrompt((1,), (), 1, 0),
    )


def test_a_request_is_run_as_a_chat_with_its_marks() -> None:
    incoming, _ = style().read(MESSAGES_PATH, BODY, {"x-kvnet-private": "1"})
    assert (incoming.kind, incoming.path) == (PromptKind.CHAT, MESSAGES_PATH)
    assert (incoming.marks, incoming.mark_ttl_s) == ((1,), 3600.0)
    assert incoming.headers == {"x-kvnet-private": "1"}
    assert incoming.body["model"] == "claude-opus-5"


def test_a_count_needs_no_length() -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    incoming, _ = style(counting=True).read(COUNT_PATH, body, {})
    assert "max_tokens" not in incoming.body
    with pytest.raises(ApiError, match="max_tokens"):
        style().read(MESSAGES_PATH, body, {})


def test_a_stream_begins_with_what_was_reused() -> None:
    _, renderer = style().read(MESSAGES_PATH, {**BODY, "stream": True}, {})
    head = renderer.start(Started(200, EVENT_STREAM, reuse(100, 60, 30)))
    start = json.loads(head.split(b"data: ")[1].split(b"\n")[0])["message"]
    assert (start["id"], start["model"]) == ("msg_1", "claude-opus-5")
    assert start["usage"]["input_tokens"] == 10
    assert start["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] == 30
    assert renderer.feed(b": keepalive 1/2\n\n").startswith(b"event: ping\n")
    assert renderer.end().startswith(b"event: error\n")


def test_a_whole_answer_is_a_message() -> None:
    _, renderer = style().read(MESSAGES_PATH, BODY, {})
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Yes."}}
    message = json.loads(renderer.whole(json.dumps({"choices": [choice], "usage": {}}).encode()))
    assert message["content"] == [{"type": "text", "text": "Yes."}]


def test_a_failure_is_worded_for_these_clients() -> None:
    body = json.loads(style().failure(ApiFailure(404, "x", "no such model"), "r1"))
    assert body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no such model"},
        "request_id": "r1",
    }


def test_ids_of_messages_differ() -> None:
    assert new_message_id() != new_message_id()
    assert new_message_id().startswith("msg_")


@pytest.mark.parametrize(
    ("path", "expected"),
    [(MESSAGES_PATH, True), (COUNT_PATH, True), ("/v1/messages/batches", True), ("/v1/messagesx", False), ("/", False)],
)
def test_its_paths_are_known_before_anything_is_read(path: str, expected: bool) -> None:
    assert is_anthropic_path(path) is expected
