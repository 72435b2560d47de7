"""``tool_choice`` of OpenAI's clients: which tools a model may call, and the call that it has to make."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvnet_node.api.answering import Renderer
from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.event_stream import Comment, EventParser
from kvnet_node.api.failures import ApiFailure, invalid
from kvnet_node.api.forced_tools import ForcedTool, forced_call, forced_format, forced_tool

_PARAM = "tool_choice"
DONE = "[DONE]"
"""What ends a stream of OpenAI's."""


def chosen_tools(body: Mapping[str, Any]) -> tuple[JsonObject, ForcedTool | None]:
    """A body whose ``tool_choice`` is carried out as far as it can be before it is answered, and the call to be made.

    ``none`` leaves the tools out, so that the prompt says nothing of them.

    Raises:
        ApiError: 400: not a choice, or of a tool that is not there.
    """
    chosen = dict(body)
    choice = chosen.get(_PARAM)
    if choice in (None, "auto"):
        chosen.pop(_PARAM, None)
        return chosen, None
    if choice == "none":
        chosen.pop(_PARAM)
        chosen.pop("tools", None)
        return chosen, None
    wanted = "" if choice == "required" else _name_of(choice)
    names = _names(chosen.get("tools"))
    forced = forced_tool(names, wanted, param=_PARAM)
    if chosen.get("response_format") is not None:
        raise invalid("response_format: an answer that has to be a tool call has the tool's own form", param=_PARAM)
    chosen["response_format"] = forced_format(forced, chosen["tools"])
    return chosen, forced


def _name_of(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid(
            'tool_choice: expected "none", "auto", "required" or {"type": "function", "function": {"name": …}}, found '
            f"{json.dumps(choice)[:80]}",
            param=_PARAM,
        )
    return name


def _names(tools: Any) -> list[str]:
    if not isinstance(tools, list):
        return []
    names: list[str] = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid(f"tools[{number}]: expected a function with a name", param="tools")
        names.append(name)
    return names


@dataclass(slots=True)
class ForcedCall(Renderer):
    """Hands an answer back as the tool call that it stands for; one that was cut short as the text it is.

    Attributes:
        forced: the call.
    """

    forced: ForcedTool
    _events: EventParser = field(default_factory=EventParser)
    _text: list[str] = field(default_factory=list)

    def start(self, started: object) -> bytes:
        """Nothing."""
        del started
        return b""

    def feed(self, data: bytes) -> bytes:
        """The stream without the text, until it ends with the call."""
        return b"".join(self._pieces(data))

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        for event in self._events.feed(data):
            if isinstance(event, Comment):
                yield f": {event.text}\n\n".encode()
            elif event.data == DONE:
                yield f"data: {DONE}\n\n".encode()
            else:
                yield from self._chunk(json.loads(event.data))

    def _chunk(self, chunk: JsonObject) -> Iterator[bytes]:
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if text := delta.pop("content", None):
                self._text.append(text)
            if choice.get("finish_reason") is not None:
                self._end_choice(choice, delta, str(chunk.get("id", "")))
            elif set(delta) <= {"role"} and self._text:
                # It held nothing but text, which is told at the end.
                return
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def _end_choice(self, choice: JsonObject, delta: JsonObject, answer_id: str) -> None:
        text = "".join(self._text)
        call = forced_call(text, self.forced)
        if call is not None:
            delta["tool_calls"] = [{"index": 0, **_tool_call(call, answer_id)}]
            choice["finish_reason"] = "tool_calls"
        elif text:
            delta["content"] = text
        choice["delta"] = delta

    def end(self) -> bytes:
        """Nothing: the engine's stream ends itself."""
        return b""

    def fail(self, failure: ApiFailure) -> bytes:
        """An event with ``error``, which clients raise."""
        return failure.openai_event()

    def whole(self, body: bytes) -> bytes:
        """The answer with the call in the place of its text."""
        answer = json.loads(body)
        for choice in answer.get("choices") or ():
            message = choice.get("message") or {}
            call = forced_call(message.get("content") or "", self.forced)
            if call is not None:
                message["content"] = None
                message["tool_calls"] = [_tool_call(call, str(answer.get("id", "")))]
                choice["finish_reason"] = "tool_calls"
        return json.dumps(answer).encode()


def _tool_call(call: tuple[str, JsonObject], answer_id: str) -> JsonObject:
    name, arguments = call
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": "call_" + answer_id.removeprefix("chatcmpl-"), "type": "function", "function": function}
