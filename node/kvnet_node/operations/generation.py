"""Operations that compute: add, ask and generate."""

import datetime as dt
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from kvnet.engine.interface import Engine, PrefillProgress, TextDelta, frozen_template_inputs
from kvnet.errors import KvnetError, OverBudgetError, UnknownModelError, UsageError
from kvnet.exchange.claims import Search
from kvnet.exchange.contexts import NamedContext, decode_context, document_context, encode_context
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.generation import Answer, Generator
from kvnet.exchange.prefix_reuse import PrefixReuse, Wanted
from kvnet.exchange.prefix_reuse import Source as ReuseSource
from kvnet.exchange.publisher import Added
from kvnet.exchange.publisher import AddRequest as PublishRequest
from kvnet.exchange.reuse import Lossy, Rejected, find_local
from kvnet.exchange.source import Layout, lay_out
from kvnet.format.codecs import Codec
from kvnet.format.hashes import artifact_text, short_text
from kvnet.format.prefix import block_keys
from kvnet.protocol.ids import peer_text
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import TEXT_PREFIX, publisher_text
from kvnet.trust.policy import RefusalCode
from kvnet_node.events import TextDelta as TextEvent
from kvnet_node.operations import requests as r
from kvnet_node.operations.artifacts import model_names_here
from kvnet_node.operations.context import OperationContext
from kvnet_node.output import format_counted
from kvnet_node.samples import model_names

BOOTSTRAP_WAIT_S = 1.5
"""How long a verb's own node waits for the first member among its bootstrap peers."""

_UNTRUSTED = frozenset({RefusalCode.UNTRUSTED_PUBLISHER.value, RefusalCode.DERIVED_FROM_UNTRUSTED.value})
_PUBLISHER = re.compile(rf"{TEXT_PREFIX}[a-z2-7]+")


async def add(ctx: OperationContext, request: r.AddRequest) -> r.AddResult:
    """Compute the K/V of files as a named context and keep it."""
    services = ctx.services
    if not request.dry_run:
        services.require_disk("a named context")
    codec, *other_codecs = _codecs(request.codec)
    newest = await services.lane.run(services.names.newest, request.name)
    order = newest.file_order if newest is not None else ()
    paths = [Path(path) for path in request.paths]
    layout: Layout = await trio.to_thread.run_sync(lambda: lay_out(paths, previous_order=order))
    if not any(file.size_bytes for file in layout.files):
        raise UsageError(
            f"expected text to add, found {format_counted(len(layout.files), 'empty file')}",
            hint="give a file or directory with text in it",
        )
    async with services.engines.use(
        request.model or (newest.model if newest is not None else None), ctx.loading
    ) as engine:
        context = document_context(layout.text, _template_inputs(newest))
        tokens = await engine.context_tokens(context.messages, context.template_inputs)
        if services.node is not None and not request.dry_run:
            await _fetch_beginning(ctx, engine, tokens)
        plan = await _announce_plan(ctx, engine, request, layout, tokens)
        if request.dry_run:
            return plan
        publish = PublishRequest(tokens, encode_context(context), codec, pinned=True, created_s=_now_s())

        async def progress(done: int, total: int) -> None:
            ctx.progress("prefill", done, total, unit="tokens")

        added = await services.publisher.add(engine, publish, progress)
        services.speeds.note(engine.info.path, added.prefilled_tokens, added.prefill_s)
        services.writes.named(added.new_bytes)
        _publish(ctx, engine, tokens, added)
        others = await _add_others(ctx, engine, publish, other_codecs)
        version = await services.lane.run(
            _name, ctx, request.name, engine, (added, *others.values()), layout.order, context
        )
        _warn_of_lossy(ctx, codec)
        services.savings.added(
            added.record.hash,
            name=request.name,
            model=engine.info.name,
            tokens=len(tokens),
            prefilled_tokens=added.prefilled_tokens,
            prefill_s=added.prefill_s,
            n_bytes=added.new_bytes,
        )
    new_bytes = added.new_bytes + sum(other.new_bytes for other in others.values())
    return r.AddResult(
        artifact=artifact_text(added.record.hash),
        name=request.name,
        version=version,
        tokens=len(tokens),
        bytes=added.record.manifest.total_size_bytes,
        new_bytes=new_bytes,
        reused_tokens=added.reused_tokens,
        prefilled_tokens=added.prefilled_tokens,
        prefill_s=added.prefill_s,
        files=len(layout.files),
        skipped=plan.skipped,
        model=engine.info.name,
        codec=codec.value,
        others={other.value: artifact_text(each.record.hash) for other, each in others.items()},
        ticket=services.ticket(added.record.hash, serving=ctx.serving),
    )


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
        tokens = await engine.render(messages, frozen_template_inputs(_today()))
        answer = await _generate(ctx, engine, tokens, request.max_tokens, reuse=not request.no_reuse)
    return r.GenerateResult(**_fields(ctx, answer, engine, request.max_tokens))


# --- parts -----------------------------------------------------------------------------------------------------------


def _codecs(text: str) -> list[Codec]:
    """The codecs of a text such as "raw,q8": lossless ones first, since no lossy one is made into a lossless one."""
    try:
        codecs = dict.fromkeys(Codec(name.strip()) for name in text.split(","))
    except ValueError:
        names = " or ".join(codec.value for codec in Codec)
        raise UsageError(f"expected the codec {names}, or several with commas, found {text!r}") from None
    return sorted(codecs, key=lambda codec: not codec.lossless)


async def _add_others(
    ctx: OperationContext, engine: Engine, added: PublishRequest, codecs: Sequence[Codec]
) -> dict[Codec, Added]:
    """The same state again in each of these codecs, from what is stored: nothing is computed for it."""
    others: dict[Codec, Added] = {}
    for codec in codecs:
        others[codec] = await ctx.services.publisher.add(engine, replace(added, codec=codec))
        ctx.services.writes.named(others[codec].new_bytes)
        _publish(ctx, engine, added.tokens, others[codec])
    return others


def _warn_of_lossy(ctx: OperationContext, codec: Codec) -> None:
    """Somebody who adds a lossy artifact alone should hear that this node will not use it."""
    if not codec.lossless and ctx.services.config.lossy == Lossy.NEVER.value:
        ctx.warn(f"reuse.lossy is never: this node computes again what it has only in the lossy codec {codec.value}")


def _now_s() -> int:
    return int(dt.datetime.now(tz=dt.UTC).timestamp())


def _today() -> str:
    """The start of this day: a template that prints the date gives the same tokens all day long."""
    return dt.datetime.now(tz=dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None).isoformat()


def _template_inputs(newest: NamedVersion | None) -> Mapping[str, str]:
    """Frozen when a name is first added and kept with it, so that a later version shares its beginning."""
    if newest is not None:
        return decode_context(newest.context).template_inputs
    return frozen_template_inputs(_today())


async def _fetch_beginning(ctx: OperationContext, engine: Engine, tokens: Sequence[int]) -> None:
    """What a peer has computed of the same text is fetched and extended; the artifact names it in ``derived_from``."""
    services = ctx.services
    found = await services.lane.run(
        find_local, services.store, engine.info, services.identity, tokens, limit_tokens=len(tokens)
    )
    held = found.hit.n_tokens if found.hit is not None else 0
    fetched = (await _PeerSearch(ctx)(engine, Wanted(tokens), held)).fetched if held < len(tokens) else None
    if fetched is not None:
        ctx.note(
            f"{fetched.n_tokens:,} tokens came from peer {peer_text(fetched.peer)}"
            if fetched.peer
            else f"{fetched.n_tokens:,} tokens were held in part already",
            fetched_tokens=fetched.n_tokens,
            fetched_bytes=fetched.n_bytes,
        )


async def _announce_plan(
    ctx: OperationContext, engine: Engine, request: r.AddRequest, layout: Layout, tokens: Sequence[int]
) -> r.AddResult:
    """Say what will be computed before it starts; the same values are the result of a dry run."""
    services = ctx.services
    found = await services.lane.run(
        find_local,
        services.store,
        engine.info,
        services.identity,
        tokens,
        limit_tokens=len(tokens),
        lossy=Lossy.NEVER if _codecs(request.codec)[0].lossless else Lossy.ALWAYS,
    )
    reused = found.hit.n_tokens if found.hit is not None else 0
    speed = services.speeds.prefill_tokens_s(engine.info.path)
    estimate_s = (len(tokens) - reused) / speed if speed else 0.0
    n_bytes = len(tokens) * engine.info.kv_bytes_per_token
    skipped = [r.SkippedFile(str(each.path), each.reason) for each in layout.skipped]
    wait = f"about {estimate_s:,.1f} s of prefill" if speed else "prefill time unknown until this model was measured"
    if not request.dry_run:  # its result says the same
        ctx.note(
            f"{format_counted(len(layout.files), 'file')}, {format_counted(len(tokens), 'token')}, "
            f"{n_bytes / 1e6:,.1f} MB of K/V; "
            f"{format_counted(reused, 'token')} held already; {wait}",
            files=len(layout.files),
            tokens=len(tokens),
            bytes=n_bytes,
            reused_tokens=reused,
            estimated_prefill_s=estimate_s,
        )
    if skipped:
        shown = "\n".join(f"  {each.path}: {each.reason}" for each in skipped)
        ctx.note(f"skipped {format_counted(len(skipped), 'file')}:\n{shown}", skipped=len(skipped))
    return r.AddResult(
        artifact="",
        name=request.name,
        version=0,
        tokens=len(tokens),
        bytes=n_bytes,
        new_bytes=(len(tokens) - reused) * engine.info.kv_bytes_per_token,
        reused_tokens=reused,
        prefilled_tokens=len(tokens) - reused,
        prefill_s=estimate_s,
        files=len(layout.files),
        skipped=skipped,
        model=engine.info.name,
        codec=request.codec,
        dry_run=True,
        prefill_known=speed > 0,
    )


def _publish(ctx: OperationContext, engine: Engine, tokens: Sequence[int], added: Added) -> None:
    """Serve and announce what was added."""
    node = ctx.services.node
    if node is None or engine.info.fingerprint is None:
        return
    namespace = ctx.services.identity.namespaces()[0]
    node.published(added.record, block_keys(namespace.prefix_root(engine.info.fingerprint.hash), tokens))


def _name(
    ctx: OperationContext,
    name: str,
    engine: Engine,
    added: Sequence[Added],
    order: Sequence[str],
    context: NamedContext,
) -> int:
    """Give the artifacts of one state the next version number; the same ones again keep the one they have."""
    names = ctx.services.names
    newest = names.newest(name)
    artifact, *others = (each.record.hash for each in added)
    same = newest is not None and (newest.artifact, newest.file_order) == (artifact, tuple(order))
    if newest is not None and same and set(others) <= set(newest.others):
        return newest.version
    fingerprint = engine.info.fingerprint
    assert fingerprint is not None  # noqa: S101 - nothing is added without one
    return names.add(
        name,
        artifact=artifact,
        model=_model_text(ctx, engine),
        fingerprint=fingerprint.hash,
        context=encode_context(context),
        file_order=tuple(order),
        created_s=_now_s(),
        others=others,
    ).version


def _model_text(ctx: OperationContext, engine: Engine) -> str:
    """What finds this model again: its name in ``kvnet model list``, or its folder when it is not listed."""
    names = (entry.name for entry in ctx.services.engines.models() if entry.path == engine.info.path)
    return next(names, str(engine.info.path))


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
    search = _PeerSearch(ctx)
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


class _PeerSearch:
    """Asks peers for a longer prefix, and says why there was none."""

    def __init__(self, ctx: OperationContext) -> None:
        self._ctx = ctx

    async def __call__(self, engine: Engine, wanted: Wanted, held_tokens: int) -> Search:
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
    return {
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "sources": [_source(source) for source in answer.sources],
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
    }


def saved_seconds(answer: Answer, prefill_tokens_s: float) -> float:
    """How much sooner the first token came than without reuse; what is not prefill was spent on reuse."""
    if not answer.reused_tokens or not prefill_tokens_s:
        return 0.0
    return answer.reused_tokens / prefill_tokens_s - max(0.0, answer.ttft_s - answer.prefill_s)


def reason_text(rejected: Rejected) -> str:
    """Why an artifact was not used, in words, with the next step when it is a matter of trust."""
    if not any(rejected.artifact):
        return f"the store could not be asked: {rejected.text}"
    text = f"{short_text(rejected.artifact)} was not used: {rejected.text}"
    publisher = _PUBLISHER.search(rejected.text)
    if publisher is None or rejected.code not in _UNTRUSTED:
        return text
    return f"{text}; if you know whose key that is: kvnet key trust {publisher[0]}"


def _source(source: ReuseSource) -> r.Source:
    return r.Source(
        source=source.source,
        tokens=source.tokens,
        bytes=source.n_bytes,
        seconds=source.seconds,
        peer=peer_text(source.peer) if source.peer else "",
        signer=publisher_text(source.signer),
        artifact=artifact_text(source.artifact),
    )
