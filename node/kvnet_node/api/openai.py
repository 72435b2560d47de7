"""The style of OpenAI's clients: bodies and answers are those of the engine, so that nearly all passes through."""

from collections.abc import Mapping
from typing import Any

from kvnet.engine.interface import PromptKind
from kvnet.exchange.completion import Started
from kvnet_node.api.answering import Renderer
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.front import Incoming
from kvnet_node.api.parameters import marks_of


class PassedThrough(Renderer):
    """Answers as the engine words them."""

    def start(self, started: Started) -> bytes:
        """Nothing."""
        del started
        return b""

    def feed(self, data: bytes) -> bytes:
        """The same bytes, keep-alive comments included."""
        return data

    def end(self) -> bytes:
        """Nothing: the engine's stream ends itself."""
        return b""

    def fail(self, failure: ApiFailure) -> bytes:
        """An event with ``error``, which clients raise."""
        return failure.openai_event()

    def whole(self, body: bytes) -> bytes:
        """The same bytes."""
        return body


class OpenAIStyle:
    """See :class:`kvnet_node.api.answering.Style`."""

    def __init__(self, kind: PromptKind) -> None:
        self._kind = kind

    def read(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[Incoming, Renderer]:
        """The body as it is."""
        return Incoming(self._kind, path, body, headers, marks_of(body)), PassedThrough()

    def failure(self, failure: ApiFailure, request_id: str) -> bytes:
        """``{"error": …}``."""
        del request_id
        return failure.openai_json()
