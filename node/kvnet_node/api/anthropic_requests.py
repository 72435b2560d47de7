"""From a request in the shape of Anthropic's Messages API to one in the shape of OpenAI's chat completions.

Pure functions. The shapes are those of the public ``anthropic`` client (``anthropic.types``), as far as a local text
model can follow them; what it cannot (pictures, documents, tools that run at Anthropic) is refused by name, because
an answer that silently ignores part of the question is worse than none. Equal requests give equal bodies, key order
of tool inputs and schemas included, so that what was a shared prefix in the one form is one in the other.

How parts are carried over:

- ``system``: one system message first; text blocks of system and user messages are joined by an empty line.
- system messages inside the conversation: user text in ``<system>`` tags; many chat templates know only one system
  message, at the head.
- ``tool_result``: a message of role ``tool`` with the name of the tool it answers; ``is_error`` becomes an "Error: "
  before its text.
- ``thinking`` of earlier turns: ``reasoning_content``, the field chat templates look at and drop where their model
  wants it dropped. ``redacted_thinking`` is unreadable here and left out.
- turns of the same role that follow each other are one turn, as at Anthropic.
- ``tool_choice`` ``any`` and ``tool`` are kept by a JSON schema that the answer must follow; ``none`` leaves the tools
  out of the prompt.
- ``cache_control``: message counts, see ``Translated.marks``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from kvnet_node.api.failures import ApiError, invalid
from kvnet_node.api.forced_tools import ForcedTool, forced_format, forced_tool, json_schema

JsonObject = dict[str, Any]
T = TypeVar("T")

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
_UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "container": "containers",
    "mcp_servers": "MCP servers called by the API",
}


# --- The parts of a request that are read -------------------------------------------------------------------------


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


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingConfig(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class _OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct, frozen=True):
    format: _OutputFormat | None = None


class _Request(msgspec.Struct, frozen=True):
    model: str
    messages: list[_Message]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_control: dict[str, Any] | None = None


# --- Result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What the way back needs to know of the request.

    Attributes:
        model: the model id as the client wrote it; answers repeat it.
        stop_sequences: as asked for.
        forced: the answer is JSON that stands for a tool call.
        one_tool_call: tool calls after the first are left out.
        prefill_only: nothing was asked to be generated (``max_tokens`` 0); what was is left out.
        mark_ttl_s: the longest lifetime asked for, 0 when there was no breakpoint.
    """

    model: str
    stop_sequences: tuple[str, ...] = ()
    forced: ForcedTool | None = None
    one_tool_call: bool = False
    prefill_only: bool = False
    mark_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Translated:
    """A request, translated.

    Attributes:
        body: an OpenAI-style chat body, ready to be written as JSON.
        model: the model id asked for.
        stream: whether the answer is to be streamed.
        marks: how many of ``body``'s messages lie before each cache breakpoint, ascending. A breakpoint inside a
            message counts that message; one on tools counts the system message, next to which templates put them.
        mark_ttl_s: the longest lifetime asked for, seconds; 0 when there is no breakpoint.
        shape: for the answer.
    """

    body: JsonObject
    model: str
    stream: bool
    marks: tuple[int, ...]
    mark_ttl_s: float
    shape: AnswerShape


def translate(body: JsonObject, *, counting: bool = False) -> Translated:
    """The chat body that asks the same.

    Args:
        body: the parsed JSON of a request to ``/v1/messages``; never changed.
        counting: it is a request to ``/v1/messages/count_tokens``, which has no ``max_tokens``.

    Raises:
        ApiError: a field is missing, of the wrong kind, or asks for what a local model cannot do; names the field.
    """
    request = _checked(body, _Request, "")
    _refuse_unsupported(body)
    if request.max_tokens is None and not counting:
        raise invalid("max_tokens: expected a number of tokens, found nothing")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise invalid(f"max_tokens: expected 0 or more, found {request.max_tokens}")
    conversation = _Conversation()
    _add_system(conversation, request.system)
    for i, message in enumerate(request.messages):
        _add_message(conversation, message, f"messages.{i}")
    conversation.check_end()
    tools = _tools(conversation, request.tools or [])
    if request.cache_control is not None:
        conversation.mark(request.cache_control, "cache_control", len(conversation.messages))
    choice = request.tool_choice
    forced = _forced(choice, tools)
    out = _parameters(request)
    if tools and not (choice is not None and choice.type == "none"):
        out["tools"] = tools
        if forced is not None:
            out["tool_choice"] = {"type": "function", "function": {"name": forced.name}} if forced.name else "required"
    if (response_format := _response_format(request, forced, tools)) is not None:
        out["response_format"] = response_format
    out["messages"] = conversation.messages
    shape = AnswerShape(
        model=request.model,
        stop_sequences=tuple(request.stop_sequences or ()),
        forced=forced,
        one_tool_call=bool(choice and choice.disable_parallel_tool_use),
        prefill_only=request.max_tokens == 0,
        mark_ttl_s=conversation.ttl_s,
    )
    return Translated(out, request.model, bool(request.stream), conversation.marks(), conversation.ttl_s, shape)


# --- Checks --------------------------------------------------------------------------------------------------------

_PLACE = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


def _checked(value: Any, kind: type[T], place: str) -> T:
    """The value as that kind; the message names the field, as in ``messages.0.role``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        inner = ""
        if match := _PLACE.search(text):
            inner = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", match["path"]).strip(".")
            text = text[: match.start()]
        where = ".".join(part for part in (place, inner) if part)
        raise invalid(f"{where}: {text}" if where else text, param=where or None) from None


def _refuse_unsupported(body: JsonObject) -> None:
    for name, what in _UNSUPPORTED_FIELDS.items():
        if body.get(name):
            raise invalid(f"{name}: {what} are not supported by a local model", param=name)


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


# --- Messages ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Conversation:
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
        checked = _checked(control, _CacheControl, place)
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


def _add_system(conversation: _Conversation, system: str | list[JsonObject] | None) -> None:
    if not system:
        return
    blocks = _blocks(system, "system")
    conversation.add_text("system", PARAGRAPH.join(text for text in _texts(blocks) if text))
    for place, block in blocks:
        conversation.mark(block.get("cache_control"), f"{place}.cache_control", 1)


def _add_message(conversation: _Conversation, message: _Message, place: str) -> None:
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
        yield _checked(block, _Text, place).text


def _add_user_block(conversation: _Conversation, block: JsonObject, place: str) -> None:
    match block.get("type"):
        case "text":
            conversation.add_text("user", _checked(block, _Text, place).text)
        case "tool_result":
            result = _checked(block, _ToolResult, place)
            text = PARAGRAPH.join(text for text in _texts(_blocks(result.content or "", f"{place}.content")) if text)
            if result.is_error and not text.casefold().startswith("error"):
                text = f"Error: {text}"
            message = {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
            if name := conversation.tool_names.get(result.tool_use_id):
                message["name"] = name
            conversation.messages.append(message)
        case kind:
            raise _refuse_block(kind, place)


def _add_assistant_block(conversation: _Conversation, block: JsonObject, place: str) -> None:
    message = conversation.assistant()
    match block.get("type"):
        case "text":
            # What the model wrote around a tool call is put together again as it was written.
            message["content"] += _checked(block, _Text, place).text
        case "thinking":
            thought = _checked(block, _Thinking, place).thinking
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "tool_use":
            call = _checked(block, _ToolUse, place)
            conversation.tool_names[call.id] = call.name
            function = {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": call.id, "type": "function", "function": function})
        case kind if kind in _IGNORED_BLOCKS:
            pass
        case kind:
            raise _refuse_block(kind, place)


# --- Tools and parameters ------------------------------------------------------------------------------------------


def _tools(conversation: _Conversation, tools: Sequence[JsonObject]) -> list[JsonObject]:
    n_system = sum(1 for message in conversation.messages[:1] if message["role"] == "system")
    out = []
    for i, tool in enumerate(tools):
        place = f"tools.{i}"
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise invalid(
                f"{place}: the tool {str(kind)[:60]!r} runs at, or is known to, Anthropic's models only; expected a "
                "tool with name, description and input_schema"
            )
        checked = _checked(tool, _Tool, place)
        function: JsonObject = {"name": checked.name}
        if checked.description is not None:
            function["description"] = checked.description
        function["parameters"] = checked.input_schema
        out.append({"type": "function", "function": function})
        conversation.mark(tool.get("cache_control"), f"{place}.cache_control", n_system)
    return out


def _forced(choice: _ToolChoice | None, tools: Sequence[JsonObject]) -> ForcedTool | None:
    if choice is None or choice.type not in ("any", "tool"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if choice.type == "any":
        return forced_tool(names, "", param="tool_choice")
    if not choice.name:
        raise invalid("tool_choice.name: expected the name of a tool, found none")
    return forced_tool(names, choice.name, param="tool_choice.name")


def _response_format(request: _Request, forced: ForcedTool | None, tools: Sequence[JsonObject]) -> JsonObject | None:
    """The schema that the answer must follow: the client's, or that of the tool call it insists on."""
    if forced is not None:
        return forced_format(forced, tools)
    if request.output_config is not None and (wanted := request.output_config.format) is not None:
        return json_schema("answer", wanted.schema)
    return None


def _parameters(request: _Request) -> JsonObject:
    out: JsonObject = {"model": request.model}
    if request.max_tokens is not None:
        # An engine makes at least one token; what was not asked for is left out of the answer.
        out["max_tokens"] = max(request.max_tokens, 1)
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(request, name)) is not None:
            out[name] = value
    if request.stop_sequences:
        out["stop"] = list(request.stop_sequences)
    if request.thinking is not None:
        out["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
    if request.stream:
        out["stream"] = True
        out["stream_options"] = {"include_usage": True}
    return out
