"""Fetch an artifact from peers, by hash or ticket."""

import datetime as dt
import math
from collections.abc import Mapping
from functools import partial

import trio

from kvnet.errors import KvnetError, NetworkError, UsageError
from kvnet.exchange.contexts import decode_context
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.locating import Located
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.provider import Delivered
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.format.ticket import Ticket
from kvnet.protocol.fetch import DropReason
from kvnet.protocol.ids import PeerId, peer_text
from kvnet.protocol.pace import Purpose
from kvnet.store.interface import ArtifactRecord
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import publisher_text
from kvnet_node.events import PeerProgress, Progress
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.needed_model import needed_model
from kvnet_node.operations.peer_names import known_names, known_peer_names
from kvnet_node.operations.reaching import locate, reach, reaching, saying
from kvnet_node.operations.shared import Meant, meant_by_name
from kvnet_node.services import Services
from kvnet_node.targets import is_name, parse_target

TICK_S = 0.25
"""How often a fetch says how it goes, also when nothing comes."""

SILENT_S = 3.0
"""Seconds without a byte from anybody after which that is said."""

UNREMARKABLE = frozenset({"", DropReason.DONE, DropReason.EXHAUSTED, DropReason.SPARE})
"""Reasons to leave a peer that say nothing about it."""


async def fetch(ctx: OperationContext, request: r.FetchRequest) -> r.FetchResult:
    """Fetch, verify and keep an artifact; with a name it becomes a named context here."""
    services = ctx.services
    if services.node is None:
        raise NetworkError("expected a network to fetch from, found none", hint="start the node: kvnet node start")
    meant = await meant_by_name(ctx, services.node, request) if is_name(request.target) else None
    request = meant.request if meant is not None else request
    ticket = parse_target(request.target)
    if request.name is not None:
        services.names.check_name(request.name)
        services.require_disk("a named context")
    started_s = trio.current_time()
    held = await services.lane.run(services.store.get, ticket.artifact)
    if held is not None and held.complete:
        services.identity.judge(held.manifest)
        if meant is not None:
            meant.require(held.manifest.publisher)
        return await _finish(ctx, request, held, None, started_s)
    fetched, own = await _shared(ctx, services.node, ticket, request, meant)
    return await _finish(ctx, request, fetched.record, fetched, started_s, own=own)


async def _shared(
    ctx: OperationContext, node: ExchangeNode, ticket: Ticket, request: r.FetchRequest, meant: Meant | None
) -> tuple[Fetched, bool]:
    """The artifact, and whether it was fetched here: of several commands for the same one, one does the work."""
    tried = False

    async def work() -> Fetched:
        nonlocal tried
        tried = True
        addresses = [*request.addresses, *ticket.addresses]
        await reach(ctx, node, addresses)
        located = await locate(ctx, node, ticket.artifact, addresses)
        if meant is not None:
            meant.require(located.signed.manifest.publisher)
        if request.name is not None and not located.signed.manifest.context_size_bytes:
            raise _no_messages(ticket.artifact)
        fetched = await reaching(
            node,
            addresses,
            ticket.artifact,
            partial(_fetch, ctx, node, located, pinned=request.name is not None),
        )
        node.fetched(fetched)
        return fetched

    with ctx.services.fetches.join(ticket.artifact) as flight:
        while True:
            try:
                got = await flight.get(work)
            except KvnetError:
                # Another command's fetch failed; this one may know other addresses.
                if tried:
                    raise
            else:
                assert got is not None  # noqa: S101 - it waits for ever
                return got


async def _fetch(ctx: OperationContext, node: ExchangeNode, located: Located, *, pinned: bool) -> Fetched:
    last: FetchProgress | None = None
    names = known_peer_names(ctx.services)

    async def progress(event: FetchProgress) -> None:
        nonlocal last
        if event.held_chunks and last is None:
            ctx.note(held_text(event), held_chunks=event.held_chunks, held_bytes=event.held_bytes)
        last = event
        ctx.emit(_shown(event, names))

    entries = await saying(ctx, "asking for the list of its chunks", partial(node.fetcher.chunk_list, located))
    try:
        return await node.fetcher.fetch(
            located, entries, pinned=pinned, progress=progress, tick_s=TICK_S, purpose=Purpose.REPLICATION
        )
    except BaseException as error:
        # Cancelled, alone or out of a nursery as a group; neither is an `Exception`.
        if last is not None and not isinstance(error, Exception):
            kept = last.held_chunks + last.done_chunks
            ctx.note(kept_text(kept, last.held_chunks + last.total_chunks), kept_chunks=kept)
        raise


def _shown(event: FetchProgress, names: Mapping[PeerId, str]) -> Progress:
    """How far all of it is: what was here before counts."""
    peers = [
        PeerProgress(
            peer_text(part.peer),
            part.n_bytes,
            part.n_chunks,
            _finite(part.rate_bytes_s),
            part.path,
            names.get(part.peer, ""),
        )
        for part in event.parts
    ]
    return Progress(
        "fetch",
        event.held_bytes + event.done_bytes,
        event.held_bytes + event.total_bytes,
        "bytes",
        shown_text(event),
        # What came long ago says nothing of when the rest will have come.
        rate=sum(each.rate_bytes_s for each in peers) if event.silent_s < SILENT_S else 0.0,
        peers=peers,
    )


def shown_text(event: FetchProgress) -> str:
    """How far it is, in words."""
    verified = f"{event.held_chunks + event.done_chunks}/{event.held_chunks + event.total_chunks} chunks verified"
    if event.gives_way:
        return f"{verified}; a prompt gets what it needs of it first"
    if event.waiting:
        verified += "; waiting for a peer that has the rest"
    return f"{verified}; nothing has come for {event.silent_s:,.0f} s" if event.silent_s >= SILENT_S else verified


def _finite(rate_bytes_s: float) -> float:
    """A rate is infinite when all that came so far came at once."""
    return rate_bytes_s if math.isfinite(rate_bytes_s) else 0.0


def held_text(event: FetchProgress) -> str:
    """What a fetch does not have to bring, and why."""
    n_chunks, shared = event.held_chunks + event.total_chunks, event.held_chunks - event.resumed_chunks
    if not event.resumed_chunks:
        return f"{shared:,} of {n_chunks:,} chunks are here as part of other artifacts"
    resumed = f"resumed: {event.resumed_chunks:,} of {n_chunks:,} chunks were here"
    return f"{resumed}, and {shared:,} as part of other artifacts" if shared > 0 else resumed


def kept_text(kept_chunks: int, n_chunks: int) -> str:
    """What an interruption leaves."""
    return f"{kept_chunks:,} of {n_chunks:,} chunks are kept: the same command goes on with the rest"


async def _finish(
    ctx: OperationContext,
    request: r.FetchRequest,
    record: ArtifactRecord,
    fetched: Fetched | None,
    started_s: float,
    *,
    own: bool = True,
) -> r.FetchResult:
    services = ctx.services
    if request.name is not None:
        note_version(ctx, *await services.lane.run(name_artifact, services, request.name, record))
    names = known_names(services)
    providers = [
        _provided(services.node, peer, each, names.peers.get(peer, ""))
        for peer, each in (fetched.delivered if fetched is not None else {}).items()
        if each.n_chunks or each.dropped not in UNREMARKABLE
    ]
    seconds = trio.current_time() - started_s
    if fetched is not None and own:
        if not services.config.ram_only:
            services.writes.named(fetched.fetched_bytes)
        services.savings.fetched(
            record.hash,
            name=request.name or "",
            model="",
            tokens=record.manifest.n_tokens,
            seconds=seconds,
            n_bytes=fetched.fetched_bytes,
        )
    model, model_here = await needed_model(services, record.manifest.fingerprint.hash)
    resumed, shared, meanwhile = here_otherwise(fetched)
    return r.FetchResult(
        model=model,
        model_here=model_here,
        artifact=artifact_text(record.hash),
        bytes=record.manifest.total_size_bytes,
        chunks=record.manifest.n_chunks,
        fetched_chunks=fetched.fetched_chunks if fetched is not None else 0,
        seconds=seconds,
        providers=providers,
        signer=publisher_text(record.manifest.publisher),
        name=request.name or "",
        complete=record.complete,
        tokens=record.manifest.n_tokens,
        fetched_bytes=fetched.fetched_bytes if fetched is not None else 0,
        resumed_chunks=resumed,
        shared_chunks=shared,
        meanwhile_chunks=meanwhile,
        signer_name=names.signers.get(record.manifest.publisher, ""),
        suggested="" if request.name is not None else await services.lane.run(suggested_name, services, record),
    )


def suggested_name(services: Services, record: ArtifactRecord) -> str:
    """What an artifact without a name here could be called: as its signer calls it, or NAME; else "". Blocking."""
    can_have = record.manifest.context_size_bytes and not services.config.ram_only
    if not can_have or services.names.names_of(record.hash):
        return ""
    publisher, taken = record.manifest.publisher, services.names.names()
    called = (
        each.name
        for each in services.shared_names.known()
        if (each.artifact, each.signer) == (record.hash, publisher) and each.name not in taken
    )
    return next(called, "NAME")


def here_otherwise(fetched: Fetched | None) -> tuple[int, int, int]:
    """How many chunks were here from an earlier fetch, as part of other artifacts, and came for prompts meanwhile.

    Where all of it was here, nothing is to be said.
    """
    if fetched is None or not (fetched.fetched_chunks or fetched.meanwhile_chunks):
        return 0, 0, 0
    shared = fetched.held_chunks - fetched.resumed_chunks - fetched.meanwhile_chunks
    return fetched.resumed_chunks, max(0, shared), fetched.meanwhile_chunks


def _provided(node: ExchangeNode | None, peer: PeerId, each: Delivered, name: str) -> r.Provided:
    return r.Provided(
        peer_text(peer),
        _address_of(node, peer),
        each.n_bytes,
        each.n_chunks,
        seconds=each.seconds,
        rate_bytes_s=each.n_bytes / each.seconds if each.seconds > 0 else 0.0,
        path=each.path,
        dropped="" if each.dropped in UNREMARKABLE else each.dropped,
        name=name,
    )


def _address_of(node: ExchangeNode | None, peer: PeerId) -> str:
    for known in node.peers() if node is not None else ():
        if known.info.peer == peer and known.info.addresses:
            return known.info.addresses[0]
    return ""


def _no_messages(artifact: ArtifactHash) -> UsageError:
    return UsageError(
        f"the artifact {artifact_text(artifact)} carries no messages, so it cannot be a named context",
        hint="leave --name out; kvnet generate reuses it all the same",
    )


def name_artifact(services: Services, name: str, record: ArtifactRecord) -> tuple[NamedVersion, NamedVersion | None]:
    """Make a fetched artifact a named context here; names are local to a data directory. Blocking.

    Returns:
        The version it is now, and the newest one before.
    """
    context = services.store.context_of(record.hash)
    if not context:
        raise _no_messages(record.hash)
    decode_context(context)
    services.store.pin(record.hash)
    newest = services.names.newest(name)
    if newest is not None and newest.artifact == record.hash:
        return newest, newest
    added = services.names.add(
        name,
        artifact=record.hash,
        model="",
        fingerprint=record.manifest.fingerprint.hash,
        context=context,
        file_order=(),
        created_s=int(dt.datetime.now(tz=dt.UTC).timestamp()),
    )
    return added, newest


def note_version(ctx: OperationContext, version: NamedVersion, before: NamedVersion | None) -> None:
    """Say which version a name means now, when it meant another one before."""
    if before is not None and before.version != version.version:
        ctx.note(f"{version.text} now; {before.text} remains", version=version.text, remaining=before.text)
