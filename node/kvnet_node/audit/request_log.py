"""Logs of requests: one body a line, OpenAI or Anthropic style, or an object with ``request`` and ``response``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvnet_node.audit.auditor import Sent
from kvnet_node.audit.bodies import parts
from kvnet_node.audit.fields import count, record, text, timestamp_s
from kvnet_node.audit.prompt import extend, root

AGENT = "requests"

ScopeOf = Callable[[str, str], tuple[str, ...]]

_PROMPTS = ("messages", "prompt", "input")
_TIMES = ("timestamp", "time", "created_at", "created", "ts")
_SESSIONS = ("session_id", "sessionId", "conversation_id", "session")


def body_of(value: dict[str, Any]) -> dict[str, Any] | None:
    """The request body of a line; None when there is none."""
    for candidate in (value, *(_object(value.get(name)) for name in ("request", "body", "request_body"))):
        for each in (candidate, _object(candidate.get("body")), _object(candidate.get("json"))):
            if any(isinstance(each.get(name), list | str) for name in _PROMPTS):
                return each
    return None


def requests(
    path: Path, lines: Iterable[tuple[int, dict[str, Any]]], scope_of: ScopeOf, unknown: Callable[[int, str], None]
) -> Iterator[Sent]:
    """The requests of one file; a line that is none is told to ``unknown``."""
    for number, value in lines:
        body = body_of(value)
        if body is None:
            unknown(number, "expected a request body, or an object with request and response")
            continue
        session, model = _session(value, body) or path.name, text(body, "model")
        prompt = root(*scope_of(AGENT, session))
        for part in parts(body):
            prompt = extend(prompt, part)
        tokens, cached = usage_of(value)
        yield Sent(
            agent=AGENT,
            session=session,
            model=model,
            prompt=prompt,
            tokens=tokens,
            cached=cached,
            at_s=next((at for name in _TIMES if (at := timestamp_s(value.get(name))) is not None), None),
        )


def usage_of(value: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Tokens of the prompt and those served from a cache, as the answer's usage says; None where it does not."""
    usage: dict[str, Any] = {}
    for holder in _answers(value):
        usage = record(holder, "usage") or record(record(holder, "message"), "usage") or usage
    if (prompt := count(usage, "prompt_tokens")) is not None:
        return prompt, count(record(usage, "prompt_tokens_details"), "cached_tokens")
    if (fresh := count(usage, "input_tokens")) is None:
        return None, None
    if "input_tokens_details" in usage:
        return fresh, count(record(usage, "input_tokens_details"), "cached_tokens")
    read = count(usage, "cache_read_input_tokens")
    return fresh + (read or 0) + (count(usage, "cache_creation_input_tokens") or 0), read


def _answers(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Whatever may hold usage: the line itself, its response, its body, the events of a stream."""
    yield dict(value)
    response = value.get("response", value.get("response_body"))
    found = _object(response)
    yield from (found, _object(found.get("body")), _object(found.get("json")))
    events = response if isinstance(response, list) else found.get("events")
    if isinstance(events, list):
        yield from (_object(event) for event in events)


def _session(value: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    for holder in (value, body, record(body, "metadata"), record(value, "metadata")):
        for name in _SESSIONS:
            if found := text(holder, name):
                return found
    return text(body, "prompt_cache_key") or text(record(body, "metadata"), "user_id")


def _object(value: Any) -> dict[str, Any]:
    """An object, or the object that a JSON text holds."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}
