"""From answers in the shape of OpenAI's chat completions to those of Anthropic's Messages API.

Pure functions, for whole answers, lists of models and errors; the streamed form is in ``anthropic_stream``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvnet_node.api.anthropic_conversation import CACHE_TTL_S
from kvnet_node.api.anthropic_requests import AnswerShape
from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.forced_tools import forced_call

SIGNATURE = "unsigned"
"""Stands where Anthropic signs a model's thinking. Clients keep thinking only with a signature, and need it again in
the next turn for the same prefix; nothing is signed here and nothing is checked when it comes back."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's names of errors by HTTP status."""


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Tokens of a prompt, known before its answer begins.

    Attributes:
        prompt_tokens: all of them.
        reused_tokens: those whose K/V was at hand.
        created_tokens: those that will newly be kept.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    created_tokens: int = 0


def prompt_usage(counts: PromptCounts, mark_ttl_s: float) -> JsonObject:
    """The prompt's part of ``usage``; as at Anthropic ``input_tokens`` are those neither read nor newly kept."""
    computed = max(counts.prompt_tokens - counts.reused_tokens, 0)
    created = min(counts.created_tokens, computed)
    long_lived = mark_ttl_s >= CACHE_TTL_S["1h"]
    return {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": counts.reused_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": 0 if long_lived else created,
            "ephemeral_1h_input_tokens": created if long_lived else 0,
        },
    }


def counts_of(usage: Mapping[str, Any]) -> PromptCounts:
    """The prompt's counts out of an OpenAI-style ``usage``."""
    details = usage.get("prompt_tokens_details") or {}
    return PromptCounts(
        prompt_tokens=usage.get("prompt_tokens", 0),
        reused_tokens=usage.get("cache_read_input_tokens", details.get("cached_tokens", 0)),
        created_tokens=usage.get("cache_creation_input_tokens", 0),
    )


def full_usage(usage: Mapping[str, Any], shape: AnswerShape) -> JsonObject:
    """Anthropic's ``usage`` out of an OpenAI-style one; the node's own figures (``kvnet``) are passed on."""
    out = prompt_usage(counts_of(usage), shape.mark_ttl_s)
    out["output_tokens"] = 0 if shape.prefill_only else usage.get("completion_tokens", 0)
    if (own := usage.get("kvnet")) is not None:
        out["kvnet"] = own
    return out


def stop_of(choice: Mapping[str, Any], shape: AnswerShape, *, called: bool) -> JsonObject:
    """``stop_reason`` and ``stop_sequence`` of a finished choice.

    Args:
        choice: with ``finish_reason``, and ``stop_reason`` where the engine says which stop sequence was met.
        shape: of the request.
        called: the answer holds a tool call.
    """
    reason = _STOP_REASONS.get(choice.get("finish_reason") or "stop", "end_turn")
    if shape.prefill_only:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    met = choice.get("stop_reason")
    if reason == "end_turn" and isinstance(met, str) and met in shape.stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    if reason == "end_turn" and called:
        reason = "tool_use"
    elif reason == "tool_use" and not called:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def message_of(answer: JsonObject, shape: AnswerShape, message_id: str) -> JsonObject:
    """The whole message out of a chat completion.

    Args:
        answer: parsed JSON of the completion.
        shape: of the request.
        message_id: the message's ``id``.
    """
    choice = answer["choices"][0]
    content = [] if shape.prefill_only else _content(choice.get("message") or {}, shape, message_id)
    called = any(block["type"] == "tool_use" for block in content)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": shape.model,
        "content": content,
        **stop_of(choice, shape, called=called),
        "usage": full_usage(answer.get("usage") or {}, shape),
    }


def _content(message: Mapping[str, Any], shape: AnswerShape, message_id: str) -> list[JsonObject]:
    content: list[JsonObject] = []
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": SIGNATURE})
    text = message.get("content") or ""
    if shape.forced is not None and (call := forced_call(text, shape.forced)) is not None:
        return [*content, {"type": "tool_use", "id": forced_id(message_id), "name": call[0], "input": call[1]}]
    if text:
        content.append({"type": "text", "text": text})
    calls = message.get("tool_calls") or []
    for call_of in calls[:1] if shape.one_tool_call else calls:
        function = call_of["function"]
        content.append(
            {
                "type": "tool_use",
                "id": call_of["id"],
                "name": function["name"],
                "input": tool_input(function.get("arguments") or "{}"),
            }
        )
    return content


def tool_input(arguments: str) -> JsonObject:
    """A tool call's arguments as an object; what is none is put into one, so that nothing is lost."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def forced_id(message_id: str) -> str:
    """An id for the call that an answer under ``tool_choice`` stands for; the engine gave none."""
    return "toolu_" + message_id.removeprefix("msg_")


# --- Models --------------------------------------------------------------------------------------------------------


def model_of(model: Mapping[str, Any]) -> JsonObject:
    """A model of ``/v1/models`` in OpenAI's form, with the names that Anthropic's clients read beside the others."""
    created = datetime.fromtimestamp(model.get("created", 0), UTC)
    out = {
        **model,
        "type": "model",
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }
    if (window := model.get("context_window")) is not None:
        out["max_input_tokens"] = window
    return out


def models_of(models: Sequence[Mapping[str, Any]]) -> JsonObject:
    """The list of models, for clients of both styles; it has one page."""
    data = [model_of(model) for model in models]
    ends = [data[0]["id"], data[-1]["id"]] if data else [None, None]
    return {"object": "list", "data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


# --- Errors --------------------------------------------------------------------------------------------------------


_WINDOW = re.compile(r"window is ([\d,]+) tokens; the prompt has ([\d,]+)(?: and ([\d,]+) may be generated)?")
"""The figures in the message of ``WindowError``."""


def _over_window(message: str) -> str:
    """A full window in the words of Anthropic's API: agents look for them, and for the figures, and send less."""
    match = _WINDOW.search(message)
    if match is None:
        return f"prompt is too long: {message}"
    window, prompt, asked = (int((figure or "0").replace(",", "")) for figure in match.groups())
    if prompt >= window:
        return f"prompt is too long: {prompt} tokens > {window} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {window}, "
        "decrease input length or `max_tokens` and try again"
    )


def error_of(failure: ApiFailure, request_id: str = "") -> JsonObject:
    """A failure as Anthropic's API words it.

    Args:
        failure: what happened.
        request_id: of the request, when there is one.
    """
    fallback = "invalid_request_error" if failure.status < 500 else "api_error"
    message = _over_window(failure.message) if failure.code == "context_length_exceeded" else failure.message
    error = {"type": _ERROR_TYPES.get(failure.status, fallback), "message": message}
    body: JsonObject = {"type": "error", "error": error}
    if request_id:
        body["request_id"] = request_id
    return body
