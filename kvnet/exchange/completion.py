"""Complete: answer a client's request, continuing from the longest prefix in RAM, on disk or at peers.

Lookup and fetch happen before the engine is asked for anything, with a deadline; whatever goes wrong with them ends in
a plain local prefill. Once the answer has begun, a failure is the engine's and reaches the client as one.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio

from kvnet.engine.interface import Completed, Engine, PreparedPrompt, PromptKind
from kvnet.exchange.generation import FetchPrefix, Source
from kvnet.exchange.identity import Identity
from kvnet.exchange.keeping import Keeper
from kvnet.exchange.lane import Lane
from kvnet.exchange.reuse import Rejected
from kvnet.format.fingerprint import Verdict
from kvnet.store.interface import Store


@dataclass(frozen=True, slots=True)
class Asked:
    """One completion request, as the node's front understands it.

    Attributes:
        kind: which endpoint the body is for.
        body: OpenAI-style JSON body to run.
        template_inputs: frozen inputs of a named context; empty to render as of now.
        max_tokens: most tokens to generate, as the body says it.
        private: keep, announce and tell nothing about it, and ask no peer.
        reuse: look for prefixes; otherwise all is computed, though live caches are still kept.
        marks: message counts after which the client asked for a cache breakpoint, ascending.
        mark_ttl_s: longest time they should be kept, in seconds; 0 when the client did not say.
        cache_key: the client's ``prompt_cache_key``; may be empty.
    """

    kind: PromptKind
    body: bytes
    template_inputs: Mapping[str, Any]
    max_tokens: int
    private: bool = False
    reuse: bool = True
    marks: tuple[int, ...] = ()
    mark_ttl_s: float = 0.0
    cache_key: str = ""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of a prompt was reused, and why not more.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: of these, continued from RAM or restored.
        created_tokens: of the others, those that will newly be kept.
        source: ``"none"``, ``"ram"``, ``"disk"`` or ``"peer"``.
        sources: where restored K/V came from; empty for ``none`` and ``ram``.
        saved_s: estimated seconds of prefill spared, less what reuse cost; 0 until prefill was measured.
        lookup_s: seconds spent looking here and at peers, fetching included.
        restore_s: seconds of the restore.
        window_tokens: longest context of the model; 0 when unknown.
        verdict: how exact restored K/V is; ``None`` when none was restored.
        rejected: artifacts that fitted and were not used.
        reasons: in words, why not more was reused; empty when all of it was.
        prepared: the prompt.
    """

    prompt_tokens: int
    reused_tokens: int
    created_tokens: int
    source: str
    sources: tuple[Source, ...]
    saved_s: float
    lookup_s: float
    restore_s: float
    window_tokens: int
    verdict: Verdict | None
    rejected: tuple[Rejected, ...]
    reasons: tuple[str, ...]
    prepared: PreparedPrompt


@dataclass(frozen=True, slots=True)
class Started:
    """The answer begins: HTTP status, content type, and what was reused."""

    status: int
    content_type: str
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of the answer's body, to be passed on at once."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete.

    Attributes:
        completed: what the engine reports.
        reuse: as in ``Started``.
        ttft_s: seconds from the request to the first token, lookup and fetch included.
        total_s: seconds from the request to the end.
    """

    completed: Completed
    reuse: Reuse
    ttft_s: float
    total_s: float


class Speeds(Protocol):
    """Measured prefill speeds."""

    def prefill_tokens_s(self, model: Path) -> float:
        """Tokens a second for the model in this folder; 0 when it was never measured."""
        ...

    def note(self, model: Path, n_tokens: int, seconds: float) -> None:
        """A prefill of ``n_tokens`` took ``seconds``."""
        ...


class Completer:
    """Answers completion requests with whatever engine it is given.

    Args:
        store: where artifacts are.
        lane: where blocking store work runs.
        identity: namespaces, policy and signing key.
        fetch_prefix: how to ask peers; ``None`` to use RAM and the store alone.
        speeds: measured prefill speeds: read for ``saved_s``, told of every prefill.
        keeper: keeps what is worth it, in the background; ``None`` to keep nothing on disk.
        exact_only: reuse only artifacts whose verdict is ``EXACT``.
        used: told of every completion that was not private, once, when it is complete.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        fetch_prefix: FetchPrefix | None,
        *,
        speeds: Speeds,
        keeper: Keeper | None = None,
        exact_only: bool = False,
        used: Callable[[Finished], None] | None = None,
    ) -> None:
        raise NotImplementedError

    async def drain(self) -> None:
        """Keep nothing more, and return when what is being kept is done or was given up."""
        raise NotImplementedError

    async def prepare(self, engine: Engine, asked: Asked) -> PreparedPrompt:
        """Tokenize a request's prompt, and nothing else.

        Raises:
            PromptError: the body holds no prompt that this model's template takes.
        """
        raise NotImplementedError

    async def complete(self, engine: Engine, asked: Asked) -> AsyncGenerator[Started | Body | Finished, None]:
        """Answer a request: ``Started`` once, any number of ``Body``, ``Finished`` last.

        Raises:
            PromptError: the body holds no prompt that this model's template takes.
            WindowError: prompt and ``max_tokens`` are more than the window; the figures are in the message.
            OverBudgetError: they do not fit into memory.
            EngineError: the engine cannot answer; after ``Started`` only when it broke off.
        """
        del engine, asked
        await trio.lowlevel.checkpoint()
        if self:
            raise NotImplementedError
        yield Body(b"")
