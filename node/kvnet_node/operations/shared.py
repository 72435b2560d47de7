"""What members share by name: tell it, list it, and find what a name means."""

import difflib
from dataclasses import dataclass, field

import trio

from kvnet.errors import KvnetError, StoreError, TrustError, UnknownNameError, UsageError
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.shared_names import SharedName
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.format.manifest import Manifest
from kvnet.protocol.ids import PeerId, short_peer_text
from kvnet.store.names import NamedVersion
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
from kvnet_node.operations.reaching import reach
from kvnet_node.operations.targets import CLOSE_CUTOFF, MAX_CLOSE
from kvnet_node.services import Services
from kvnet_node.swarms import no_swarm

MAX_LOOKED_INTO = 64
"""Manifests asked of members for one list, of at most 8 KiB each."""
LOOK_S = 5.0
"""Seconds in which they answer, or the list does without."""
HEAR_S = 3.0
"""Seconds in which members that were just met tell what they call things."""
LOOK_AGAIN_S = 0.5


# --- telling --------------------------------------------------------------------------------------------------------


async def tell_name(ctx: OperationContext, version: NamedVersion, artifact: ArtifactHash, namespace: Namespace) -> None:
    """Tell the members of a namespace what an artifact of this node's is called there; without that it has no name."""
    try:
        await ctx.services.shared_names.say(version.name, version.version, artifact, namespace)
    except StoreError as error:
        ctx.warn(f"members are not told the name {version.name}: {error}")


async def tell_names(ctx: OperationContext, name: str | None = None) -> None:
    """Tell one's own machines what artifacts in ``mine`` are called; of each name the newest version.

    Args:
        ctx: of the operation.
        name: this one alone.
    """
    services = ctx.services
    key, mine = services.identity.signing_key().public, services.identity.swarms.mine
    for each in [name] if name is not None else await services.lane.run(services.names.names):
        version = await services.lane.run(services.names.newest, each)
        record = await services.lane.run(services.store.get, version.artifact) if version is not None else None
        if version is None or record is None:
            continue
        if (record.manifest.publisher, record.manifest.namespace) == (key, mine.id):
            await tell_name(ctx, version, version.artifact, mine)


# --- listing --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Offer:
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
    offers = [offer for namespace in _chosen(services, request.swarm) for offer in _offers(services, namespace)]
    # Conversations of one's own machines have no names, and may be thousands.
    shown = [each for each in offers if each.names or each.namespace.name != MINE or request.all]
    await _look_into(services.node, sorted(shown, key=lambda each: not each.names)[:MAX_LOOKED_INTO])
    models = await model_names_here(services)
    held = {record.hash for record in await services.lane.run(services.store.artifacts)}
    entries = [each for offer in shown for each in _entries(services, offer, models, held)]
    return r.OfferedResult(
        sorted(entries, key=lambda each: (each.swarm, not each.name, each.name, -each.tokens)), len(offers) - len(shown)
    )


def _chosen(services: Services, swarm: str) -> list[Namespace]:
    files = services.identity.swarms
    if not swarm:
        return [files.mine, *files.swarms()]
    namespace = files.named(swarm)
    if namespace is None:
        raise no_swarm(swarm)
    return [namespace]


def _offers(services: Services, namespace: Namespace) -> list[_Offer]:
    """What members hold in a namespace, each artifact once."""
    assert services.tables is not None  # noqa: S101 - the caller has refused to go on without
    found: dict[bytes, _Offer] = {}
    for peer, entry in services.tables.held(namespace):
        offer = found.setdefault(entry.artifact, _Offer(namespace, entry.artifact, entry))
        if peer not in offer.holders:
            offer.holders.append(peer)
    for name in services.shared_names.known():
        offered = found.get(bytes(namespace.keyed_artifact(name.artifact))) if name.namespace == namespace else None
        if offered is not None:
            offered.names.append(name)
            offered.artifact = name.artifact
    return list(found.values())


async def _look_into(node: ExchangeNode, offers: list[_Offer]) -> None:
    """Get the manifest of each from a member that holds it, as far as they answer in time."""
    limit = trio.CapacityLimiter(8)

    async def look(offer: _Offer) -> None:
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


def _entries(
    services: Services, offer: _Offer, models: dict[bytes, str], held: set[ArtifactHash]
) -> list[r.OfferedEntry]:
    """An entry for each name that counts; one without a name where none does."""
    manifest = offer.signed.manifest if offer.signed is not None else None
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
            holders=[machines.get(peer) or short_peer_text(peer) for peer in offer.holders],
            here=offer.artifact in held,
            refused=verdict.text if isinstance(verdict, Refusal) else "",
        )

    return [entry(name) for name in names] or [entry(None)]


# --- fetching by name -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meant:
    """What a name that members know stands for.

    Attributes:
        request: the same fetch, by artifact hash, and under a name of this node.
        signer: who calls it so, and must have signed it.
    """

    request: r.FetchRequest
    signer: bytes

    def require(self, publisher: bytes) -> None:
        """Raises TrustError when the artifact is not of the key that named it."""
        if publisher != self.signer:
            raise TrustError(
                f"expected an artifact signed by {publisher_text(self.signer)}, who calls it so, found one signed by "
                f"{publisher_text(publisher)}",
                hint="kvnet fetch with its hash takes it, if it is what you want",
            )


async def meant_by_name(ctx: OperationContext, node: ExchangeNode, request: r.FetchRequest) -> Meant:
    """What ``kvnet fetch NAME`` is to fetch.

    Raises:
        UnknownNameError: no member calls anything so.
        UsageError: several artifacts are called so, or the name means something else on this node.
    """
    services = ctx.services
    name, _, number = request.target.partition("@")
    found = await _heard(ctx, node, request, name, int(number) if number else None)
    if not found:
        known = sorted({each.name for each in services.shared_names.known()})
        close = difflib.get_close_matches(name, known, n=MAX_CLOSE, cutoff=CLOSE_CUTOFF)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownNameError(
            f"no member of a swarm of this node shares anything called {request.target}",
            hint=f"{hint}kvnet list --peers shows what members share; a hash or a ticket needs no name",
        )
    if len(found) > 1:
        listed = "\n".join(f"  {_candidate(services, each)}" for each in found)
        raise UsageError(
            f"expected one artifact called {request.target}, found {len(found)}:\n{listed}",
            hint="fetch one of them by its hash: kvnet fetch HASH --name NAME",
        )
    (one,) = found
    target = artifact_text(one.artifact)
    if request.name is not None:
        return Meant(r.FetchRequest(target, request.addresses, request.name), one.signer)
    newest = await services.lane.run(services.names.newest, name)
    if newest is not None and newest.artifact != one.artifact:
        raise UsageError(
            f"expected a name that is free here, found that {name} means something else on this machine",
            hint=f"kvnet fetch {request.target} --name {name} makes it the newest version of {name}, and keeps the one "
            f"that is here; kvnet fetch {request.target} --name OTHER calls it otherwise",
        )
    return Meant(r.FetchRequest(target, request.addresses, None if services.config.ram_only else name), one.signer)


async def _heard(
    ctx: OperationContext, node: ExchangeNode, request: r.FetchRequest, name: str, number: int | None
) -> list[SharedName]:
    """What members call so; those just met are given a moment to tell."""
    names = ctx.services.shared_names
    found = _others(ctx.services, names.called(name, number))
    if found and not request.addresses:
        return found
    await reach(ctx, node, request.addresses)
    with trio.move_on_after(HEAR_S):
        while True:
            told = names.next_told()
            if found := _others(ctx.services, names.called(name, number)):
                break
            # Who gave a name may be believed later than it is told.
            with trio.move_on_after(LOOK_AGAIN_S):
                await told.wait()
    return found


def _others(services: Services, found: list[SharedName]) -> list[SharedName]:
    """Others' names before this node's own, and of those what somebody holds, where that is known.

    What one's other machine has in ``mine`` comes before the same as it has shared it.
    """
    own = {key.public for key in services.identity.publisher_keys()}
    found = [each for each in found if each.signer not in own] or found
    tables = services.tables
    if tables is not None:
        offered = {entry.artifact for each in found for _, entry in tables.held(each.namespace)}
        found = [each for each in found if bytes(each.namespace.keyed_artifact(each.artifact)) in offered] or found
    in_mine = {each.signer for each in found if each.namespace.name == MINE}
    first: dict[tuple[bytes, int], SharedName] = {}
    for each in found:
        if each.signer not in in_mine or each.namespace.name == MINE:
            first.setdefault((each.signer, each.number), each)
    return list(first.values())


def _candidate(services: Services, name: SharedName) -> str:
    roster = services.memberships.rosters.roster(name.namespace.id)
    labels = names_of(roster.members.values()) if roster is not None else {}
    by = labels.get(name.signer) or publisher_text(name.signer)
    return f"{artifact_text(name.artifact)}  {name.name}@{name.number} of {by}, in {name.namespace.name}"
