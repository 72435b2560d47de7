"""Request bodies before mlx-lm's handler sees them, and the errors it answers after.

The handler checks the parameters it knows. Here those are refused that it would choke on once the answer has begun, and
those that kvnet does not support, instead of being ignored.
"""

import json
import time
from collections.abc import Callable
from typing import Any

MAX_STOP_TEXTS = 16
"""Of one request; OpenAI's API takes 4."""
MAX_STOP_CHARACTERS = 1000
"""Of each of them."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "presence_penalty": (-1000, 1000),
    "frequency_penalty": (-1000, 1000),
    "repetition_penalty": (0, 1000),
    "top_k": (0, 2**31 - 1),
    "repetition_context_size": (0, 2**31 - 1),
    "presence_context_size": (0, 2**31 - 1),
    "frequency_context_size": (0, 2**31 - 1),
}
"""What MLX computes with: beyond it 32-bit numbers overflow, and infinities times zero choose any token at all."""
_FRACTIONS = ("xtc_probability", "xtc_threshold")
_NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_FRACTIONS,
)
SMALLEST = 1e-6
"""Of what logits are divided by, where it is not 0."""
MAX_BIAS = 1e9
"""Far beyond any logit, and finite in 32 bits also when several are added."""


def now() -> int:
    """Seconds since 1970, for ``created``."""
    return int(time.time())


def parse_body(body: bytes) -> dict[str, Any]:
    """A request body as an object, without members that are null.

    Raises:
        ValueError: it is not a JSON object, or holds a number that JSON does not know.
    """
    try:
        parsed = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"the request body is not JSON{where}: expected an object") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"the request body is JSON, but no object: found {type(parsed).__name__}")  # noqa: TRY004 - mlx-lm's
    # Clients write null for what they leave to the server; the handler would call it a wrong type.
    return {name: value for name, value in parsed.items() if value is not None}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows")


def handler_body(body: bytes) -> bytes:
    """What the handler gets to read: the request without its messages, which are tokens by now.

    Raises:
        ValueError: as ``parse_body``, or the request asks for something unsupported.
    """
    parsed = parse_body(body)
    refuse_unsupported(parsed)
    for place in ("messages", "prompt"):
        if place in parsed:
            parsed[place] = []
    for name in _FRACTIONS:
        if type(parsed.get(name)) is int:
            # To JSON 0 and 0.0 are one number, to the handler two types.
            parsed[name] = float(parsed[name])
    options = parsed.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ValueError("stream_options must be an object")
    parsed["stream_options"] = {"include_usage": bool((options or {}).get("include_usage"))}
    return json.dumps(parsed).encode()


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuses what would otherwise be ignored silently.

    Raises:
        ValueError: names the parameter and what to do.
    """
    for name, wanted in _UNSUPPORTED.items():
        if name in body and (reason := wanted(body[name])):
            raise ValueError(f"{name} is not supported: {reason}")


def _more_than_one(value: Any) -> str:
    return "one answer is given to a request" if value != 1 else ""


def _draft(value: Any) -> str:
    return "" if value == "default_model" else "a draft model together with reuse of K/V; leave it out"


def _given(reason: str) -> Callable[[Any], str]:
    return lambda value: reason if value else ""


def _audio(value: Any) -> str:
    return "answers are text" if value != ["text"] else ""


_UNSUPPORTED: dict[str, Callable[[Any], str]] = {
    "n": _more_than_one,
    "best_of": _more_than_one,
    "draft_model": _draft,
    "adapters": _given("K/V of an adapter is not that of the model; leave it out"),
    "audio": _given("answers are text"),
    "modalities": _audio,
    "echo": _given("the answer alone is given"),
    "suffix": _given("text is continued at its end only"),
}


def check(body: dict[str, Any], *, vocabulary_size: int) -> None:
    """Checks what mlx-lm's handler passes on unseen.

    Raises:
        ValueError: names the parameter, what was expected and what was found.
    """
    _check_stop(body.get("stop"))
    _check_numbers(body)
    for token in body.get("logit_bias") or {}:
        if not 0 <= int(token) < vocabulary_size:
            raise ValueError(f"logit_bias: token ids are below {vocabulary_size:,}, found {int(token)}")
    if body.get("tools") is not None and not isinstance(body["tools"], list):
        raise ValueError("tools must be a list")
    if body.get("response_format") and body.get("tools"):
        kind = body["response_format"].get("type") if isinstance(body["response_format"], dict) else None
        # A call that must be made is that JSON; whoever asked reads it as the call.
        forced = body.get("tool_choice") not in (None, "auto", "none")
        if kind != "text" and not forced:
            raise ValueError("response_format together with tools is not supported: a tool call is not that JSON")


def check_types(body: dict[str, Any]) -> None:
    """Checks what mlx-lm's own checks choke on, before them.

    Raises:
        ValueError: names the parameter, what was expected and what was found.
    """
    for name in (*RANGES, "max_tokens", "top_p", "min_p", "xtc_probability", "xtc_threshold", "seed", "top_logprobs"):
        if isinstance(body.get(name), bool):
            # To Python it is a number; to MLX it is none.
            raise ValueError(f"{name} must be a number, found {str(body[name]).lower()}")  # noqa: TRY004 - mlx-lm's
    for name in _NUMBERS:
        if not isinstance(body.get(name, 0), int | float):
            raise ValueError(f"{name} must be a number, found {json.dumps(body[name]):.40}")  # noqa: TRY004 - mlx-lm's
    biases = body.get("logit_bias")
    for value in biases.values() if isinstance(biases, dict) else ():
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_BIAS:
            raise ValueError(f"logit_bias: expected numbers from {-MAX_BIAS:,.0f} to {MAX_BIAS:,.0f}")


def _check_numbers(body: dict[str, Any]) -> None:
    for name, (lowest, highest) in RANGES.items():
        if not lowest <= body.get(name, lowest) <= highest:
            raise ValueError(f"{name} must be from {lowest:,} to {highest:,}")
    for name in ("temperature", "repetition_penalty"):
        if 0 < body.get(name, 0) < SMALLEST:
            raise ValueError(f"{name} must be 0 or at least {SMALLEST}")


def _check_stop(stop: Any) -> None:
    texts = [stop] if isinstance(stop, str) else stop or []
    right = isinstance(texts, list) and all(
        isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in texts
    )
    if not right or len(texts) > MAX_STOP_TEXTS:
        raise ValueError(
            f"stop must be a text or up to {MAX_STOP_TEXTS} of them, each of 1 to {MAX_STOP_CHARACTERS} characters"
        )


def error_body(data: bytes) -> bytes:
    """mlx-lm's error, a text, as clients of OpenAI's interface expect it: an object."""
    message = json.loads(data)["error"]
    error = {"message": str(message), "type": "invalid_request_error", "param": None, "code": None}
    return json.dumps({"error": error}).encode()
