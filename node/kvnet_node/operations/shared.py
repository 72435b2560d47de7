"""What members share by name: tell it, and find what a name means."""

import difflib
from dataclasses import dataclass

import trio

from kvnet.errors import StoreError, TrustError, UnknownNameError, UsageError
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.shared_names import SharedName
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import Namespace
from kvnet_node.calling import names_of
from kvnet_node.namespace_files import MINE
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.reaching import JOIN_FIRST, knows_nobody, reach
from kvnet_node.operations.swarms import removed_from
from kvnet_node.operations.targets import CLOSE_CUTOFF, MAX_CLOSE
from kvnet_node.removed_text import removed_text
from kvnet_node.services import Services

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
    if not request.addresses and knows_nobody(services, node):
        raise UnknownNameError(
            f"expected somebody who may call something {request.target}, found this node in no swarm and not paired "
            "with another machine",
            hint=JOIN_FIRST,
        )
    name, _, number = request.target.partition("@")
    found = await _heard(ctx, node, request, name, int(number) if number else None)
    if not found:
        known = sorted({each.name for each in services.shared_names.known()})
        close = difflib.get_close_matches(name, known, n=MAX_CLOSE, cutoff=CLOSE_CUTOFF)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        if gone := removed_from(services):
            hint += f"{removed_text(gone)}; "
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
    if newest is not None and newest.artifact != one.artifact and not await _follows(services, newest, one):
        raise UsageError(
            f"expected a name that is free here, found that {name} means something else on this machine",
            hint=f"kvnet fetch {request.target} --name {name} makes it the newest version of {name}, and keeps the one "
            f"that is here; kvnet fetch {request.target} --name OTHER calls it otherwise",
        )
    return Meant(r.FetchRequest(target, request.addresses, None if services.config.ram_only else name), one.signer)


async def _follows(services: Services, newest: NamedVersion, found: SharedName) -> bool:
    """Whether what a name means here is an earlier version of what it was found to mean: the same key has signed it."""
    record = await services.lane.run(services.store.get, newest.artifact)
    return record is not None and record.manifest.publisher == found.signer


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
