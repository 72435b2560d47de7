"""What an engine is: the protocol every engine fulfils, and what it says of itself.

The values that cross its boundary are in ``kv_state`` (K/V restored and exported), ``prompts`` (prompts tokenized),
``completions`` (requests of the completion endpoints answered) and ``generations`` (plain decoding, logits).
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvnet.engine.completions import CompletionEvent, CompletionRequest
from kvnet.engine.generations import GenerateEvent, GenerateRequest, Logits, LogitsRequest
from kvnet.engine.kv_state import ExportEvent, ExportRequest
from kvnet.engine.prompts import JsonObject, PreparedPrompt, PromptRequest
from kvnet.format.fingerprint import Fingerprint, Producer


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
class LiveCaches:
    """The live caches of an engine: how many, how many bytes of K/V, and how many there may be."""

    n_caches: int
    size_bytes: int
    cap_bytes: int = 0


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
