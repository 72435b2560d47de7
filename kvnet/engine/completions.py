"""What crosses an engine's boundary when it answers a request of a completion endpoint."""

from dataclasses import dataclass

from kvnet.engine.kv_state import RestorePlan
from kvnet.engine.prompts import PreparedPrompt, PromptKind


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to a completion endpoint, prepared.

    Attributes:
        kind: of the body.
        body: the JSON body, as it was prepared.
        prompt: from ``Engine.prepare``.
        restore: state to continue from when no live cache holds more.
        use_live: continue from live caches.
        keep_live: keep live caches of this prompt and its answer.
        created_tokens: prompt tokens that will newly be kept, for the answer's ``usage``.
    """

    kind: PromptKind
    body: bytes
    prompt: PreparedPrompt
    restore: RestorePlan | None = None
    use_live: bool = True
    keep_live: bool = True
    created_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompletionStarted:
    """The request is accepted and what could be reused is in place; prefill begins.

    Attributes:
        status: HTTP status of the answer; bodies of 400 and above are JSON with ``error``.
        content_type: of the body: JSON, or an event stream.
        live_tokens: prompt tokens continued from a live cache.
        restored_tokens: prompt tokens restored from the plan; at most one of the two is above 0.
        restore_s: seconds of the restore.
    """

    status: int
    content_type: str
    live_tokens: int
    restored_tokens: int
    restore_s: float


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A piece of the answer's body, to be passed on at once."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Completed:
    """The completion is finished.

    Attributes:
        tokens: the token ids generated, without an end token.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``; empty when the request was answered with an error.
        held_tokens: how many tokens of prompt + answer, from the start, a live cache holds now; 0 when not kept.
        ttft_s: seconds from the request to the first token, inside the engine.
        prefilled_tokens: prompt tokens computed.
        prefill_s: seconds of prefill, the last token included.
        decode_s: seconds from the first token to the last.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    held_tokens: int
    ttft_s: float
    prefilled_tokens: int
    prefill_s: float
    decode_s: float


CompletionEvent = CompletionStarted | CompletionBody | Completed
