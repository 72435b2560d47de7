"""One sequence to be decoded, and whoever is told of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import StopSequences

from kvnet.engine.mlx.requests import Request, microseconds
from kvnet.engine.mlx.stopping import StopText
from kvnet.engine.wire import DeltaEvent, FirstTokenEvent, GeneratedEvent
from kvnet.engine.wire_values import text_bytes
from kvnet.format.prefix import tokens_to_bytes

Finished = Callable[[list[Any], list[int]], int]
"""Takes the evaluated caches of one sequence and the token ids they hold, in the decode thread; returns how many of
these tokens a live cache holds from now on. Keep it short: everything that decodes waits."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer; the attributes are those of mlx-lm's ``server.Response``.

    Attributes:
        text: what became readable with it; with a token that ends the answer, what was held back before it.
        token: the token id, an end token included.
        logprob: its log probability; 0 unless asked for.
        finish_reason: ``"stop"`` or ``"length"`` with the last piece, else ``None``.
        top_tokens: the likeliest tokens instead of it, each with id, token and logprob; empty unless asked for.
    """

    text: str
    token: int
    logprob: float = 0.0
    finish_reason: str | None = None
    top_tokens: tuple[dict[str, Any], ...] = ()


class Sink(Protocol):
    """Where a generation's tokens go; no method blocks or raises."""

    def first(self, ttft_s: float) -> None:
        """The first token is there."""
        ...

    def told(self, piece: Piece) -> None:
        """The next token."""
        ...

    def ended(self, generation: "Generation", reason: str) -> None:
        """The answer is complete, and the memory given back."""
        ...


@dataclass(slots=True)
class Generation:
    """One sequence handed over for decoding.

    Attributes:
        request: who asked; errors go to it.
        caches: evaluated caches holding the whole prompt.
        tokens: the whole prompt.
        logits: after its last token, (1, 1, vocabulary), evaluated; ``None`` once the first token is chosen.
        max_tokens: how many tokens to make at most; at least 1.
        restored_tokens: prompt tokens restored or continued from a live cache; the rest was prefilled.
        restore_s: seconds spent restoring.
        prefill_s: seconds spent in prefill.
        release: called once when the memory is free again.
        sink: where tokens go; ``None`` for the events of a plain generation.
        sampler: log probabilities (1, vocabulary) to a token (1,); ``None`` takes the likeliest.
        processors: change logits before they are normalised; see every token of the prompt and the answer. They must
            not raise: the whole batch would fail.
        stop: token sequences that end the answer, end tokens included; ``None`` for the end tokens alone.
        stop_texts: texts that end the answer wherever they appear in it.
        logprobs: tell each token's log probability.
        top_logprobs: how many of the likeliest tokens to tell.
        finished: takes the caches at the end, also when the request was given up; ``None`` to drop them.
        failure: an exception that a processor kept to itself; fails this generation alone.
    """

    request: Request
    caches: list[Any]
    tokens: list[int]
    logits: mx.array | None
    max_tokens: int
    restored_tokens: int
    restore_s: float
    prefill_s: float
    release: Callable[[], None]
    sink: Sink | None = None
    sampler: Callable[[mx.array], mx.array] | None = None
    processors: Sequence[Any] = ()
    stop: StopSequences | None = None
    stop_texts: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    finished: Finished | None = None
    failure: Callable[[], Exception | None] = lambda: None
    detokenizer: Any = None
    stop_text: StopText | None = None
    made: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    ended_s: float = 0.0
    held_tokens: int = 0
    joined: bool = False


class EventSink:
    """Tells a plain generation as events.

    Args:
        request: who asked for it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._text: list[str] = []
        self._last = 0

    def first(self, ttft_s: float) -> None:
        """As ``FirstTokenEvent``."""
        self._request.send(FirstTokenEvent(self._request.id, microseconds(ttft_s)))

    def told(self, piece: Piece) -> None:
        """As ``DeltaEvent``; an end token has none of its own."""
        if piece.finish_reason == "stop":
            # What was held back waiting for the rest of a character belongs to the last token told.
            if piece.text and self._text:
                self._delta(piece.text, self._last)
            return
        self._delta(piece.text, piece.token)

    def _delta(self, text: str, token: int) -> None:
        self._last = token
        self._text.append(text)
        self._request.send(DeltaEvent(self._request.id, text_bytes(text), token))

    def ended(self, generation: Generation, reason: str) -> None:
        """As ``GeneratedEvent``."""
        self._request.send(
            GeneratedEvent(
                id=self._request.id,
                text=text_bytes("".join(self._text)),
                tokens=tokens_to_bytes(generation.made),
                finish_reason=reason,
                ttft_us=microseconds(generation.ttft_s),
                restored_tokens=generation.restored_tokens,
                prefilled_tokens=len(generation.tokens) - generation.restored_tokens,
                restore_us=microseconds(generation.restore_s),
                prefill_us=microseconds(generation.prefill_s),
            )
        )
