"""A request body as the parts a prompt is made of, each with the texts in it and where they stand in the body.

The parts come in the order tools, system, messages. A chat template may put them in another order; what a prompt's
tokens say of that is in ``sections``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

JsonBody = dict[str, Any]
Path = tuple[str | int, ...]
"""The keys and indices that lead to a value of a body."""

SYSTEM_ROLES = ("system", "developer")
_NOT_IN_PROMPT = frozenset({"cache_control"})
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
_TEXT_KEYS = ("text", "thinking", "refusal")


class PartKind(StrEnum):
    """What a part of a request is."""

    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGE = "message"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Piece:
    """One text of a body.

    Attributes:
        path: where it stands.
        text: itself; of a tool or a call its JSON on one line, keys in the order of the body.
        is_json: it is such JSON.
    """

    path: Path
    text: str
    is_json: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The tools, the system prompt, or one message.

    Attributes:
        kind: which of them.
        index: place in ``messages``; 0 for what stands in none.
        role: of a message; otherwise the kind.
        pieces: its texts, in order; one for each tool, block, call and text.
        in_messages: it stands in ``messages``, as system messages of OpenAI style do.
    """

    kind: PartKind
    index: int
    role: str
    pieces: tuple[Piece, ...]
    in_messages: bool = False

    @property
    def label(self) -> str:
        """How it is called on the screen: ``tools``, ``system``, ``messages[3] (user)``."""
        if self.kind is PartKind.MESSAGE or self.index:
            return f"messages[{self.index}] ({self.role})"
        return self.kind.value

    @property
    def text(self) -> str:
        """All of it, a line end between pieces."""
        return "\n".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of one request, in the order tools, system, messages."""

    parts: tuple[Part, ...]

    @property
    def head(self) -> tuple[Part, ...]:
        """What comes before the conversation: tools and system; all of a plain prompt."""
        return tuple(part for part in self.parts if part.kind is not PartKind.MESSAGE)

    @property
    def messages(self) -> tuple[Part, ...]:
        """The conversation."""
        return tuple(part for part in self.parts if part.kind is PartKind.MESSAGE)

    def of(self, kind: PartKind) -> tuple[Part, ...]:
        """The parts of one kind."""
        return tuple(part for part in self.parts if part.kind is kind)


def path_text(path: Path) -> str:
    """A path as people write it: ``messages[3].content[0].text``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def outline(body: Mapping[str, Any]) -> Outline:
    """The parts of a request body, OpenAI or Anthropic style; what has an unknown form is taken as its JSON."""
    parts: list[Part] = []
    tools = body.get("tools") or body.get("functions")
    if tools:
        key = "tools" if body.get("tools") else "functions"
        parts.append(Part(PartKind.TOOLS, 0, "tools", tuple(_each_as_json(tools, (key,)))))
    if body.get("system"):
        parts.append(Part(PartKind.SYSTEM, 0, "system", tuple(_content(body["system"], ("system",)))))
    messages = body.get("messages")
    if isinstance(messages, list):
        parts.extend(_messages(messages))
    elif "prompt" in body:
        parts.append(Part(PartKind.PROMPT, 0, "prompt", tuple(_content(body["prompt"], ("prompt",)))))
    return Outline(tuple(parts))


def is_anthropic(body: JsonBody) -> bool:
    """Whether a body is written for Anthropic's messages, where that makes a difference to what it says."""
    if "messages" not in body:
        return False
    if "system" in body or any("input_schema" in tool for tool in _dicts(body.get("tools"))):
        return True
    blocks = [block for message in _dicts(body["messages"]) for block in _dicts(message.get("content"))]
    return any(block.get("type") in _ANTHROPIC_BLOCKS or "cache_control" in block for block in blocks)


def json_text(value: Any) -> str:
    """The JSON of a value on one line, keys in their order, without what never reaches a prompt."""
    return json.dumps(_without_marks(value), ensure_ascii=False)


def replaced(body: Mapping[str, Any], texts: Mapping[Path, str]) -> dict[str, Any]:
    """A body with other texts, or other JSON, at these paths; the body itself is not changed."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    for path, text in texts.items():
        owner: Any = copy
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = text if isinstance(owner[path[-1]], str) else json.loads(text)
    return copy


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _messages(messages: list[Any]) -> Iterator[Part]:
    conversation = False
    for index, message in enumerate(messages):
        role = str(message.get("role", "?")) if isinstance(message, dict) else "?"
        conversation = conversation or role not in SYSTEM_ROLES
        kind = PartKind.MESSAGE if conversation else PartKind.SYSTEM
        yield Part(kind, index, role, tuple(_message(message, ("messages", index))), in_messages=True)


def _message(message: Any, path: Path) -> Iterator[Piece]:
    if not isinstance(message, dict):
        yield Piece(path, json_text(message), is_json=True)
        return
    for key, value in message.items():
        if key == "content" or isinstance(value, str):
            if key != "role":
                yield from _content(value, (*path, key))
        elif value and key not in _NOT_IN_PROMPT:
            yield from _each_as_json(value, (*path, key))


def _content(content: Any, path: Path) -> Iterator[Piece]:
    if isinstance(content, str):
        yield Piece(path, content)
    elif isinstance(content, list) and not all(isinstance(block, int) for block in content):
        for index, block in enumerate(content):
            yield _block(block, (*path, index))
    elif content is not None:
        yield Piece(path, json_text(content), is_json=True)


def _block(block: Any, path: Path) -> Piece:
    if isinstance(block, str):
        return Piece(path, block)
    if isinstance(block, dict):
        for key in _TEXT_KEYS:
            if isinstance(block.get(key), str):
                return Piece((*path, key), block[key])
    return Piece(path, json_text(block), is_json=True)


def _each_as_json(values: Any, path: Path) -> Iterator[Piece]:
    if isinstance(values, list):
        for index, value in enumerate(values):
            yield Piece((*path, index), json_text(value), is_json=True)
    else:
        yield Piece(path, json_text(values), is_json=True)


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(inner) for key, inner in value.items() if key not in _NOT_IN_PROMPT}
    if isinstance(value, list):
        return [_without_marks(inner) for inner in value]
    return value
