"""What members hold, for a person to choose from: by name where its publisher gave one, and what can be had now."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from kvnet.errors import KvnetError, UsageError
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.shared_names import SharedName
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.format.manifest import Manifest
from kvnet.protocol.ids import PeerId, peer_text, short_peer_text
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.envelope import SignedManifest
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal
from kvnet.trust.statement_bodies import HeldEntry
from kvnet_node.calling import names_of, peer_names
from kvnet_node.namespace_files import MINE
from kvnet_node.operations import requests as r
from kvnet_node.operations.artifacts import model_names_here
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.swarms import removed_from, seen_s
from kvnet_node.services import Services
from kvnet_node.swarms import no_swarm

MAX_LOOKED_INTO = 64
"""Manifests asked of members for one list, of at most 8 KiB each."""
LOOK_S = 5.0
"""Seconds in which they answer, or the list does without."""


@dataclass(slots=True)
class Offer:
    """An artifact that members say they hold, and what is known of it."""

    namespace: Namespace
    keyed: bytes
    entry: HeldEntry
    holders: list[PeerId] = field(default_factory=list)
    names: list[SharedName] = field(default_factory=list)
    signed: SignedManifest | None = None
    manifest: Manifest | None = None
    artifact: ArtifactHash | None = None


async def list_offered(ctx: OperationContext, request: r.OfferedRequest) -> r.OfferedResult:
    """What members of this node's namespaces hold, by name where its publisher gave one.

    Raises:
        UsageError: no node runs, or there is no such swarm.
    """
    services = ctx.services
    if services.tables is None or services.node is None:
        raise UsageError(
            "expected a running node, which members tell what they hold, found none of this data directory",
            hint="kvnet node start, and then list from another terminal",
        )
    gone = removed_from(services)
    chosen = [each for each in _chosen(services, request.swarm) if each.name not in gone]
    offers = [offer for namespace in chosen for offer in _offers(services, namespace)]
    # Conversations of one's own machines have no names, and may be thousands.
    shown = [each for each in offers if each.names or each.namespace.name != MINE or request.all]
    await _look_into(services.node, sorted(shown, key=lambda each: not each.names)[:MAX_LOOKED_INTO])
    models = await model_names_here(services)
    records = await services.lane.run(services.store.artifacts)
    know_held(shown, records)
    held = {record.hash for record in records}
    whom = _Whom(services, services.node, await seen_s(services))
    entries = [each for offer in shown for each in _entries(services, offer, models, held, whom)]
    return r.OfferedResult(
        sorted(entries, key=lambda each: (each.swarm, not each.name, each.name, -each.tokens)),
        len(offers) - len(shown),
        gone,
    )


@dataclass(frozen=True, slots=True)
class _Whom:
    """Who can be asked now, and when the others could be last."""

    services: Services
    node: ExchangeNode
    seen_s: dict[bytes, float]

    def holder(self, peer: PeerId, namespace: Namespace, name: str) -> r.HolderEntry:
        guest = self.services.guest
        connected = any(
            each.peer == peer and any(slot.id == namespace.id for slot in each.slots) for each in self.node.sessions()
        )
        state = (guest.presences.of(peer).value if guest is not None else "serving") if connected else "away"
        return r.HolderEntry(name or short_peer_text(peer), peer_text(peer), state, self.seen_s.get(peer, 0.0))


def _chosen(services: Services, swarm: str) -> list[Namespace]:
    files = services.identity.swarms
    if not swarm:
        return [files.mine, *files.swarms()]
    namespace = files.named(swarm)
    if namespace is None:
        raise no_swarm(swarm)
    return [namespace]


def _offers(services: Services, namespace: Namespace) -> list[Offer]:
    """What members hold in a namespace, each artifact once."""
    assert services.tables is not None  # noqa: S101 - the caller has refused to go on without
    found: dict[bytes, Offer] = {}
    for peer, entry in services.tables.held(namespace):
        offer = found.setdefault(entry.artifact, Offer(namespace, entry.artifact, entry))
        if peer not in offer.holders:
            offer.holders.append(peer)
    for name in services.shared_names.known():
        offered = found.get(bytes(namespace.keyed_artifact(name.artifact))) if name.namespace == namespace else None
        if offered is not None:
            offered.names.append(name)
            offered.artifact = name.artifact
    return list(found.values())


async def _look_into(node: ExchangeNode, offers: list[Offer]) -> None:
    """Get the manifest of each from a member that holds it, as far as they answer in time."""
    limit = trio.CapacityLimiter(8)

    async def look(offer: Offer) -> None:
        async with limit:
            for session in node.sessions():
                if offer.signed is not None or session.peer not in offer.holders:
                    continue
                slot = session.slots.get(offer.namespace)
                if slot is None:
                    continue
                try:
                    signed = await node.fetcher.locator.signed_manifest(session, slot, offer.keyed)
                except KvnetError:
                    continue
                keyed = bytes(offer.namespace.keyed_artifact(signed.artifact_hash))
                if keyed == offer.keyed and signed.manifest.namespace == offer.namespace.id:
                    offer.signed, offer.artifact = signed, signed.artifact_hash

    with trio.move_on_after(LOOK_S):
        async with trio.open_nursery() as nursery:
            for offer in offers:
                nursery.start_soon(look, offer)


def know_held(offers: Iterable[Offer], records: Iterable[ArtifactRecord]) -> None:
    """Take from the store what is known of artifacts that are here too, and that no member has shown just now."""
    unknown = {(each.namespace.id, each.keyed): each for each in offers if each.signed is None}
    namespaces = {each.namespace.id: each.namespace for each in unknown.values()}
    for record in records:
        namespace = namespaces.get(record.manifest.namespace)
        if namespace is None:
            continue
        offer = unknown.get((namespace.id, bytes(namespace.keyed_artifact(record.hash))))
        if offer is not None:
            offer.manifest, offer.artifact = record.manifest, record.hash


def _entries(
    services: Services, offer: Offer, models: dict[bytes, str], held: set[ArtifactHash], whom: _Whom
) -> list[r.OfferedEntry]:
    """An entry for each name that counts; one without a name where none does."""
    manifest = offer.signed.manifest if offer.signed is not None else offer.manifest
    roster = services.memberships.rosters.roster(offer.namespace.id)
    members = roster.members if roster is not None else {}
    labels, machines = names_of(members.values()), peer_names(members.values())
    verdict = services.identity.policy().judge(manifest) if manifest is not None else None
    # A name counts from the key that signed the artifact alone.
    names = [each for each in offer.names if manifest is None or each.signer == manifest.publisher]

    def entry(name: SharedName | None) -> r.OfferedEntry:
        signer = name.signer if name is not None else manifest.publisher if manifest is not None else b""
        return r.OfferedEntry(
            name=name.name if name is not None else "",
            version=name.number if name is not None else 0,
            artifact=artifact_text(offer.artifact) if offer.artifact is not None else "",
            swarm=offer.namespace.name,
            tokens=offer.entry.n_tokens,
            bytes=offer.entry.size_bytes,
            codec=offer.entry.codec,
            model=models.get(manifest.fingerprint.hash, "") if manifest is not None else "",
            signer=publisher_text(signer) if signer else "",
            signed_by=labels.get(signer, "") if signer else "",
            holders=[whom.holder(peer, offer.namespace, machines.get(peer, "")) for peer in offer.holders],
            here=offer.artifact in held,
            refused=verdict.text if isinstance(verdict, Refusal) else "",
        )

    return [entry(name) for name in names] or [entry(None)]
