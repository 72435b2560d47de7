"""Shorthand for completions: prepare, complete, read the answer."""

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kvnet.engine.completions import Completed, CompletionBody, CompletionRequest, CompletionStarted
from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import RestorePlan
from kvnet.engine.prompts import PreparedPrompt, PromptKind, PromptRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    prompt: PreparedPrompt
    started: CompletionStarted
    body: bytes
    completed: Completed

    @property
    def json(self) -> Any:
        """The body of an answer that was not streamed."""
        return json.loads(self.body)


async def prepare(
    engine: Engine,
    body: dict[str, Any],
    kind: PromptKind = PromptKind.CHAT,
    *,
    inputs: dict[str, Any] | None = None,
    marks: tuple[int, ...] = (),
) -> PreparedPrompt:
    """Prepares a body."""
    return await engine.prepare(PromptRequest(kind, json.dumps(body).encode(), inputs or {}, marks))


async def complete(
    engine: Engine,
    body: dict[str, Any],
    kind: PromptKind = PromptKind.CHAT,
    *,
    restore: RestorePlan | None = None,
    live: bool = False,
    created_tokens: int = 0,
) -> Answer:
    """Prepares and answers a body; ``live`` uses and keeps live caches."""
    prompt = await prepare(engine, body, kind)
    request = CompletionRequest(kind, json.dumps(body).encode(), prompt, restore, live, live, created_tokens)
    async with aclosing(engine.complete(request)) as events:
        seen = [event async for event in events]
    started, *pieces, completed = seen
    assert isinstance(started, CompletionStarted)
    assert isinstance(completed, Completed)
    data = b"".join(piece.data for piece in pieces if isinstance(piece, CompletionBody))
    assert len(pieces) == sum(isinstance(piece, CompletionBody) for piece in pieces)
    return Answer(prompt, started, data, completed)


def told(body: bytes) -> dict[str, Any]:
    """What an answer says, whole or streamed: text, reasoning, tool calls, why it ended, counts, log probabilities."""
    if body.startswith(b"{"):
        return _summary([json.loads(body)], "message")
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return _summary([json.loads(line) for line in lines[:-1]], "delta")


def _tops(logprobs: dict[str, Any]) -> list[list[float]]:
    """The likeliest tokens' log probabilities at each place, in whichever form they are told."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in each["top_logprobs"]] for each in logprobs["content"]]
    else:
        tops = [list(each.values()) for each in logprobs.get("top_logprobs") or []]
    return [sorted(round(each, 3) for each in place) for place in tops]


def _summary(answers: Sequence[dict[str, Any]], part: str) -> dict[str, Any]:
    choices = [answer["choices"][0] for answer in answers if answer["choices"]]
    parts = [choice.get(part, {}) for choice in choices]
    calls = [call["function"] for piece in parts for call in piece.get("tool_calls", [])]
    usage: dict[str, Any] = next((answer["usage"] for answer in answers if "usage" in answer), {})
    probabilities = [each for choice in choices for each in _tops(choice.get("logprobs") or {})]
    return {
        "text": "".join(piece.get("content") or "" for piece in parts)
        + "".join(choice.get("text", "") for choice in choices),
        "reasoning": "".join(piece.get("reasoning") or "" for piece in parts),
        "calls": calls,
        "reason": next(choice["finish_reason"] for choice in reversed(choices)),
        "usage": {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "logprobs": probabilities,
    }
