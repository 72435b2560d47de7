"""What a client is told when a request fails: one table from this project's errors to HTTP statuses.

The OpenAI form is ``{"error": {"message", "type", "param", "code"}}``; other forms are made from the same
:class:`ApiFailure`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvnet.errors import (
    BusyError,
    EngineCrashedError,
    EngineError,
    KvnetError,
    MalformedError,
    OverBudgetError,
    PromptError,
    StoreError,
    UnknownModelError,
    UnknownNameError,
    UsageError,
    WindowError,
)
from kvnet_node.failures import leaf_of

INVALID = "invalid_request_error"
SERVER = "server_error"

RETRY_AFTER_S = 2
"""What a client that was turned away for lack of room is told to wait; a prefill step takes about as long."""


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """A failed request, as a client sees it.

    Attributes:
        status: the HTTP status.
        kind: the OpenAI error type.
        message: what was expected, what was found, and the next step.
        code: a stable word for programs, or None.
        param: the field of the request at fault, or None.
        headers: further response headers.
    """

    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        """The body OpenAI clients understand."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def openai_json(self) -> bytes:
        """``openai`` as JSON."""
        return msgspec.json.encode(self.openai())

    def openai_event(self) -> bytes:
        """``openai`` as the last event of a stream that had begun."""
        return b"data: " + self.openai_json() + b"\n\n"


class ApiError(KvnetError):
    """A request that the endpoint itself refuses."""

    code = "api"

    def __init__(self, failure: ApiFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refused(
    status: int,
    message: str,
    *,
    kind: str = INVALID,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ApiError:
    """An error to raise for a request that the endpoint refuses."""
    return ApiError(ApiFailure(status, kind, message, code, param, headers or {}))


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """An error to raise for a request whose body is at fault."""
    return refused(400, message, param=param, code=code)


_NO_RETRY = {"x-should-retry": "false"}
"""Clients of both styles try again after a 5xx unless told that it cannot help."""

_TABLE: tuple[tuple[type[KvnetError], int, str, str | None, str | None, Mapping[str, str]], ...] = (
    (PromptError, 400, INVALID, "invalid_prompt", "messages", {}),
    (WindowError, 400, INVALID, "context_length_exceeded", "messages", {}),
    (OverBudgetError, 503, SERVER, "over_budget", None, _NO_RETRY),
    (BusyError, 503, SERVER, "busy", None, {"retry-after": str(RETRY_AFTER_S)}),
    (EngineCrashedError, 502, SERVER, "engine_crashed", None, {}),
    (EngineError, 500, SERVER, "engine", None, {}),
    (UnknownModelError, 404, INVALID, "model_not_found", "model", {}),
    (UnknownNameError, 404, INVALID, "model_not_found", "model", {}),
    (UsageError, 400, INVALID, None, None, {}),
    (MalformedError, 500, SERVER, "malformed", None, _NO_RETRY),
    (StoreError, 500, SERVER, "store", None, {}),
)


def failure_of(error: BaseException) -> ApiFailure:
    """What to tell a client about an error; of one that nobody foresaw only its kind, for it may quote a prompt."""
    leaf = leaf_of(error)
    if isinstance(leaf, ApiError):
        return leaf.failure
    if not isinstance(leaf, KvnetError):
        return ApiFailure(500, SERVER, f"unexpected {type(leaf).__name__}; the node's log says more", "unexpected")
    message = f"{leaf.message} ({leaf.hint})" if leaf.hint else leaf.message
    for kind, status, type_, code, param, headers in _TABLE:
        if isinstance(leaf, kind):
            return ApiFailure(status, type_, message, code, param, headers)
    return ApiFailure(500, SERVER, message, leaf.code)


def failure_in(status: int, body: bytes) -> ApiFailure:
    """A failure that the engine answered as a body; it says ``{"error": "text"}`` or has a form of its own."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):
        kind = str(error.get("type") or (INVALID if status < 500 else SERVER))
        return ApiFailure(status, kind, str(error.get("message")), error.get("code"), error.get("param"))
    message = error if isinstance(error, str) else "the engine refused the request and did not say why"
    return ApiFailure(status, INVALID if status < 500 else SERVER, message)
