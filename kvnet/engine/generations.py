"""What crosses an engine's boundary when it decodes after token ids, or tells the logits after them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvnet.engine.kv_state import PrefillProgress, RestorePlan


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Decode greedily after ``tokens``.

    At least one token is always computed: when ``restore`` covers the whole prompt its last token is fed again.
    """

    tokens: Sequence[int]
    restore: RestorePlan | None = None
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is there, ``ttft_s`` seconds after the engine accepted the request."""

    ttft_s: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became readable with ``token``; may be empty inside a character."""

    text: str
    token: int


@dataclass(frozen=True, slots=True)
class Generated:
    """The generation is finished.

    Attributes:
        text: all of it.
        tokens: the token ids made, without the end token.
        finish_reason: ``"stop"`` (the model ended it) or ``"length"``.
        ttft_s: seconds from the request to the first token.
        restored_tokens: prompt tokens whose K/V was restored.
        prefilled_tokens: prompt tokens computed, the last one included.
        restore_s: seconds of reading, checking and building restored state.
        prefill_s: seconds of prefill, the last token included.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    ttft_s: float
    restored_tokens: int
    prefilled_tokens: int
    restore_s: float
    prefill_s: float


GenerateEvent = PrefillProgress | FirstToken | TextDelta | Generated


@dataclass(frozen=True, slots=True)
class LogitsRequest:
    """Ask for the logits after the last of ``tokens``: what exactness is measured with.

    Attributes:
        tokens: the prompt.
        restore: state to continue from.
        stops: token counts at which a prefill step must end, besides the usual multiples of the step.
        one_shot: feed the whole prompt in a single step.
    """

    tokens: Sequence[int]
    restore: RestorePlan | None = None
    stops: tuple[int, ...] = ()
    one_shot: bool = False


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits after the last token: little-endian float32, and each layer's position before that token was fed."""

    values: bytes
    positions: tuple[int, ...]
