"""The operation ``add``: compute the K/V of files, and keep it under a name."""

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import trio

from kvnet.engine.interface import Engine
from kvnet.engine.prompts import frozen_template_inputs
from kvnet.errors import UsageError, WindowError
from kvnet.exchange.contexts import NamedContext, decode_context, document_context, encode_context
from kvnet.exchange.prefix_reuse import Wanted
from kvnet.exchange.publisher import Added
from kvnet.exchange.publisher import AddRequest as PublishRequest
from kvnet.exchange.reuse import Lossy, find_local
from kvnet.exchange.source import Layout, lay_out
from kvnet.exchange.unfinished import Beginning, EarlyEnd
from kvnet.format.codecs import Codec
from kvnet.format.hashes import artifact_text, short_text
from kvnet.format.prefix import BLOCK_TOKENS, block_keys
from kvnet.protocol.ids import peer_text
from kvnet.store.names import NamedVersion
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.generation import PeerSearch, today
from kvnet_node.operations.peer_names import known_peer_names
from kvnet_node.operations.shared import tell_names
from kvnet_node.output import format_counted
from kvnet_node.services import Services


async def add(ctx: OperationContext, request: r.AddRequest) -> r.AddResult:
    """Compute the K/V of files as a named context and keep it."""
    services = ctx.services
    if not request.dry_run:
        services.require_disk("a named context")
    codec, *other_codecs = _codecs(request.codec)
    newest = await services.lane.run(services.names.newest, request.name)
    layout = await _laid_out(request, newest)
    async with services.engines.use(
        request.model or (newest.model if newest is not None else None), ctx.loading
    ) as engine:
        context = document_context(layout.text, _template_inputs(newest))
        tokens = await engine.context_tokens(context.messages, context.template_inputs)
        check_fits(len(tokens), len(layout.files), engine.info.window_tokens)
        if services.node is not None and not request.dry_run:
            await _fetch_beginning(ctx, engine, tokens)
        plan = await _announce_plan(ctx, engine, request, layout, tokens)
        if request.dry_run:
            return plan
        publish = PublishRequest(tokens, encode_context(context), codec, pinned=True, created_s=_now_s())
        added = await _compute(ctx, engine, request.name, publish)
        others = await _add_others(ctx, engine, publish, other_codecs)
        version = await services.lane.run(
            _name, ctx, request.name, engine, (added, *others.values()), layout.order, context
        )
        await tell_names(ctx, request.name)
        _warn_of_lossy(ctx, codec)
        _note(services, request.name, engine, len(tokens), added)
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


# --- parts -----------------------------------------------------------------------------------------------------------


async def _laid_out(request: r.AddRequest, newest: NamedVersion | None) -> Layout:
    """The files as one text, those that were in the version before in their order."""
    order = newest.file_order if newest is not None else ()
    paths = [Path(path) for path in request.paths]
    layout: Layout = await trio.to_thread.run_sync(lambda: lay_out(paths, previous_order=order))
    if not any(file.size_bytes for file in layout.files):
        raise UsageError(
            f"expected text to add, found {format_counted(len(layout.files), 'empty file')}",
            hint="give a file or directory with text in it",
        )
    return layout


def check_fits(n_tokens: int, n_files: int, window_tokens: int) -> None:
    """Refuse what can never be computed, before anybody is asked for its beginning; a dry run says the same.

    Args:
        n_tokens: of the context.
        n_files: it is made of.
        window_tokens: of the model; 0 when unknown.

    Raises:
        WindowError: the context is longer than the window.
    """
    if window_tokens and n_tokens > window_tokens:
        raise WindowError(
            f"the model's window is {window_tokens:,} tokens; {format_counted(n_files, 'file')} make {n_tokens:,}"
            if n_files > 1
            else f"the model's window is {window_tokens:,} tokens; the file makes {n_tokens:,}",
            hint="add fewer or shorter files, or choose a model with a longer window: kvnet add --model MODEL",
        )


def _note(services: Services, name: str, engine: Engine, n_tokens: int, added: Added) -> None:
    """Keep what this cost, for what it will save."""
    services.savings.added(
        added.record.hash,
        name=name,
        model=engine.info.name,
        tokens=n_tokens,
        prefilled_tokens=added.prefilled_tokens,
        prefill_s=added.prefill_s,
        n_bytes=added.new_bytes,
    )


def _codecs(text: str) -> list[Codec]:
    """The codecs of a text such as "raw,q8": lossless ones first, since no lossy one is made into a lossless one."""
    try:
        codecs = dict.fromkeys(Codec(name.strip()) for name in text.split(","))
    except ValueError:
        names = " or ".join(codec.value for codec in Codec)
        raise UsageError(f"expected the codec {names}, or several with commas, found {text!r}") from None
    return sorted(codecs, key=lambda codec: not codec.lossless)


async def _compute(ctx: OperationContext, engine: Engine, name: str, publish: PublishRequest) -> Added:
    """Compute what is missing, and offer it; what is there when this ends early is kept and said."""
    services = ctx.services

    async def progress(done: int, total: int) -> None:
        ctx.progress("prefill", done, total, unit="tokens")

    added = await services.publisher.add(engine, publish, progress, _early_end(ctx, engine, name, publish.tokens))
    services.speeds.note(engine.info.path, added.prefilled_tokens, added.prefill_s)
    services.writes.named(added.new_bytes)
    _publish(ctx, engine, publish.tokens, added)
    return added


def _early_end(ctx: OperationContext, engine: Engine, name: str, tokens: Sequence[int]) -> EarlyEnd:
    """Says what is kept when an add is interrupted, and what running it again does."""

    def say(text: str, **data: object) -> None:
        # Whoever has closed the terminal reads it no more.
        with suppress(OSError):
            ctx.note(text, **data)

    def keeps(n_tokens: int) -> None:
        say(f"interrupted: keeping the {n_tokens:,} tokens that are done; Ctrl-C again drops them")

    def kept(beginning: Beginning) -> None:
        n_tokens = beginning.record.manifest.n_tokens
        ctx.services.writes.named(beginning.new_bytes)
        ctx.services.savings.begun(beginning.record.hash, name=name, model=engine.info.name, tokens=n_tokens)
        _publish(ctx, engine, tokens[:n_tokens], beginning)
        say(
            f"kept {n_tokens:,} of {len(tokens):,} tokens, in whole blocks of {BLOCK_TOKENS}, as "
            f"{short_text(beginning.record.hash)}; the name {name} is given when all of them are done\n"
            "the same command goes on from there",
            kept_tokens=n_tokens,
            tokens=len(tokens),
            artifact=artifact_text(beginning.record.hash),
        )

    def lost(reason: str) -> None:
        say(f"nothing more than before is kept: {reason}", kept_tokens=0)

    return EarlyEnd(keeps, kept, lost)


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


def _template_inputs(newest: NamedVersion | None) -> Mapping[str, str]:
    """Frozen when a name is first added and kept with it, so that a later version shares its beginning."""
    if newest is not None:
        return decode_context(newest.context).template_inputs
    return frozen_template_inputs(today())


async def _fetch_beginning(ctx: OperationContext, engine: Engine, tokens: Sequence[int]) -> None:
    """What a peer has computed of the same text is fetched and extended; the artifact names it in ``derived_from``."""
    services = ctx.services
    found = await services.lane.run(
        find_local, services.store, engine.info, services.identity, tokens, limit_tokens=len(tokens)
    )
    held = found.hit.n_tokens if found.hit is not None else 0
    fetched = (await PeerSearch(ctx)(engine, Wanted(tokens), held)).fetched if held < len(tokens) else None
    if fetched is not None:
        name = known_peer_names(services).get(fetched.peer) if fetched.peer else ""
        ctx.note(
            f"{fetched.n_tokens:,} tokens came from {name or f'peer {peer_text(fetched.peer)}'}"
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


def _publish(ctx: OperationContext, engine: Engine, tokens: Sequence[int], made: Added | Beginning) -> None:
    """Serve and announce what was added, and no more what it took the place of."""
    node = ctx.services.node
    if node is None or engine.info.fingerprint is None:
        return
    namespace = ctx.services.identity.namespaces()[0]
    node.published(made.record, block_keys(namespace.prefix_root(engine.info.fingerprint.hash), tokens))
    if made.superseded is not None:
        node.removed(made.superseded)


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
