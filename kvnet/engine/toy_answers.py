"""What the toy engine understands of request bodies, and how it writes answers: OpenAI's shapes, nothing more."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvnet.engine.completions import CompletionRequest
from kvnet.engine.prompts import Boundary, BoundaryKind, JsonObject, PromptKind, PromptRequest
from kvnet.errors import PromptError

DEFAULT_MAX_TOKENS = 64
"""Of a request that does not say."""

Render = Callable[..., list[int]]
"""Messages and template inputs to tokens; ``answer`` asks for the beginning of an answer."""


def prompt_of(
    request: PromptRequest, render: Render, tokenize: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], tuple[Boundary, ...]]:
    """The tokens and boundaries of a request's prompt.

    Raises:
        PromptError: it has none.
    """
    body = _body(request.body)
    if request.kind == PromptKind.TEXT:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise PromptError("prompt: expected a text")
        tokens = tuple(tokenize(prompt))
        return tokens, (Boundary(len(tokens), BoundaryKind.STABLE, 0),)
    messages = _checked(body.get("messages"))
    inputs: JsonObject = {**(body.get("chat_template_kwargs") or {}), **request.template_inputs}
    if body.get("tools"):
        inputs = {"tools": json.dumps(body["tools"]), **inputs}
    tokens = tuple(render(messages, inputs, answer=True))
    ends = [len(render(messages[:n], inputs, answer=False)) for n in range(len(messages) + 1)]
    found = [Boundary(end, BoundaryKind.MESSAGE, n) for n, end in enumerate(ends) if n]
    found += [Boundary(ends[mark], BoundaryKind.MARK, mark) for mark in request.marks if 0 < mark < len(ends)]
    n_system = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if n_system:
        found.append(Boundary(ends[n_system], BoundaryKind.SYSTEM, n_system))
    if body.get("tools"):
        found.append(Boundary(ends[0], BoundaryKind.TOOLS, 0))
    found.append(Boundary(len(tokens), BoundaryKind.STABLE, len(messages)))
    return tokens, tuple(sorted(found, key=lambda boundary: (boundary.n_tokens, boundary.n_messages)))


def _body(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        raise PromptError("the request body is not JSON: expected an object") from None
    if not isinstance(body, dict):
        raise PromptError("the request body is JSON, but no object")
    return body


def _checked(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages: expected a list of at least one message, found none")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"messages[{i}]: expected an object with role and content")
        checked.append({"role": message["role"], "content": _text(f"messages[{i}].content", message)})
    return checked


def _text(where: str, message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    parts: Sequence[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
        raise PromptError(f"{where}: expected a text or parts of type text")
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return "".join(part["text"] for part in parts) + calls


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's parameters.

    Attributes:
        kind: which endpoint.
        model: as the client named it.
        max_tokens: of the answer.
        stream: answer in pieces.
        usage: tell usage at the end of a stream.
        created_tokens: for usage.
        refusal: why the request is answered with an error; empty when it is not.
    """

    kind: PromptKind
    model: str
    max_tokens: int
    stream: bool
    usage: bool
    created_tokens: int
    refusal: str

    @classmethod
    def of(cls, request: CompletionRequest) -> "Asked":
        """What a request asks for."""
        body = _body(request.body)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens", DEFAULT_MAX_TOKENS)
        refusal = ""
        if body.get("n", 1) != 1:
            refusal = "n is not supported: one answer is given to a request"
        elif not isinstance(max_tokens, int) or max_tokens < 1:
            refusal = "max_tokens must be at least 1"
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        model = str(body.get("model", "toy"))
        stream = bool(body.get("stream"))
        return cls(request.kind, model, max_tokens, stream, usage, request.created_tokens, refusal)

    @property
    def content_type(self) -> str:
        """Of the answer's body."""
        return "text/event-stream" if self.stream else "application/json"

    def error_body(self) -> bytes:
        """The body of a refusal."""
        error = {"message": self.refusal, "type": "invalid_request_error", "param": None, "code": None}
        return json.dumps({"error": error}).encode()

    def piece(self, text: str, reason: str | None = None) -> bytes:
        """One event of a stream."""
        return self._event(self._answer([self._choice(text, reason)]))

    def end(self, text: str, reason: str, prompt_tokens: int, made_tokens: int, reused_tokens: int) -> bytes:
        """The whole answer, or the end of its stream."""
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made_tokens,
            "total_tokens": prompt_tokens + made_tokens,
            "prompt_tokens_details": {"cached_tokens": reused_tokens},
            "cache_read_input_tokens": reused_tokens,
            "cache_creation_input_tokens": self.created_tokens,
        }
        if not self.stream:
            return json.dumps({**self._answer([self._choice(text, reason)]), "usage": usage}).encode()
        told = self._event({**self._answer([]), "usage": usage}) if self.usage else b""
        return self.piece("", reason) + told + b"data: [DONE]\n\n"

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.kind == PromptKind.TEXT:
            return {**choice, "text": text}
        return {**choice, "delta" if self.stream else "message": {"role": "assistant", "content": text}}

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        shape = "text_completion" if self.kind == PromptKind.TEXT else "chat.completion"
        shape += ".chunk" if self.stream and self.kind == PromptKind.CHAT else ""
        return {"id": "toy-1", "object": shape, "created": 0, "model": self.model, "choices": choices}

    def _event(self, answer: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(answer).encode() + b"\n\n"
