"""Parameters of a request in the form the engine's server takes, and those that nobody here can follow.

A parameter that would be ignored without a word is refused: an answer that is not what was asked for looks like one
that is.
"""

from collections.abc import Mapping
from typing import Any

from kvnet.engine.prompts import PromptKind
from kvnet_node.api.failures import invalid

Body = dict[str, Any]

_REFUSED: Mapping[str, str] = {
    "draft_model": "draft models are not used here: their answers are not checked together with reuse",
    "adapters": "adapters cannot be chosen for each request; a model folder with the adapter merged in can be used",
    "functions": "the form before `tools` is not known here; use tools",
    "function_call": "the form before `tool_choice` is not known here; use tools and tool_choice",
    "audio": "this endpoint answers in text",
    "web_search_options": "this endpoint searches nothing",
    "suffix": "text between a prompt and a suffix is not made here",
    "best_of": "one answer is made for each request",
}


def clean_parameters(kind: PromptKind, body: Mapping[str, Any]) -> Body:
    """A body whose parameters the engine's server takes.

    What is null is as if it were not there. ``max_completion_tokens`` becomes ``max_tokens``; ``logprobs`` as a number,
    as text completions have it, becomes ``top_logprobs``.

    Args:
        kind: of the endpoint.
        body: as the client sent it; not changed.

    Raises:
        ApiError: 400: a parameter that cannot be followed here.
    """
    cleaned = {name: value for name, value in body.items() if value is not None}
    for name, why in _REFUSED.items():
        if cleaned.get(name) not in (None, False, "", [], {}):
            raise invalid(f"{name}: {why}", param=name, code="unsupported_parameter")
        cleaned.pop(name, None)
    _refuse_other_than(cleaned, "n", 1, "one answer is made for each request")
    _refuse_other_than(cleaned, "echo", False, "the prompt is not repeated in answers")
    if "max_completion_tokens" in cleaned:
        cleaned["max_tokens"] = cleaned.pop("max_completion_tokens")
    if kind is PromptKind.TEXT:
        _text_logprobs(cleaned)
        _one_prompt(cleaned)
    return cleaned


def max_tokens_of(body: Mapping[str, Any]) -> int | None:
    """How many tokens a cleaned body asks for at most; None when it does not say.

    Raises:
        ApiError: 400: not a whole number from 1 on.
    """
    value = body.get("max_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid(f"expected max_tokens to be a whole number from 1 on, found {value!r:.40}", param="max_tokens")
    return value


def cache_key_of(body: Mapping[str, Any]) -> str:
    """``prompt_cache_key``: by which a client says that requests belong together."""
    value = body.get("prompt_cache_key", "")
    return value[:256] if isinstance(value, str) else ""


def marks_of(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Message counts of ``cache_control`` breakpoints in an OpenAI-style body, where some clients put them too."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ()
    return tuple(i + 1 for i, message in enumerate(messages) if _is_marked(message))


def _is_marked(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(each, dict) and each.get("cache_control") is not None for each in (message, *parts))


def _refuse_other_than(body: Body, name: str, only: object, why: str) -> None:
    if body.pop(name, only) != only:
        raise invalid(f"{name}: {why}", param=name, code="unsupported_parameter")


def _text_logprobs(body: Body) -> None:
    value = body.get("logprobs")
    if isinstance(value, int) and not isinstance(value, bool):
        body["logprobs"] = value > 0
        if value > 0:
            body["top_logprobs"] = value


def _one_prompt(body: Body) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        body["prompt"] = prompt[0]
    elif not isinstance(prompt, str):
        raise invalid(f"expected prompt to be one text, found {type(prompt).__name__}", param="prompt")
