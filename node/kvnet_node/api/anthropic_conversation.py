"""The messages of an Anthropic conversation as those of a chat, and where cache breakpoints lie among them.

How parts are carried over:

- ``system``: one system message first; text blocks of system and user messages are joined by an empty line.
- system messages inside the conversation: user text in ``<system>`` tags; many chat templates know only one system
  message, at the head.
- ``tool_result``: a message of role ``tool`` with the name of the tool it answers; ``is_error`` becomes an "Error: "
  before its text.
- ``thinking`` of earlier turns: ``reasoning_content``, the field chat templates look at and drop where their model
  wants it dropped. ``redacted_thinking`` is unreadable here and left out.
- turns of the same role that follow each other are one turn, as at Anthropic.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.checking import check_part
from kvnet_node.api.failures import ApiError, invalid

CACHE_TTL_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
"""Seconds of the lifetimes that ``cache_control`` can name; without one it is the shorter."""

PARAGRAPH = "\n\n"
"""Between text blocks of one system or user message."""

_IGNORED_BLOCKS = frozenset({"redacted_thinking"})

_UNSUPPORTED_BLOCKS: Mapping[str, str] = {
    "image": "pictures",
    "document": "documents",
    "search_result": "search results",
    "container_upload": "files of a container",
    "tool_reference": "tool references",
}


class _CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Text(msgspec.Struct, frozen=True):
    text: str


class _Thinking(msgspec.Struct, frozen=True):
    thinking: str


class _ToolUse(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, frozen=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn of a request, its blocks not looked into yet."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


def _refuse_block(kind: Any, place: str) -> ApiError:
    if not isinstance(kind, str):
        return invalid(f"{place}.type: expected the kind of a content block, found {type(kind).__name__}")
    what = _UNSUPPORTED_BLOCKS.get(kind)
    if what is not None:
        return invalid(f"{place}: {what} are not supported: this node runs text models")
    return invalid(
        f"{place}: content blocks of type {kind[:60]!r} are not supported here; expected text, thinking, tool_use "
        "or tool_result"
    )


@dataclass(slots=True)
class Conversation:
    """The chat messages made so far; same roles merged; where breakpoints were asked for."""

    messages: list[JsonObject] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    ttl_s: float = 0.0
    tool_names: dict[str, str] = field(default_factory=dict)

    def add_text(self, role: str, text: str) -> None:
        """Text of the user or the system, in a message of its own or behind what the same role said just before."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role and role != "system":
            last["content"] = PARAGRAPH.join(part for part in (last["content"], text) if part)
        else:
            self.messages.append({"role": role, "content": text})

    def assistant(self) -> JsonObject:
        """The assistant's message that is being said."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def mark(self, control: Any, place: str, n_messages: int) -> None:
        """Notes a breakpoint after that many messages; ``None`` is none."""
        if control is None:
            return
        checked = check_part(control, _CacheControl, place)
        self.ttl_s = max(self.ttl_s, CACHE_TTL_S[checked.ttl or "5m"])
        self.marked.add(n_messages)

    def marks(self) -> tuple[int, ...]:
        """Counts of messages before breakpoints; the head of the prompt alone is no message and marked anyway."""
        return tuple(sorted(self.marked - {0}))

    def check_end(self) -> None:
        """Refuses conversations that nobody waits to be answered in."""
        if not any(message["role"] != "system" for message in self.messages):
            raise invalid("messages: expected at least one message, found none")
        if self.messages[-1]["role"] == "assistant":
            raise invalid(
                "messages: expected the last one to be the user's; continuing an answer that the client began "
                "(prefill) is not supported"
            )


def add_system(conversation: Conversation, system: str | list[JsonObject] | None) -> None:
    """The system prompt, and the breakpoints in it."""
    if not system:
        return
    blocks = _blocks(system, "system")
    conversation.add_text("system", PARAGRAPH.join(text for text in _texts(blocks) if text))
    for place, block in blocks:
        conversation.mark(block.get("cache_control"), f"{place}.cache_control", 1)


def add_message(conversation: Conversation, message: Message, place: str) -> None:
    """One turn, and the breakpoints in it.

    Raises:
        ApiError: a block is broken, or of a kind that a local model cannot follow; names its place.
    """
    blocks = _blocks(message.content, f"{place}.content")
    if message.role == "system":
        text = PARAGRAPH.join(text for text in _texts(blocks) if text)
        conversation.add_text("user", f"<system>\n{text}\n</system>")
    for where, block in blocks:
        if message.role == "assistant":
            _add_assistant_block(conversation, block, where)
        elif message.role == "user":
            _add_user_block(conversation, block, where)
        conversation.mark(block.get("cache_control"), f"{where}.cache_control", len(conversation.messages))
    if not blocks and message.role == "user":
        conversation.add_text("user", "")


def _blocks(content: str | Sequence[JsonObject], place: str) -> list[tuple[str, JsonObject]]:
    """Content as blocks, each with its place in the request."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    return [(f"{place}.{i}", block) for i, block in enumerate(content)]


def _texts(blocks: Iterable[tuple[str, JsonObject]]) -> Iterator[str]:
    """The texts of blocks where nothing but text may stand."""
    for place, block in blocks:
        if block.get("type") != "text":
            raise _refuse_block(block.get("type"), place)
        yield check_part(block, _Text, place).text


def _add_user_block(conversation: Conversation, block: JsonObject, place: str) -> None:
    match block.get("type"):
        case "text":
            conversation.add_text("user", check_part(block, _Text, place).text)
        case "tool_result":
            result = check_part(block, _ToolResult, place)
            text = PARAGRAPH.join(text for text in _texts(_blocks(result.content or "", f"{place}.content")) if text)
            if result.is_error and not text.casefold().startswith("error"):
                text = f"Error: {text}"
            message = {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
            if name := conversation.tool_names.get(result.tool_use_id):
                message["name"] = name
            conversation.messages.append(message)
        case kind:
            raise _refuse_block(kind, place)


def _add_assistant_block(conversation: Conversation, block: JsonObject, place: str) -> None:
    message = conversation.assistant()
    match block.get("type"):
        case "text":
            # What the model wrote around a tool call is put together again as it was written.
            message["content"] += check_part(block, _Text, place).text
        case "thinking":
            thought = check_part(block, _Thinking, place).thinking
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "tool_use":
            call = check_part(block, _ToolUse, place)
            conversation.tool_names[call.id] = call.name
            function = {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": call.id, "type": "function", "function": function})
        case kind if kind in _IGNORED_BLOCKS:
            pass
        case kind:
            raise _refuse_block(kind, place)
