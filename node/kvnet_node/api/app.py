"""The endpoint as one ASGI application: the guard before everything, then the paths of each style of client."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

import kvnet
from kvnet.engine.prompts import PromptKind
from kvnet.errors import KvnetError
from kvnet_node.api.answering import Answering, Scope, Send, Writer, refuse
from kvnet_node.api.anthropic import AnthropicStyle, is_anthropic_path, message_routes
from kvnet_node.api.anthropic_answers import model_of, models_of
from kvnet_node.api.bodies import Receive
from kvnet_node.api.failures import INVALID, ApiFailure, failure_of
from kvnet_node.api.front import Front
from kvnet_node.api.guard import GuardRules, cors_headers, preflight_headers, refusal, token_refusal
from kvnet_node.api.model_names import unknown_model
from kvnet_node.api.openai import OpenAIStyle

_OPEN_PATHS = frozenset({"/health"})
"""What says nothing worth a token."""

_SERVED = "/v1/chat/completions, /v1/completions, /v1/messages, /v1/messages/count_tokens, /v1/models and /health"


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the application behaves.

    Attributes:
        rules: who is let in.
        max_body_bytes: the longest request body.
        unhealthy: why this node cannot answer, or "".
    """

    rules: GuardRules = field(default_factory=GuardRules)
    max_body_bytes: int = 64 << 20
    unhealthy: Callable[[], str] = lambda: ""


def build_app(front: Front, options: AppOptions) -> ASGIApp:
    """The endpoint's application.

    Args:
        front: runs requests.
        options: how.
    """
    size = options.max_body_bytes
    chat = Answering(front, OpenAIStyle(PromptKind.CHAT), max_body_bytes=size)
    text = Answering(front, OpenAIStyle(PromptKind.TEXT), max_body_bytes=size)
    routes: list[BaseRoute] = [
        Route("/health", _Health(front, options).get, methods=["GET"]),
        Route("/v1/models", _Models(front).list, methods=["GET"]),
        Route("/v1/models/{model:path}", _Models(front).get, methods=["GET"]),
    ]
    for prefix in ("/v1", ""):
        # Some clients are told the address without /v1 and leave it out.
        routes.append(Route(f"{prefix}/chat/completions", chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/completions", text, methods=["POST"]))
    routes += message_routes(front, max_body_bytes=size)
    app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _wrong_method})
    return Guard(app, options.rules)


class Guard:
    """Lets in whom the rules know; everybody else is told why not before anything of the request is read."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        server = scope.get("server")
        local_address = str(server[0]) if server else ""
        failure = refusal(headers, self._rules, local_address)
        origin = headers.get("origin")
        if failure is None and origin is not None:
            send = _with_headers(send, cors_headers(origin))
        if failure is None and scope["method"] == "OPTIONS":
            wanted = headers.get("access-control-request-headers", "")
            await Writer(send).whole(204, b"", preflight_headers(origin, wanted) if origin is not None else {})
            return
        if failure is None and scope["path"] not in _OPEN_PATHS:
            failure = token_refusal(headers, self._rules)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await refuse(failure.status, _worded(failure, scope["path"]), failure.headers, receive, send)


def _with_headers(send: Send, added: Mapping[str, str]) -> Send:
    """A ``send`` that puts further headers into the response's head."""
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in added.items()]

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *pairs]}
        await send(message)

    return sending


def _worded(failure: ApiFailure, path: str) -> bytes:
    """A failure as the clients of a path expect it."""
    return AnthropicStyle().failure(failure, "") if is_anthropic_path(path) else failure.openai_json()


class _Health:
    """``/health``: whether a request sent now would be answered."""

    def __init__(self, front: Front, options: AppOptions) -> None:
        self._front = front
        self._options = options

    async def get(self, request: Request) -> Response:
        """200, or 503 with the reason."""
        del request
        reason = "the node is about to stop" if self._front.draining else self._options.unhealthy()
        if reason:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok", "version": kvnet.__version__, "running": self._front.running})


class _Models:
    """``/v1/models``."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def list(self, request: Request) -> Response:
        """All of them."""
        del request
        try:
            return JSONResponse(models_of(await self._front.models()))
        except KvnetError as error:
            return _failed(failure_of(error))

    async def get(self, request: Request) -> Response:
        """One of them, by its id."""
        wanted = request.path_params["model"]
        try:
            models = await self._front.models()
        except KvnetError as error:
            return _failed(failure_of(error))
        for model in models:
            if model["id"] == wanted:
                return JSONResponse(model_of(model))
        return _failed(failure_of(unknown_model(wanted, [each["id"] for each in models])))


def _failed(failure: ApiFailure) -> Response:
    return JSONResponse(failure.openai(), status_code=failure.status, headers=dict(failure.headers))


async def _not_found(request: Request, error: Exception) -> Response:
    del error
    message = f"nothing is served at {request.url.path[:200]!r}; served are {_SERVED}"
    return _failed_at(request, ApiFailure(404, INVALID, message, "unknown_url"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    message = f"{request.method} is not known at {request.url.path[:200]!r}; expected {allowed.get('Allow', 'another')}"
    return _failed_at(request, ApiFailure(405, INVALID, message, "method_not_allowed", headers=allowed))


def _failed_at(request: Request, failure: ApiFailure) -> Response:
    body = _worded(failure, request.url.path)
    return Response(body, failure.status, dict(failure.headers), "application/json")
