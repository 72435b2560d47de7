"""What a completion is asked and what comes of it: the values between the node's front and `Completer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvnet.engine.completions import Completed
from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.exchange.planning import PlanReport
from kvnet.exchange.prefix_reuse import Source
from kvnet.exchange.reuse import Rejected
from kvnet.format.fingerprint import Verdict


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
        plan: what fetching was weighed against computing; ``None`` when there was nothing to weigh, or nothing to
            weigh it with.
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
    plan: PlanReport | None = None


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
