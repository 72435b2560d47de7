"""The style of Anthropic's clients: ``/v1/messages`` and ``/v1/messages/count_tokens``.

Bodies become OpenAI-style chat bodies and go the way of all others; answers are translated back as they come.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.routing import Route

from kvnet.engine.prompts import PromptKind
from kvnet.exchange.answers import Started
from kvnet_node.api.answering import Answering, Renderer, Writer
from kvnet_node.api.anthropic_answers import PromptCounts, error_of, message_of
from kvnet_node.api.anthropic_requests import AnswerShape, translate
from kvnet_node.api.anthropic_stream import MessageStream
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.front import Front, Incoming
from kvnet_node.api.requests_log import LoggedRequest

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"


def is_anthropic_path(path: str) -> bool:
    """Whether failures on this path are worded for Anthropic's clients, whatever became of the request."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def message_routes(front: Front, *, max_body_bytes: int) -> list[Route]:
    """The routes of Anthropic's clients.

    Args:
        front: runs requests.
        max_body_bytes: the longest request body.
    """
    messages = Answering(front, AnthropicStyle(), max_body_bytes=max_body_bytes)
    count = Answering(front, AnthropicStyle(counting=True), max_body_bytes=max_body_bytes, run=write_count)
    return [Route(MESSAGES_PATH, messages, methods=["POST"]), Route(COUNT_PATH, count, methods=["POST"])]


def new_message_id() -> str:
    """An id for a message; it means nothing."""
    return f"msg_{secrets.token_hex(12)}"


class AnthropicStyle:
    """See :class:`kvnet_node.api.answering.Style`.

    Args:
        counting: requests only have their tokens counted.
        new_id: makes ids of messages.
    """

    def __init__(self, *, counting: bool = False, new_id: Callable[[], str] = new_message_id) -> None:
        self._counting = counting
        self._new_id = new_id

    def read(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[Incoming, Renderer]:
        """The chat body that asks the same, and the way back.

        Raises:
            ApiError: the body is at fault.
        """
        made = translate(body, counting=self._counting)
        incoming = Incoming(PromptKind.CHAT, path, made.body, headers, made.marks, made.mark_ttl_s)
        return incoming, MessageRenderer(made.shape, self._new_id())

    def failure(self, failure: ApiFailure, request_id: str) -> bytes:
        """``{"type": "error", …}``."""
        return msgspec.json.encode(error_of(failure, request_id))


class MessageRenderer(Renderer):
    """Answers as messages; see :class:`kvnet_node.api.answering.Renderer`."""

    def __init__(self, shape: AnswerShape, message_id: str) -> None:
        self._shape = shape
        self._id = message_id
        self._stream = MessageStream(shape, message_id, PromptCounts())

    def start(self, started: Started) -> bytes:
        """``message_start``, with what was reused."""
        reuse = started.reuse
        self._stream.counts = PromptCounts(reuse.prompt_tokens, reuse.reused_tokens, reuse.created_tokens)
        return self._stream.start()

    def feed(self, data: bytes) -> bytes:
        """The events that these bytes amount to."""
        return self._stream.feed(data)

    def end(self) -> bytes:
        """Nothing, or an ``error`` when the engine stopped in the middle."""
        return self._stream.end()

    def fail(self, failure: ApiFailure) -> bytes:
        """An ``error`` event."""
        return self._stream.fail(failure)

    def whole(self, body: bytes) -> bytes:
        """The message out of a chat completion."""
        return msgspec.json.encode(message_of(msgspec.json.decode(body), self._shape, self._id))


async def write_count(
    front: Front, incoming: Incoming, request: LoggedRequest, renderer: Renderer, writer: Writer
) -> None:
    """Count the tokens of a prompt, with the template and the tokenizer of the model that would answer."""
    del request, renderer
    prepared = await front.count(incoming)
    await writer.whole(200, msgspec.json.encode({"input_tokens": len(prepared.tokens)}), {})
