"""The style of OpenAI's clients: bodies and answers are those of the engine, so that nearly all passes through."""

from collections.abc import Mapping
from typing import Any

from kvnet.engine.prompts import PromptKind
from kvnet.exchange.answers import Started
from kvnet_node.api.answering import Renderer
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.front import Incoming
from kvnet_node.api.openai_tools import ForcedCall, chosen_tools
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
        """The body as it is, but for ``tool_choice``, which the engine's server does not know."""
        if self._kind is not PromptKind.CHAT:
            return Incoming(self._kind, path, body, headers), PassedThrough()
        chosen, forced = chosen_tools(body)
        renderer = PassedThrough() if forced is None else ForcedCall(forced)
        return Incoming(self._kind, path, chosen, headers, marks_of(body)), renderer

    def failure(self, failure: ApiFailure, request_id: str) -> bytes:
        """``{"error": …}``."""
        del request_id
        return failure.openai_json()
