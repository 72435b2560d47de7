"""Tool calls a client insists on: the answer is bound to the tool's JSON schema, and handed back as a call of it.

A model calls a tool when it finds it fitting. Under ``tool_choice`` it has no choice: its answer has to be JSON that
fits the tool, which the engine's grammar sees to.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.failures import invalid


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """The answer has to be a tool call: of this tool, or of any of them when ``name`` is ""."""

    name: str = ""


def forced_tool(names: Sequence[str], wanted: str, *, param: str) -> ForcedTool:
    """A call of one of some tools.

    Args:
        names: of the tools there are.
        wanted: the one to call; "" for any of them.
        param: of the request, for the error.

    Raises:
        ApiError: 400: there is no such tool.
    """
    if not names:
        raise invalid(f"{param}: expected tools to choose from, found none", param=param)
    if not wanted:
        return ForcedTool(names[0] if len(names) == 1 else "")
    if wanted not in names:
        raise invalid(f"{param}: expected one of {', '.join(names)[:200]}, found {wanted[:60]!r}", param=param)
    return ForcedTool(wanted)


def forced_format(forced: ForcedTool, tools: Sequence[Mapping[str, Any]]) -> JsonObject:
    """The ``response_format`` of an answer that stands for a tool call.

    Args:
        forced: which.
        tools: in OpenAI's form, checked.
    """
    functions = [tool["function"] for tool in tools]
    if forced.name:
        schema = next(_parameters(function) for function in functions if function["name"] == forced.name)
    else:
        schema = {"anyOf": [_call_schema(function) for function in functions]}
    return json_schema("tool_call", schema)


def json_schema(name: str, schema: Any) -> JsonObject:
    """A ``response_format`` that holds an answer to a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def forced_call(text: str, forced: ForcedTool) -> tuple[str, JsonObject] | None:
    """Name and input of the call that an answer stands for; None when it was cut short."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    if forced.name:
        return forced.name, value
    name, arguments = value.get("name"), value.get("input")
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _parameters(function: Mapping[str, Any]) -> Any:
    # A function without parameters takes none.
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(function: Mapping[str, Any]) -> JsonObject:
    properties = {"name": {"const": function["name"]}, "input": _parameters(function)}
    return {"type": "object", "properties": properties, "required": ["name", "input"], "additionalProperties": False}
