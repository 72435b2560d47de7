"""Operations that answer: ask and generate."""

import datetime as dt
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from kvnet.engine.generations import TextDelta
from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import PrefillProgress
from kvnet.engine.prompts import frozen_template_inputs
from kvnet.errors import KvnetError, OverBudgetError, UnknownModelError, UsageError
from kvnet.exchange.claims import Search
from kvnet.exchange.completion import saved_seconds as net_of_cost
from kvnet.exchange.contexts import decode_context
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.generation import Answer, Generator
from kvnet.exchange.prefix_reuse import PrefixReuse, Wanted
from kvnet.exchange.reuse import Lossy, Rejected
from kvnet.format.hashes import short_text
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import TEXT_PREFIX
from kvnet.trust.policy import RefusalCode
from kvnet_node.events import TextDelta as TextEvent
from kvnet_node.operations import requests as r
from kvnet_node.operations.artifacts import model_names_here
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.peer_names import known_names
from kvnet_node.operations.sources import told_source
from kvnet_node.samples import model_names

BOOTSTRAP_WAIT_S = 1.5
"""How long a verb's own node waits for the first member among its bootstrap peers."""

_UNTRUSTED = frozenset({RefusalCode.UNTRUSTED_PUBLISHER.value, RefusalCode.DERIVED_FROM_UNTRUSTED.value})
_PUBLISHER = re.compile(rf"{TEXT_PREFIX}[a-z2-7]+")


async def ask(ctx: OperationContext, request: r.AskRequest) -> r.AskResult:
    """Answer a question over a named context."""
    services = ctx.services
    version = await services.lane.run(services.names.resolve, request.name)
    context = decode_context(version.context)
    async with _engine_of(ctx, version, request.model) as engine:
        tokens = await engine.render(context.with_question(request.question), context.template_inputs)
        answer = await _generate(ctx, engine, tokens, request.max_tokens, reuse=not request.no_reuse)
    return r.AskResult(**_fields(ctx, answer, engine, request.max_tokens))


async def generate(ctx: OperationContext, request: r.GenerateRequest) -> r.GenerateResult:
    """Generate from a prompt or a chat."""
    if (request.prompt is None) == (request.messages is None):
        raise UsageError("expected either a prompt or a chat, found both or neither", hint="give --prompt or --chat")
    async with ctx.services.engines.use(request.model, ctx.loading) as engine:
        messages = request.messages or [{"role": "user", "content": request.prompt or ""}]
        tokens = await engine.render(messages, frozen_template_inputs(today()))
        answer = await _generate(ctx, engine, tokens, request.max_tokens, reuse=not request.no_reuse)
    return r.GenerateResult(**_fields(ctx, answer, engine, request.max_tokens))


# --- parts -----------------------------------------------------------------------------------------------------------


def today() -> str:
    """The start of this day: a template that prints the date gives the same tokens all day long."""
    return dt.datetime.now(tz=dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None).isoformat()


@asynccontextmanager
async def _engine_of(ctx: OperationContext, version: NamedVersion, asked: str | None) -> AsyncIterator[Engine]:
    """The engine that was asked for, else the one a context was made with, else that of the default model."""
    model = asked or await _model_of(ctx, version)
    async with ctx.services.engines.use(model, ctx.loading) as engine:
        if engine.info.fingerprint is None or engine.info.fingerprint.hash != version.fingerprint:
            ctx.warn(f"this context was computed with another model than {engine.info.name}; nothing of it is reused")
        yield engine


async def _model_of(ctx: OperationContext, version: NamedVersion) -> str | None:
    """The model here that a context was made with; None when that is not here, and the default one is to answer.

    Raises:
        UnknownModelError: neither is here.
    """
    services = ctx.services
    # What a peer calls a model is for people to read: it must not choose what is loaded here.
    own = version.model or (await services.lane.run(model_names, services.paths.samples_dir)).get(version.fingerprint)
    if own:
        with suppress(UnknownModelError):
            await services.engines.choose(own)
            return own
    called = own or (await model_names_here(services)).get(version.fingerprint, "")
    try:
        await services.engines.choose(None)
    except UnknownModelError as error:
        if not called:
            raise
        raise UnknownModelError(
            f"expected the model {called}, with which this context was computed, found neither it nor a default model",
            hint=error.hint,
        ) from error
    if own:
        ctx.warn(f"the model {own} of this context is not on this machine; another one answers")
    return None


async def _generate(
    ctx: OperationContext, engine: Engine, tokens: Sequence[int], max_tokens: int, *, reuse: bool
) -> Answer:
    """Run one generation and stream what it reports."""
    services = ctx.services
    # The engine checks this and its memory too; here it is found before peers are asked.
    check_window(len(tokens), max_tokens, engine.info.window_tokens)
    exact_only = services.config.numerics == "exact"
    search = PeerSearch(ctx)
    prefixes = PrefixReuse(
        services.store,
        services.lane,
        services.identity,
        search if services.node is not None else None,
        exact_only=exact_only,
        lossy=Lossy(services.config.lossy),
    )
    generator = Generator(prefixes, services.identity)
    async with aclosing(generator.generate(engine, tokens, max_tokens=max_tokens, reuse=reuse)) as events:
        async for event in events:
            if isinstance(event, Answer):
                prefilled = event.prefilled_tokens
                services.speeds.note(engine.info.path, prefilled, event.prefill_s)
                speed = services.speeds.prefill_tokens_s(engine.info.path)
                services.savings.note_answer(event, saved_seconds(event, speed))
                return event
            if isinstance(event, TextDelta):
                ctx.emit(TextEvent(event.text))
            elif isinstance(event, PrefillProgress):
                ctx.progress("prefill", event.done_tokens, event.total_tokens, unit="tokens")
    raise KvnetError("the engine ended a generation without a result", hint="run the command again")


def check_window(n_tokens: int, max_tokens: int, window_tokens: int) -> None:
    """Raises OverBudgetError when a prompt and its answer are more than the window; 0 is an unknown window."""
    if window_tokens and n_tokens + max_tokens > window_tokens:
        raise OverBudgetError(
            f"the model's window is {window_tokens:,} tokens; the prompt has {n_tokens:,} and {max_tokens:,} may be "
            "generated",
            hint="shorten the prompt or lower --max-tokens",
        )


class PeerSearch:
    """Asks peers for a longer prefix, and says why there was none."""

    def __init__(self, ctx: OperationContext) -> None:
        self._ctx = ctx

    async def __call__(self, engine: Engine, wanted: Wanted, held_tokens: int) -> Search:
        """What came of asking."""
        services = self._ctx.services
        assert services.node is not None  # noqa: S101 - given to a generator only then

        async def progress(event: FetchProgress) -> None:
            self._ctx.progress("fetch", event.done_bytes, event.total_bytes, unit="bytes")

        if not self._ctx.serving and services.bootstrap():
            # A node that lives for this one verb has only just begun to dial its bootstrap peers.
            await services.node.wait_for_members(BOOTSTRAP_WAIT_S)
        speed = services.speeds.prefill_tokens_s(engine.info.path)
        found = await services.node.finder.search(
            engine.info,
            wanted.tokens,
            held_tokens,
            prefill_tokens_s=speed,
            machine=services.speeds.machine(engine.info),
            progress=progress,
        )
        for reason in found.reasons:
            self._ctx.note(f"peers: {reason}")
        return found


def _fields(ctx: OperationContext, answer: Answer, engine: Engine, max_tokens: int) -> dict[str, Any]:
    reasons = list(dict.fromkeys(map(reason_text, answer.rejected)))
    names = known_names(ctx.services)
    return {
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "sources": [told_source(source, names) for source in answer.sources],
        "ttft_s": answer.ttft_s,
        "prefill_s": answer.prefill_s,
        "decode_s": answer.decode_s,
        "finish_reason": answer.finish_reason,
        "policy": answer.policy,
        "verdict": answer.verdict.name if answer.verdict is not None else "EXACT",
        "generated_tokens": len(answer.tokens),
        "model": engine.info.name,
        "reasons": reasons,
        "saved_s": saved_seconds(answer, ctx.services.speeds.prefill_tokens_s(engine.info.path)),
        "max_tokens": max_tokens,
        "waited_s": answer.waited_s,
    }


def saved_seconds(answer: Answer, prefill_tokens_s: float) -> float:
    """How much sooner the first token came than without reuse; waiting for the engine is not to be blamed on it."""
    return net_of_cost(answer.reused_tokens, prefill_tokens_s, answer.lookup_s + answer.restore_s)


def reason_text(rejected: Rejected) -> str:
    """Why an artifact was not used, in words, with the next step when it is a matter of trust."""
    if not any(rejected.artifact):
        return f"the store could not be asked: {rejected.text}"
    text = f"{short_text(rejected.artifact)} was not used: {rejected.text}"
    publisher = _PUBLISHER.search(rejected.text)
    if publisher is None or rejected.code not in _UNTRUSTED:
        return text
    return f"{text}; if you know whose key that is: kvnet key trust {publisher[0]}"
