"""From the event stream of an OpenAI-style chat completion to that of Anthropic's Messages API.

Pure: bytes in, bytes out, in whatever pieces they come. What mlx-lm's server sends, and what is made of it:

- a comment ``: keepalive 12/4096`` now and then during a long prefill -> ``ping``;
- chunks with ``delta.reasoning``, ``delta.content`` and whole ``delta.tool_calls`` -> content blocks. Each is opened by
  the first piece of its kind and closed by the first of another;
- a last chunk with ``finish_reason``, then one without choices that carries ``usage`` -> ``message_delta``;
- ``data: [DONE]`` -> ``message_stop``.

The stream always ends in order: an engine that stops in the middle gives an ``error`` event.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvnet_node.api.anthropic_answers import (
    SIGNATURE,
    PromptCounts,
    error_of,
    forced_id,
    full_usage,
    prompt_usage,
    stop_of,
)
from kvnet_node.api.anthropic_requests import AnswerShape
from kvnet_node.api.bodies import JsonObject
from kvnet_node.api.event_stream import Comment, EventParser, event_bytes
from kvnet_node.api.failures import SERVER, ApiFailure
from kvnet_node.api.forced_tools import ForcedTool, forced_call

PING = event_bytes("ping", {"type": "ping"})


@dataclass(slots=True)
class MessageStream:
    """Translates one streamed answer.

    Attributes:
        shape: of the request.
        message_id: the message's ``id``.
        counts: of the prompt, for ``message_start``; the exact ones follow at the end.
    """

    shape: AnswerShape
    message_id: str
    counts: PromptCounts
    _parser: EventParser = field(default_factory=EventParser)
    _index: int = -1
    _kind: str = ""
    _call: tuple[Any, Any] = (None, None)
    _calls: int = 0
    _forced_text: str = ""
    _choice: JsonObject = field(default_factory=dict)
    _usage: JsonObject = field(default_factory=dict)
    _ended: bool = False

    def start(self) -> bytes:
        """``message_start``; sent as soon as the request is accepted, so that the client knows."""
        message: JsonObject = {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.shape.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**prompt_usage(self.counts, self.shape.mark_ttl_s), "output_tokens": 0},
        }
        return event_bytes("message_start", {"type": "message_start", "message": message}) + PING

    def feed(self, data: bytes) -> bytes:
        """The events that these bytes of the engine's answer amount to; b"" when nothing is whole yet."""
        return b"".join(self._feed(data))

    def end(self) -> bytes:
        """What is missing for an orderly end: nothing, or an ``error`` when the engine stopped in the middle."""
        return self._break_off("the engine's answer ended before it was complete")

    def fail(self, failure: ApiFailure) -> bytes:
        """An ``error`` event; nothing follows it."""
        if self._ended:
            return b""
        self._ended = True
        return event_bytes("error", error_of(failure))

    def _break_off(self, message: str) -> bytes:
        return self.fail(ApiFailure(500, SERVER, message))

    def _feed(self, data: bytes) -> Iterator[bytes]:
        for event in self._parser.feed(data):
            if self._ended:
                return
            if isinstance(event, Comment):
                yield PING
            elif event.data == "[DONE]":
                yield from self._finish()
            else:
                yield from self._chunk(json.loads(event.data))

    def _chunk(self, chunk: JsonObject) -> Iterator[bytes]:
        if (error := chunk.get("error")) is not None:
            text = error.get("message", "") if isinstance(error, dict) else str(error)
            yield self._break_off(text or "the engine failed and did not say why")
            return
        if (usage := chunk.get("usage")) is not None:
            self._usage = usage
        for choice in chunk.get("choices") or ():
            if not self.shape.prefill_only:
                yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._choice = choice

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            if self._kind != "thinking":
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            if self.shape.forced is not None:
                self._forced_text += text
            else:
                yield from self._text(text)
        for call in delta.get("tool_calls") or ():
            yield from self._tool_call(call)

    def _text(self, text: str) -> Iterator[bytes]:
        if self._kind != "text":
            yield from self._open("text", {"type": "text", "text": ""})
        yield self._piece({"type": "text_delta", "text": text})

    def _tool_call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        function = call.get("function") or {}
        # A piece of a call carries its index, the first piece its id and name too.
        if call.get("id") and (call.get("index"), call["id"]) != self._call:
            self._call = (call.get("index"), call["id"])
            self._calls += 1
            if self._calls == 1 or not self.shape.one_tool_call:
                block = {"type": "tool_use", "id": call["id"], "name": function.get("name", ""), "input": {}}
                yield from self._open("tool_use", block)
        arguments = function.get("arguments")
        if arguments and (self._calls == 1 or not self.shape.one_tool_call):
            yield self._piece({"type": "input_json_delta", "partial_json": arguments})

    def _open(self, kind: str, block: JsonObject) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._kind = kind
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield event_bytes("content_block_start", event)

    def _piece(self, delta: JsonObject) -> bytes:
        return event_bytes("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._piece({"type": "signature_delta", "signature": SIGNATURE})
        self._kind = ""
        yield event_bytes("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _finish(self) -> Iterator[bytes]:
        if self._forced_text and self.shape.forced is not None:
            yield from self._forced(self.shape.forced)
        yield from self._close()
        stop = stop_of(self._choice, self.shape, called=self._calls > 0)
        usage = full_usage(self._usage, self.shape)
        yield event_bytes("message_delta", {"type": "message_delta", "delta": stop, "usage": usage})
        yield event_bytes("message_stop", {"type": "message_stop"})
        self._ended = True

    def _forced(self, forced: ForcedTool) -> Iterator[bytes]:
        if (call := forced_call(self._forced_text, forced)) is None:
            yield from self._text(self._forced_text)
            return
        self._calls += 1
        block = {"type": "tool_use", "id": forced_id(self.message_id), "name": call[0], "input": {}}
        yield from self._open("tool_use", block)
        yield self._piece({"type": "input_json_delta", "partial_json": json.dumps(call[1], ensure_ascii=False)})
