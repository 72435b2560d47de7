"""Request bodies as parts of a prompt: tools, system prompt, messages; OpenAI style and Anthropic style."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from kvnet_node.audit.causes import Cause
from kvnet_node.audit.fields import text as text_field
from kvnet_node.audit.prompt import NO_FEATURES, Part, digest
from kvnet_node.prompts.normalise import normalise
from kvnet_node.prompts.spans import SpanKind, volatile_spans

MAX_INLINE_CHARACTERS = 512
"""A longer base64 text is a picture or a file; it counts as a short one, because its tokens are not its characters."""

_SYSTEM_ROLES = ("system", "developer")
_MARKERS = frozenset({"cache_control"})
_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
_BASE64 = re.compile(rf"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{{{MAX_INLINE_CHARACTERS},}}={{0,2}}")

MAX_HEAD_CHARACTERS = 65_536
"""So much of a text is looked through for what varies; what is longer is no instruction but a document."""


def parts(body: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of a request body, in the order in which most templates print them."""
    if isinstance(tools := body.get("tools"), list) and tools:
        yield tools_part(tools)
    mended = normalise(body).body
    if body.get("system"):
        yield _head_part("system", "", content_text(body["system"]), content_text(mended.get("system")))
    yield from _messages(body, mended)
    for name in ("prompt", "instructions"):
        if isinstance(body.get(name), str):
            yield _head_part("system", "", body[name], body[name])


def _messages(body: Mapping[str, Any], mended: Mapping[str, Any]) -> Iterator[Part]:
    given = body.get("messages") or body.get("input")
    if isinstance(given, str):
        yield message_part({"role": "user", "content": given}, head=True)
        return
    messages = [each for each in given or [] if isinstance(each, dict)] if isinstance(given, list) else []
    head = True
    for index, message in enumerate(messages):
        if message.get("role") in _SYSTEM_ROLES:
            content = message.get("content")
            text = content_text(content)
            yield _head_part("system", "", text, _first_system(mended) if index == 0 else text)
        else:
            yield message_part(message, head=head)
            head = False


def _first_system(mended: Mapping[str, Any]) -> str:
    messages = mended.get("messages") or mended.get("input") or []
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    return content_text(first.get("content")) if first.get("role") in _SYSTEM_ROLES else ""


def tools_part(tools: list[Any]) -> Part:
    """The tools; mended they stand in the order of their names, and their keys too."""
    plain = [_plain(tool) for tool in tools]
    canonical = [_canonical(tool) for tool in plain]
    text = _json(plain)
    mended = "\n".join(sorted(canonical))
    return Part("tools", text, mended, features={Cause.TOOLS_ORDER.value: digest(*canonical)})


def message_part(message: Mapping[str, Any], *, head: bool = False) -> Part:
    """A message; in the first one of a user, agents put what they know of the day and the place."""
    role = str(message.get("role", ""))
    rest = {key: value for key, value in message.items() if key not in {"role", "content", "id"} | _MARKERS}
    text = content_text(message.get("content")) + (_json(_plain(rest)) if rest else "")
    if head:
        return _head_part("message", role, text, text)
    if role == "assistant" and (mended := _without_reasoning(message, rest)) != text:
        return Part("message", text, mended, role, {Cause.REASONING.value: digest(text)})
    return Part("message", text, text, role, NO_FEATURES)


def _without_reasoning(message: Mapping[str, Any], rest: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = [each for each in content if not (isinstance(each, dict) and text_field(each, "type") in _REASONING)]
    kept = {key: value for key, value in rest.items() if key not in _REASONING}
    return content_text(content) + (_json(_plain(kept)) if kept else "")


def _head_part(kind: str, role: str, text: str, mended: str) -> Part:
    """A part before the conversation, where agents put dates, names and ids."""
    features = {Cause.BILLING_LINE.value: digest(text[: len(text) - len(mended)]) if mended != text else 0}
    plain, varying = _varying(mended)
    return Part(kind, text, plain if mended != plain else mended, role, features | varying)


@lru_cache(maxsize=16)
def _varying(text: str) -> tuple[str, dict[str, int]]:
    """A text without what probably varies, and a digest of what was taken out, by the id of the killer it makes.

    Heads come again with every request, and looking through them takes far longer than hashing them.
    """
    pieces: list[str] = []
    found: dict[str, list[str]] = {kind.value: [] for kind in SpanKind}
    end = 0
    for span in volatile_spans(text[:MAX_HEAD_CHARACTERS]):
        pieces += (text[end : span.start], f"<{span.kind}>")
        found[span.kind.value].append(text[span.start : span.end])
        end = span.end
    mended = "".join((*pieces, text[end:])) if pieces else text
    return mended, {kind: digest(*texts) for kind, texts in found.items()}


def content_text(content: Any) -> str:
    """What a message says: its texts one after the other, everything else as JSON without cache markers."""
    if isinstance(content, str):
        return _BASE64.sub(_shortened, content)
    if not isinstance(content, list):
        return "" if content is None else _json(_plain(content))
    return "\n".join(
        _BASE64.sub(_shortened, each["text"])
        if isinstance(each, dict) and isinstance(each.get("text"), str)
        else _json(_plain(each))
        for each in content
    )


def _shortened(match: re.Match[str]) -> str:
    return f"<{digest(match[0]):016x}>"


def _plain(value: Any) -> Any:
    """The value without cache markers, which move from request to request, and without long base64 texts."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in _MARKERS}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return _BASE64.sub(_shortened, value) if isinstance(value, str) else value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8")


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode("utf-8")
