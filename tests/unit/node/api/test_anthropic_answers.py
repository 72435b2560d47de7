"""Chat completions become messages as an Anthropic-style client reads them."""

from typing import Any

import pytest
from anthropic.types import Message, ModelInfo

from kvnet_node.api.anthropic_answers import PromptCounts, error_of, message_of, models_of, prompt_usage
from kvnet_node.api.anthropic_requests import AnswerShape
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.forced_tools import ForcedTool

SHAPE = AnswerShape(model="asked-for")


def completion(finish_reason: str = "stop", usage: dict[str, Any] | None = None, **message: Any) -> dict[str, Any]:
    """As mlx-lm's server answers, with this project's additions to ``usage``."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "local",
        "choices": [
            {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": None, **message}}
        ],
        "usage": usage or {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }


def call(name: str, arguments: str, id_: str = "c1") -> dict[str, Any]:
    return {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}


def read(answer: dict[str, Any], shape: AnswerShape = SHAPE) -> Message:
    return Message.model_validate(message_of(answer, shape, "msg_1"), strict=True)


def test_text_is_one_block_and_the_model_is_the_one_asked_for() -> None:
    message = read(completion(content="Yes."))
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "Yes."}]
    assert (message.model, message.id, message.stop_reason) == ("asked-for", "msg_1", "end_turn")


def test_reasoning_text_and_calls_come_in_this_order() -> None:
    answer = completion(
        "tool_calls",
        content="I look.",
        reasoning="Hm.",
        tool_calls=[call("a", '{"z": 1, "b": 2}'), call("c", "{}", "c2")],
    )
    message = read(answer)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    first = message_of(answer, SHAPE, "m")["content"][2]
    assert first == {"type": "tool_use", "id": "c1", "name": "a", "input": {"z": 1, "b": 2}}
    assert list(first["input"]) == ["z", "b"]


def test_an_answer_without_text_has_no_block() -> None:
    assert read(completion(content=None)).content == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), ("[1]", {"arguments": [1]}), ("{broken", {"arguments": "{broken"})],
)
def test_arguments_that_are_no_object_are_not_lost(arguments: str, expected: dict[str, Any]) -> None:
    content = message_of(completion("tool_calls", tool_calls=[call("a", arguments)]), SHAPE, "m")["content"]
    assert content[0]["input"] == expected


def test_only_the_first_call_is_given_when_parallel_ones_are_unwanted() -> None:
    shape = AnswerShape(model="m", one_tool_call=True)
    assert len(read(completion("tool_calls", tool_calls=[call("a", "{}"), call("b", "{}")]), shape).content) == 1


def test_a_full_answer_says_so_even_after_a_call() -> None:
    assert read(completion("length", content="Y")).stop_reason == "max_tokens"


def test_the_stop_sequence_that_was_met_is_named() -> None:
    shape = AnswerShape(model="m", stop_sequences=("END",))
    answer = completion(content="a")
    answer["choices"][0]["stop_reason"] = "END"
    message = read(answer, shape)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    answer["choices"][0]["stop_reason"] = None
    assert read(answer, shape).stop_reason == "end_turn"


def test_a_call_that_could_not_be_read_is_no_tool_use() -> None:
    message = read(completion("tool_calls", content="<call>"))
    assert message.stop_reason == "end_turn"


# --- Forced tools --------------------------------------------------------------------------------------------------


def test_a_forced_tool_is_read_from_the_answer() -> None:
    shape = AnswerShape(model="m", forced=ForcedTool("weather"))
    message = read(completion(content='{"town": "Ulm"}'), shape)
    (block,) = message.content
    assert block.type == "tool_use"
    assert (block.name, block.input, message.stop_reason) == ("weather", {"town": "Ulm"}, "tool_use")


def test_any_forced_tool_is_read_with_its_name() -> None:
    shape = AnswerShape(model="m", forced=ForcedTool())
    (block,) = read(completion(content='{"name": "time", "input": {"a": 1}}'), shape).content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("time", {"a": 1})


def test_a_forced_answer_cut_short_stays_text() -> None:
    shape = AnswerShape(model="m", forced=ForcedTool("weather"))
    message = read(completion("length", content='{"town": "U'), shape)
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


# --- Usage ---------------------------------------------------------------------------------------------------------


def test_input_tokens_are_those_neither_read_nor_kept() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 60},
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 30,
        "kvnet": {"window_tokens": 4096, "tokens_left": 3989},
    }
    found = message_of(completion(content="x", usage=usage), SHAPE, "m")["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"], found["cache_creation_input_tokens"]) == (
        10,
        60,
        30,
    )
    assert found["output_tokens"] == 7
    assert found["kvnet"]["tokens_left"] == 3989
    assert found["cache_creation"] == {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 0}


def test_the_counts_of_a_plain_server_are_enough() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
    found = message_of(completion(content="x", usage=usage), SHAPE, "m")["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == (0, 5)


def test_kept_tokens_are_booked_under_the_lifetime_asked_for() -> None:
    found = prompt_usage(PromptCounts(10, 4, 6), 3600.0)
    assert found["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 6}


def test_no_count_is_ever_below_zero() -> None:
    found = prompt_usage(PromptCounts(prompt_tokens=0, reused_tokens=8, created_tokens=9), 0.0)
    assert (found["input_tokens"], found["cache_creation_input_tokens"]) == (0, 0)


def test_a_warmed_cache_has_made_nothing() -> None:
    message = read(completion("length", content="x"), AnswerShape(model="m", prefill_only=True))
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


# --- Models --------------------------------------------------------------------------------------------------------


def test_one_list_of_models_serves_both_styles() -> None:
    entry = {"id": "m", "object": "model", "created": 1_700_000_000, "owned_by": "kvnet", "context_window": 4096}
    found = models_of([entry, {**entry, "id": "m#docs"}])
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("m", "m#docs", False)
    assert found["data"][0].items() >= entry.items()
    read = ModelInfo.model_validate(found["data"][0])
    assert (read.display_name, read.max_input_tokens, read.created_at.year) == ("m", 4096, 2023)
    assert models_of([]) == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


# --- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_names_anthropic_clients_know(status: int, kind: str) -> None:
    assert error_of(ApiFailure(status, "x", "why"), "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            "the model's window is 4,096 tokens; the prompt has 9,000 and 16 may be generated (Shorten it.)",
            "prompt is too long: 9000 tokens > 4096 maximum",
        ),
        ("the model's window is 4,096 tokens; the prompt has 9,000", "prompt is too long: 9000 tokens > 4096 maximum"),
        (
            "the model's window is 4,096 tokens; the prompt has 100 and 32,000 may be generated",
            (
                "input length and `max_tokens` exceed context limit: 100 + 32000 > 4096, "
                "decrease input length or `max_tokens` and try again"
            ),
        ),
        ("much too long", "prompt is too long: much too long"),
    ],
)
def test_a_full_window_is_said_in_the_words_agents_look_for(found: str, said: str) -> None:
    body = error_of(ApiFailure(400, "x", found, "context_length_exceeded"))
    assert body["error"]["message"] == said
    assert "request_id" not in body
