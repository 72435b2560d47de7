"""What an engine is: values that cross its boundary, and the protocol every engine fulfils.

K/V never crosses the boundary as a value. For a restore the caller names chunks by file, offset, length and hash;
the engine reads them into a buffer of its own, hashes *that* and builds arrays from it. For an export the engine
writes tiles into a file the caller gives, and the caller hashes them again before adopting them.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, Producer
from kvnet.format.hashes import ChunkHash

JsonObject = Mapping[str, Any]
"""A chat message or a set of template inputs: whatever JSON holds."""

FROZEN_MOMENT = "strftime_now"
"""Template input: an ISO 8601 moment at which a template's ``strftime_now`` stands still."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as the rest of kvnet sees it.

    Attributes:
        name: folder name of the model; a label, never an identity.
        path: the folder it was loaded from.
        fingerprint: its identity; ``None`` when its K/V cannot be shared.
        producer: what computes here (runtime, versions, device), recorded in manifests made here.
        tokenizer_digest: 32 bytes over the tokenizer's files; explains a miss, is no part of the identity.
        template_digest: 32 bytes over the chat template; the same.
        window_tokens: longest context the model was made for; 0 when its configuration does not say.
        kv_bytes_per_token: K/V bytes per token over all layers; 0 when it cannot be shared.
        weights_size_bytes: bytes of the weights in memory.
        memory_budget_bytes: what weights and K/V together may use.
        shareable: whether export and restore work.
        refusal: why they do not, naming the cache class; empty when they do.
    """

    name: str
    path: Path
    fingerprint: Fingerprint | None
    producer: Producer
    tokenizer_digest: bytes
    template_digest: bytes
    window_tokens: int
    kv_bytes_per_token: int
    weights_size_bytes: int
    memory_budget_bytes: int
    shareable: bool
    refusal: str


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Where one chunk's stored bytes lie: ``length_bytes`` at ``offset`` of ``path``, with this hash.

    ``index`` is the chunk's place in the artifact's plan.
    """

    index: int
    path: Path
    offset: int
    length_bytes: int
    hash: ChunkHash


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A chunk the engine wrote: ``length_bytes`` stored bytes at ``offset`` of the pack it was given."""

    index: int
    offset: int
    length_bytes: int
    hash: ChunkHash


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """State to continue from.

    Attributes:
        manifest: manifest bytes of the artifact; the caller has judged its signature and publisher.
        n_tokens: how many of its tokens to reuse, from the start; may end inside a block.
        chunks: where the tiles lie that cover these tokens; others may be listed and are not read.
    """

    manifest: bytes
    n_tokens: int
    chunks: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Compute the K/V of ``tokens`` and write its tiles.

    Attributes:
        tokens: the whole prefix, from position 0.
        restore: state for its beginning, or ``None`` to compute all of it.
        pack_path: existing file to write to.
        pack_offset: where in it the first tile goes; the others follow in plan order.
        first_block: blocks before it are not written; they must be covered by ``restore``.
        codec: how tiles are stored.
        context_size_bytes: size of the context chunks in the artifact to be, so that chunk indices agree.
        prefill: compute what neither a live cache nor ``restore`` covers; otherwise such an export is refused.
        background: give way to every request that somebody waits for, between two blocks.
    """

    tokens: Sequence[int]
    restore: RestorePlan | None
    pack_path: Path
    pack_offset: int
    first_block: int = 0
    codec: Codec = Codec.RAW
    context_size_bytes: int = 0
    prefill: bool = True
    background: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Decode greedily after ``tokens``.

    At least one token is always computed: when ``restore`` covers the whole prompt its last token is fed again.
    """

    tokens: Sequence[int]
    restore: RestorePlan | None = None
    max_tokens: int = 256


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


class PromptKind(StrEnum):
    """Which of the two completion endpoints a body is for."""

    CHAT = "chat"
    TEXT = "text"


class BoundaryKind(StrEnum):
    """Why a place in a prompt is one where other prompts may part from it."""

    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGE = "message"
    MARK = "mark"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Boundary:
    """The first ``n_tokens`` tokens of a prompt are those up to the end of something.

    Attributes:
        n_tokens: from the start; at least 1, at most the prompt.
        kind: what ends there.
        n_messages: how many of the prompt's messages lie before it.
    """

    n_tokens: int
    kind: BoundaryKind
    n_messages: int


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to be tokenized as the completion endpoints would.

    Attributes:
        kind: of the body.
        body: the JSON body of an OpenAI-style request: ``messages`` and ``tools``, or ``prompt``.
        template_inputs: frozen inputs of the chat template; empty to render as of now.
        marks: message counts after which the client asked for a cache breakpoint, ascending.
    """

    kind: PromptKind
    body: bytes
    template_inputs: JsonObject
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt.

    Attributes:
        tokens: all token ids, from one tokenization, ready for the answer.
        boundaries: where other prompts may part from it, ascending by tokens.
        stable_tokens: how many tokens the next turn of this conversation will begin with, whatever the answer; where
            the template rewrites earlier reasoning, the tokens before it.
        live_tokens: of how many tokens, from the start, a live cache holds the K/V at the moment.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    stable_tokens: int
    live_tokens: int


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


@dataclass(frozen=True, slots=True)
class Origin:
    """The first ``n_tokens`` tokens of a state were restored from the artifact with this manifest."""

    manifest: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True)
class LiveCaches:
    """The live caches of an engine: how many, how many bytes of K/V, and how many there may be."""

    n_caches: int
    size_bytes: int
    cap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """``done_tokens`` of ``total_tokens`` have their K/V, restored ones included.

    Attributes:
        written: of an export, the tiles that lie in the pack since the event before: what is here stays good when the
            export ends early.
        origins: of an export: artifacts that a live cache continued from, as in ``Exported``; told before any tile is.
    """

    done_tokens: int
    total_tokens: int
    written: tuple[WrittenChunk, ...] = ()
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """The export is finished; every tile written, in plan order.

    Attributes:
        chunks: what was written.
        restored_tokens: tokens restored from the plan, or continued from a live cache.
        prefilled_tokens: tokens computed now.
        restore_s: seconds of restore.
        prefill_s: seconds of prefill.
        origins: artifacts that a live cache continued from, besides the plan of the request.
    """

    chunks: tuple[WrittenChunk, ...]
    restored_tokens: int
    prefilled_tokens: int
    restore_s: float
    prefill_s: float
    origins: tuple[Origin, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits after the last token: little-endian float32, and each layer's position before that token was fed."""

    values: bytes
    positions: tuple[int, ...]


ExportEvent = PrefillProgress | Exported
GenerateEvent = PrefillProgress | FirstToken | TextDelta | Generated
CompletionEvent = CompletionStarted | CompletionBody | Completed


class Engine(Protocol):
    """Turns text into tokens, tokens into K/V and K/V into text, one model at a time.

    Every method may be called from several tasks at once. Leaving an iterator early, or being cancelled inside it,
    stops that request only.
    """

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        ...

    async def render(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """Tokens of a conversation under the chat template, ready for the answer.

        Where the template has no system role, system text goes to the head of the first user message.

        Raises:
            EngineError: the template refuses the messages, or there is no template.
        """
        ...

    async def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text with the tokenizer's own special tokens (such as BOS)."""
        ...

    async def context_tokens(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """Tokens that every question after these messages shares.

        They end where two renderings that differ only in the question first differ in tokens, at most at the end of
        the messages' own rendering.

        Raises:
            EngineError: as ``render``.
        """
        ...

    def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        """Computes and writes K/V; the last event is ``Exported``.

        Raises:
            CompatibilityError: this model's K/V cannot be exported, or the state to restore is not for it.
            IntegrityError: restored bytes do not match their hash.
            OverBudgetError: the tokens exceed the window or the memory budget.
            EngineCrashedError: the engine process ended.
            NoLiveStateError: ``prefill`` is off, and something would have to be computed.
        """
        ...

    async def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """Tokenizes a completion request's prompt and says where it may be cut.

        Raises:
            PromptError: the body holds no prompt that this model's template takes; says what was expected.
        """
        ...

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionEvent, None]:
        """Answers a completion request, as mlx-lm's server would.

        The first event is ``CompletionStarted`` and the last ``Completed``. A request that the parameters forbid is
        answered with a status of 400 and a body, and nothing is generated.

        Raises:
            IntegrityError: restored bytes do not match their hash; before ``CompletionStarted``.
            CompatibilityError: the state to restore is not for this model; before ``CompletionStarted``.
            OverBudgetError: the tokens exceed the window or the memory budget; before ``CompletionStarted``.
            BusyError: too many completions run; before ``CompletionStarted``.
            EngineError: anything else, at any time.
            EngineCrashedError: the engine process ended, at any time.
        """
        ...

    async def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included: to show where two prompts part."""
        ...

    async def live(self) -> LiveCaches:
        """What is held in RAM for prompts to come."""
        ...

    async def drop_live(self) -> None:
        """Forgets every live cache, for example because a publisher is no longer trusted."""
        ...

    async def limit_memory(self, limit_bytes: int) -> int:
        """Says what weights and K/V together may use from now on, because other models need the rest of the budget.

        Live caches beyond it go at once. Requests that run go on to their end; new ones wait for room, and those that
        need more than the limit raise ``CrowdedError``. Holds across restarts of the engine's process.

        Returns:
            What may be in use now: the limit, or what weights and running requests hold if that is more.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Generates text; the last event is ``Generated``. Raises as ``export``."""
        ...

    async def logits(self, request: LogitsRequest) -> Logits:
        """Logits after the last token. Raises as ``export``."""
        ...

    async def sample(self) -> bytes:
        """This model's sample, as ``kvnet.format.sample`` writes it: computed here and now, behind everything else.

        It gives way to every request after each of its steps, and pushes no live cache out of memory.

        Raises:
            CompatibilityError: this model's K/V cannot be shared, or a sample of it would be too large.
            BusyError: there is no room for it at the moment.
            EngineError: the model computed K/V that is not finite.
            EngineCrashedError: the engine process ended.
        """
        ...

    async def aclose(self) -> None:
        """Ends the engine; running requests fail with ``EngineCrashedError``."""
        ...


class OpenEngine(Protocol):
    """Opens engines: the real one in its own process, or the toy one."""

    def __call__(
        self,
        model_path: Path,
        *,
        digest_cache: Path,
        work_dir: Path,
        memory_budget_bytes: int | None = None,
        live_bytes: int | None = None,
    ) -> AbstractAsyncContextManager[Engine]:
        """An engine for the model in ``model_path``, loaded when the context is entered."""
        ...


def frozen_template_inputs(moment: str) -> dict[str, str]:
    """Template inputs that would vary by themselves, fixed at ``moment`` (ISO 8601, such as ``2026-11-29T14:00:00``).

    A template that prints today's date prints that one, so that its rendering, and with it the tokens, stays the same.
    """
    return {FROZEN_MOMENT: moment}
