"""Peers, their models, and how those compare with the ones here."""

import trio

from kvnet.engine.model_folder import ModelEntry
from kvnet.exchange.known_peers import KnownPeer
from kvnet.exchange.models import ModelExchange, PeerModel
from kvnet.exchange.node import ExchangeNode
from kvnet.protocol.ids import peer_text
from kvnet.protocol.matching import Relation
from kvnet_node.model_matching import ModelMatching
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.network import neighbour_entries
from kvnet_node.operations.peer_names import known_peer_names
from kvnet_node.operations.requests import (
    MatchedModel,
    MatchedPeer,
    MatchRequest,
    MatchResult,
    PeerEntry,
    PeerModelEntry,
    PeersRequest,
    PeersResult,
)
from kvnet_node.operations.swarms import members_away, removed_from, seen_s
from kvnet_node.services import Services

ANSWER_S = 10.0
"""Seconds in which peers must tell of their models, and send samples of those in common."""


async def peers(context: OperationContext, request: PeersRequest) -> PeersResult:
    """Connected peers, after connecting to the addresses in the request."""
    services = context.services
    await _connect(context, request.connect)
    if request.models and services.matching is not None:
        await _know(context, services.matching, [])
        await services.matching.refresh(ANSWER_S)
    around = services.surroundings
    return PeersResult(
        _entries(services),
        services.addresses(),
        neighbour_entries(services),
        discovery=around.discovery if around is not None else "",
        remembered=around.remembered() if around is not None else 0,
        removed=removed_from(services),
        away=members_away(services, await seen_s(services)),
    )


async def match(context: OperationContext, request: MatchRequest) -> MatchResult:
    """Compare the models here with those of every member."""
    services = context.services
    await _connect(context, [])
    node, matching = services.node, services.matching
    if node is None or matching is None:
        return MatchResult([])
    unknown = await _know(context, matching, request.models, load=request.load)
    await matching.refresh(ANSWER_S)
    told = {session.peer: matching.exchange.of(session.peer) for session in node.sessions()}
    chosen = await _chosen(services, request.models)
    names = known_peer_names(services)
    return MatchResult(
        [
            MatchedModel(
                entry.name,
                unknown.get(entry.name, ""),
                [
                    MatchedPeer(peer_text(peer), _model(each), names.get(peer, ""))
                    for peer, models in told.items()
                    for each in models
                    if each.ours == entry.name
                ],
            )
            for entry in chosen
        ],
        silent=[peer_text(peer) for peer, models in told.items() if not models],
        members=len(told),
    )


async def _connect(context: OperationContext, addresses: list[str]) -> None:
    """Connect to addresses; a short-lived network has not reached anybody else yet, a running node has its peers."""
    wanted = addresses if context.serving else [*addresses, *context.services.bootstrap()]
    for address in wanted:
        await context.services.connect(address)


async def _chosen(services: Services, names: list[str]) -> list[ModelEntry]:
    """The models to compare: those named, else all that are whole.

    Raises:
        UnknownModelError: no model of such a name.
    """
    if names:
        return [await services.engines.choose(name) for name in names]
    return [entry for entry in await services.engines.entries() if not entry.broken]


async def _know(
    context: OperationContext, matching: ModelMatching, names: list[str], *, load: bool = True
) -> dict[str, str]:
    """Load what is not known yet, one model after the other; why the others are unknown, by name."""
    unknown: dict[str, str] = {}
    for entry in await _chosen(context.services, names):
        if entry.shareable is False:
            unknown[entry.name] = f"its state cannot be shared: {entry.reason}"
        elif load:
            unknown[entry.name] = await matching.know(entry, context.loading)
        elif matching.book.own(entry.path) is None:
            unknown[entry.name] = "it has not been loaded on this machine yet"
    return {name: reason for name, reason in unknown.items() if reason}


def _entries(services: Services) -> list[PeerEntry]:
    node = services.node
    if node is None:
        return []
    names = known_peer_names(services)
    return [_entry(services, node, each, names.get(each.info.peer, "")) for each in node.peers()]


def _entry(services: Services, node: ExchangeNode, known: KnownPeer, name: str) -> PeerEntry:
    peer, scores = known.info.peer, node.fetcher.scores
    session = node.session_with(peer)
    matching, guest = services.matching, services.guest
    return PeerEntry(
        peer_text(peer),
        list(known.info.addresses),
        member=known.member,
        chunks=known.chunks,
        scopes=sorted(namespace.name for namespace in session.slots) if session is not None else [],
        state=guest.presences.of(peer).value if guest is not None else "",
        rtt_s=scores.rtt_s(peer),
        rate_bytes_s=scores.rate_bytes_s(peer),
        standing=scores.standing(peer, trio.current_time()),
        banned=scores.banned(peer, trio.current_time()),
        models=[_model(each) for each in matching.exchange.of(peer)] if matching is not None else [],
        tells_models=session is not None and ModelExchange.can_ask(session),
        name=name,
    )


def _model(each: PeerModel) -> PeerModelEntry:
    match = each.match
    if match is None:
        return PeerModelEntry(each.theirs.name, relation=Relation.OTHER.value)
    return PeerModelEntry(
        name=each.theirs.name,
        ours=each.ours,
        relation=match.relation.value,
        verdict=match.verdict.value,
        measured=match.measured is not None,
        difference=match.measured.difference if match.measured is not None else None,
        reasons=list(match.reasons),
        advice=match.advice,
    )
