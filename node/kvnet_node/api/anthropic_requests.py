"""From a request in the shape of Anthropic's Messages API to one in the shape of OpenAI's chat completions.

Pure functions. The shapes are those of the public ``anthropic`` client (``anthropic.types``), as far as a local text
model can follow them; what it cannot (pictures, documents, tools that run at Anthropic) is refused by name, because
an answer that silently ignores part of the question is worse than none. Equal requests give equal bodies, key order
of tool inputs and schemas included, so that what was a shared prefix in the one form is one in the other.

How parts are carried over (messages: `anthropic_conversation`):

- ``tool_choice`` ``any`` and ``tool`` are kept by a JSON schema that the answer must follow; ``none`` leaves the tools
  out of the prompt.
- ``cache_control``: message counts, see ``Translated.marks``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvnet_node.api.anthropic_conversation import Conversation, Message, add_message, add_system
from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.checking import check_part
from kvnet_node.api.failures import invalid
from kvnet_node.api.forced_tools import ForcedTool, forced_format, forced_tool, json_schema

_UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "container": "containers",
    "mcp_servers": "MCP servers called by the API",
}


# --- The parts of a request that are read -------------------------------------------------------------------------


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
    messages: list[Message]
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
    request = check_part(body, _Request, "")
    _refuse_unsupported(body)
    if request.max_tokens is None and not counting:
        raise invalid("max_tokens: expected a number of tokens, found nothing")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise invalid(f"max_tokens: expected 0 or more, found {request.max_tokens}")
    conversation = Conversation()
    add_system(conversation, request.system)
    for i, message in enumerate(request.messages):
        add_message(conversation, message, f"messages.{i}")
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


def _refuse_unsupported(body: JsonObject) -> None:
    for name, what in _UNSUPPORTED_FIELDS.items():
        if body.get(name):
            raise invalid(f"{name}: {what} are not supported by a local model", param=name)


# --- Tools and parameters ------------------------------------------------------------------------------------------


def _tools(conversation: Conversation, tools: Sequence[JsonObject]) -> list[JsonObject]:
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
        checked = check_part(tool, _Tool, place)
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
