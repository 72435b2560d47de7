"""Explaining one of the node's last requests: what of it was reused, and what kept it from sharing more.

Each section is one function in ``SECTIONS``; its result is a struct of its own, which travels as an object under the
section's name. Nothing is computed before somebody asks, and nothing is written or logged.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import msgspec
import trio

from kvnet.engine.interface import Engine
from kvnet.errors import UsageError
from kvnet.format.hashes import artifact_text
from kvnet.format.prefix import common_prefix
from kvnet_node.api.requests_log import LoggedRequest, RequestLog
from kvnet_node.calling import Names
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.peer_names import known_names
from kvnet_node.operations.plans import LinksOf, link_section, links_of, no_links, plan_section
from kvnet_node.operations.prompts import between, rendered, report
from kvnet_node.operations.sources import told_source
from kvnet_node.prompts import killers
from kvnet_node.prompts.compare import Comparison, Prompt, compare
from kvnet_node.prompts.killers import Finding
from kvnet_node.prompts.outline import outline


@dataclass(frozen=True, slots=True)
class Question:
    """What a section is made from.

    Attributes:
        request: which is explained.
        earlier: those that came before it, oldest first.
        loaded: gives the engine of a model while it is used; ``None`` when that model is not in memory.
        links: gives what is known of this machine with a model, and of its links.
        names: what peers and signers are called.
    """

    request: LoggedRequest
    earlier: tuple[LoggedRequest, ...]
    loaded: "Loaded"
    links: LinksOf = no_links
    names: Names = field(default_factory=Names)

    @property
    def model(self) -> str:
        """The model that answered, or was to: without the name of a context."""
        return _base(self.request)


Loaded = Callable[[str], AbstractAsyncContextManager[Engine | None]]
MakeSection = Callable[[Question], Awaitable[msgspec.Struct]]


async def explain(ctx: OperationContext, request: r.ExplainRequest) -> r.ExplainResult:
    """Explain one request of the running node."""
    names = known_names(ctx.services)
    return await explained(_log(ctx), request, partial(_loaded, ctx), partial(links_of, ctx.services), names)


async def explained(
    log: RequestLog,
    request: r.ExplainRequest,
    loaded: Loaded,
    links: LinksOf = no_links,
    names: Names | None = None,
) -> r.ExplainResult:
    """Explain one request of a log.

    Raises:
        UsageError: no such request, or no such section.
    """
    unknown = [name for name in request.sections if name not in SECTIONS]
    if unknown:
        raise UsageError(
            f"expected sections out of {', '.join(SECTIONS)}, found {unknown[0]!r}",
            hint="kvnet explain without --section shows all of them",
        )
    wanted = _wanted(log, request.request)
    earlier = tuple(takewhile(lambda each: each is not wanted, log))
    question = Question(wanted, earlier, loaded, links, names or Names())
    sections = {
        name: msgspec.to_builtins(await make(question))
        for name, make in SECTIONS.items()
        if not request.sections or name in request.sections
    }
    return r.ExplainResult(
        request=wanted.id,
        time_s=wanted.time_s,
        path=wanted.path,
        model=_shown_model(wanted),
        state=_state(wanted),
        failure=f"{wanted.failure.status}: {wanted.failure.message}" if wanted.failure is not None else "",
        ttft_s=wanted.finished.ttft_s if wanted.finished is not None else 0.0,
        total_s=wanted.finished.total_s if wanted.finished is not None else 0.0,
        sections=sections,
    )


async def reuse_section(question: Question) -> r.ExplainedReuse:
    """What was reused and from where, or why not."""
    found = question.request.reuse
    if found is None:
        return r.ExplainedReuse(note="its answer did not begin, so nothing was looked up or reused")
    return r.ExplainedReuse(
        prompt_tokens=found.prompt_tokens,
        reused_tokens=found.reused_tokens,
        created_tokens=found.created_tokens,
        source=found.source,
        sources=[told_source(each, question.names) for each in found.sources],
        saved_s=found.saved_s,
        lookup_s=found.lookup_s,
        restore_s=found.restore_s,
        verdict=found.verdict.name if found.verdict is not None else "",
        reasons=list(found.reasons),
        rejected=[r.RejectedArtifact(artifact_text(each.artifact), each.code, each.text) for each in found.rejected],
    )


async def prompt_section(question: Question) -> r.ExplainedPrompt:
    """What the prompt is made of, and where it parts from the most similar one before it."""
    request = question.request
    # Off the thread that answers clients: prompts are long, and there may be a hundred of them.
    examined = await trio.to_thread.run_sync(_examined, request, question.earlier)
    if examined is None:
        return r.ExplainedPrompt(note=_why_no_prompt(request))
    excerpts: list[str] = []
    if examined.earlier is not None:
        async with question.loaded(_base(request)) as engine:
            excerpts = await rendered(engine, examined.compared, examined.earlier, examined.prompt)
    labels = request.id, examined.against
    return r.ExplainedPrompt(report(labels, examined.prompt, examined.compared, examined.found, excerpts))


SECTIONS: dict[str, MakeSection] = {
    "reuse": reuse_section,
    "plan": plan_section,
    "link": link_section,
    "prompt": prompt_section,
}
"""Every section, in the order they are shown."""


def _log(ctx: OperationContext) -> RequestLog:
    log: RequestLog | None = getattr(ctx.services, "request_log", None)
    if not ctx.serving or log is None:
        raise UsageError(
            "expected a running node of this data directory, found none: it alone remembers requests",
            hint="kvnet node start, and send it a request",
        )
    return log


def _wanted(log: RequestLog, name: str) -> LoggedRequest:
    found = log.find(name) if name else log.last()
    if found is None:
        here = f"expected one of the last {len(log)} requests" if len(log) else "expected a request"
        raise UsageError(
            f"{here}, found {f'none or several that begin with {name!r}' if name else 'none since the node started'}",
            hint="the header x-kvnet-request of an answer names it"
            if name
            else "requests to its HTTP endpoint are remembered; kvnet ask and generate say themselves what was reused",
        )
    return found


def _state(request: LoggedRequest) -> str:
    if request.failure is not None:
        return "failed"
    if request.cancelled:
        return "cancelled"
    return "answered" if request.finished is not None else "running"


@dataclass(frozen=True, slots=True)
class _Examined:
    """A prompt beside the most similar one before it, whose id is ``against``; "" and ``None`` without one."""

    prompt: Prompt
    against: str
    earlier: Prompt | None
    compared: Comparison
    found: Sequence[Finding]


def _examined(request: LoggedRequest, others: Sequence[LoggedRequest]) -> _Examined | None:
    prompt = _prompt(request)
    if prompt is None:
        return None
    alone = [*killers.in_request(prompt.sent, request.removed), *killers.in_prompt(prompt)]
    best = _most_similar(request, prompt, others)
    earlier = _prompt(best) if best is not None else None
    if best is None or earlier is None:
        nothing = Comparison(0, 0, len(prompt.prepared.tokens), "", None, None, in_template=False)
        return _Examined(prompt, "", None, nothing, alone)
    found = _merged(between(earlier, prompt, ()), alone)
    return _Examined(prompt, best.id, earlier, compare(earlier, prompt), found)


def _prompt(request: LoggedRequest) -> Prompt | None:
    asked, prepared = request.asked, request.prepared
    if asked is None or prepared is None:
        return None
    return Prompt(outline(json.loads(asked.body)), prepared)


def _why_no_prompt(request: LoggedRequest) -> str:
    if request.private:
        return "it was private, so its prompt was not remembered"
    if request.reuse is None:
        return "its prompt was not ready"
    return "it is too old or too long: its prompt is not remembered any more"


def _most_similar(request: LoggedRequest, prompt: Prompt, others: Sequence[LoggedRequest]) -> LoggedRequest | None:
    """The request whose prompt begins most alike; of several the newest."""
    best: LoggedRequest | None = None
    longest = -1
    for each in others:
        prepared = each.prepared
        if prepared is None or each.asked is None or _base(each) != _base(request):
            continue
        common = common_prefix(prepared.tokens, prompt.prepared.tokens)
        if common >= longest:
            best, longest = each, common
    return best


def _shown_model(request: LoggedRequest) -> str:
    other = request.answered_by and request.answered_by != request.model.partition("#")[0]
    if not request.model:
        return f"{request.answered_by} (none was named)" if request.answered_by else "none was named"
    return f"{request.model} (answered by {request.answered_by})" if other else request.model


def _base(request: LoggedRequest) -> str:
    """The model that answered, or was to: without the name of a context."""
    return request.answered_by or request.model.partition("#")[0]


def _merged(certain: Sequence[Finding], likely: Sequence[Finding]) -> list[Finding]:
    """What is certain, then what is likely and not among it."""
    known = {each.killer for each in certain}
    return [*certain, *(each for each in likely if each.killer not in known)]


@asynccontextmanager
async def _loaded(ctx: OperationContext, model: str) -> AsyncIterator[Engine | None]:
    """Explaining loads no model: it only asks one that is in memory."""
    if model not in ctx.services.engines.loaded():
        yield None
        return
    async with ctx.services.engines.use(model) as engine:
        yield engine
