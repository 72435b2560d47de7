"""Operations on swarms: invite, join, leave, and their members."""

import sys
from collections.abc import Collection, Mapping, Sequence

import msgspec
import trio

from kvnet.errors import PeerUnreachableError, UsageError, elsewhere
from kvnet.protocol.escaping import escape_text
from kvnet.protocol.ids import PeerId, peer_text
from kvnet.trust.invitation import invitation_text, parse_invitation_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import Namespace
from kvnet.trust.roster import Member, Roster
from kvnet.trust.statement_bodies import Invitation
from kvnet_node.calling import names_of
from kvnet_node.inviter import full_addresses
from kvnet_node.namespace_files import MINE
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.network import is_online, try_each
from kvnet_node.peer_store import PeerStore
from kvnet_node.services import Services
from kvnet_node.system_network import gateway_answers
from kvnet_node.unreached import unreached


async def invite(ctx: OperationContext, request: r.InviteRequest) -> r.InviteResult:
    """Make an invitation. Only a running node does: somebody has to be there to let the guest in."""
    services = ctx.services
    if not ctx.serving or services.node is None:
        raise UsageError(
            "expected a running node, which lets the guest in, found none of this data directory",
            hint="kvnet node start, and then invite from another terminal",
        )
    made = services.identity.swarms.named(request.swarm) is None
    signed = await services.memberships.invite(
        request.swarm,
        lifetime_s=request.lifetime_s,
        uses=request.uses,
        guest_label=request.label,
        own_label=request.own_label,
        peer=services.node.peer_id,
        addresses=services.addresses(),
    )
    body = signed.body
    assert isinstance(body, Invitation)  # noqa: S101 - what was made
    return r.InviteResult(
        invitation_text(signed),
        body.swarm,
        body.role,
        body.expires,
        body.uses,
        list(full_addresses(body)),
        made,
    )


async def join(ctx: OperationContext, request: r.JoinRequest) -> r.JoinResult:
    """Enrol with an invitation."""
    services = ctx.services
    signed, invitation = parse_invitation_text(request.invitation)
    assert services.node is not None  # noqa: S101 - the operation has a network
    try:
        joined = await services.memberships.join(
            services.node,
            signed,
            invitation,
            name=request.name,
            label=request.label,
            keep_old=request.keep_old,
            count=services.store.count,
        )
    except PeerUnreachableError as error:
        raise await _why_unreached(error, full_addresses(invitation)) from error
    own = {key.public for key in services.identity.publisher_keys()}
    if not joined.changed and signed.signer in own:
        raise UsageError(
            "expected an invitation by another machine, found one by this machine",
            hint=f"paste it on the machine that is to join: {elsewhere('kvnet join -')}",
        )
    names = names_of(joined.roster.members.values())
    return r.JoinResult(
        swarm=joined.namespace.name,
        namespace=joined.namespace.id.hex(),
        role=joined.role,
        inviter=publisher_text(joined.inviter) if joined.inviter else "",
        inviter_label=names.get(joined.inviter, ""),
        members=[names[each] for each in joined.roster.members if each not in own],
        kept=joined.kept.hex() if joined.kept is not None else "",
        changed=joined.changed,
        running=ctx.serving,
    )


async def _why_unreached(error: PeerUnreachableError, addresses: Sequence[str]) -> PeerUnreachableError:
    """What trying the inviter's addresses once more came to; the error as it was when one of them answers."""
    reaches = await try_each(addresses)
    if not reaches or any(each.outcome == "open" for each in reaches):
        return error
    if any(each.outcome == "no_route" and each.near for each in reaches):
        answers = await trio.to_thread.run_sync(gateway_answers)
        reaches = [msgspec.structs.replace(each, gateway_answers=answers) for each in reaches]
    return unreached(reaches, online=is_online(), platform=sys.platform)


async def leave(ctx: OperationContext, request: r.LeaveRequest) -> r.LeaveResult:
    """Forget a swarm; what is held of it is kept from eviction no longer."""
    services = ctx.services
    swarm = services.identity.swarms.leavable(request.swarm)
    held = [
        record for record in await services.lane.run(services.store.artifacts) if record.manifest.namespace == swarm.id
    ]
    roster = services.memberships.rosters.roster(swarm.id)
    own = {key.public for key in services.identity.publisher_keys()}
    founder = roster.founder if roster is not None and roster.founder not in own else b""
    result = r.LeaveResult(
        swarm.name,
        len(held),
        _own_role(services, roster),
        len(_others(services, roster, frozenset(), away=True)) if roster is not None else 0,
        names_of(roster.members.values())[founder] if roster is not None and founder else "",
    )
    if request.dry_run:
        return result
    await services.memberships.leave(swarm.name)
    for record in held:
        if record.pinned:
            await services.lane.run(services.store.unpin, record.hash)
    return result


async def list_swarms(ctx: OperationContext, request: r.SwarmRequest) -> r.SwarmListResult:  # noqa: ARG001
    """``mine`` and every swarm of this node."""
    services = ctx.services
    files = services.identity.swarms
    entries = []
    for namespace in (files.mine, *files.swarms()):
        roster = services.memberships.rosters.roster(namespace.id)
        count = await services.lane.run(services.store.count, namespace.id)
        entries.append(
            r.SwarmEntry(
                namespace.name,
                namespace.id.hex(),
                _own_role(services, roster),
                len(roster.members) if roster is not None else 1,
                count,
                services.identity.invitations.count(namespace.id),
            )
        )
    return r.SwarmListResult(entries)


def removed_from(services: Services) -> list[str]:
    """The names of the swarms that this machine was a member of and is in no longer; it may be ``mine``."""
    files, rosters = services.identity.swarms, services.memberships.rosters
    known = [(each.name, rosters.roster(each.id)) for each in (files.mine, *files.swarms())]
    return [name for name, roster in known if _own_role(services, roster) == "removed"]


def _own_role(services: Services, roster: Roster | None) -> str:
    if roster is None:
        return "alone"
    own = {key.public for key in services.identity.publisher_keys()}
    roles = [member.role for publisher, member in roster.members.items() if publisher in own]
    return roles[0] if roles else "removed"


async def members(ctx: OperationContext, request: r.SwarmRequest) -> r.SwarmMembersResult:
    """Who is in a namespace."""
    services = ctx.services
    namespace, roster = services.memberships.roster_of(request.swarm or MINE)
    seen = await seen_s(services)
    here = connected(services, namespace)
    own = {key.public for key in services.identity.publisher_keys()}
    names = names_of(roster.members.values())
    entries = [
        r.MemberEntry(
            label=escape_text(each.label),
            name=names[each.publisher] if each.label else "",
            publisher=publisher_text(each.publisher),
            role=each.role,
            invited_by=names.get(each.invited_by, ""),
            seen=max((seen.get(peer, 0.0) for peer in each.peers), default=0.0),
            connected=not here.isdisjoint(each.peers),
            own=each.publisher in own,
            peers=[peer_text(PeerId(peer)) for peer in each.peers],
        )
        for each in roster.members.values()
    ]
    return r.SwarmMembersResult(namespace.name, entries)


async def seen_s(services: Services) -> dict[bytes, float]:
    """When members were last connected, in seconds since 1970, by raw peer id."""
    seen = await services.lane.run(PeerStore(services.paths.peers_file).load)
    return {bytes(each.peer): each.seen_s for each in seen}


async def remove(ctx: OperationContext, request: r.SwarmRemoveRequest) -> r.SwarmRemoveResult:
    """Remove a member; what it proves from now on opens nothing."""
    services = ctx.services
    swarm, before = services.memberships.roster_of(request.swarm or MINE)
    # Whoever is awake follows within a moment, and its session ends with that.
    here = connected(services, swarm)
    if request.dry_run:
        return _would_remove(services, request, before, here)
    namespace, gone = await services.memberships.remove(swarm.name, request.member, guests=request.guests)
    _, roster = services.memberships.roster_of(namespace.name)
    return r.SwarmRemoveResult(
        namespace.name,
        [publisher_text(each.publisher) for each in gone],
        names_of(before.members.values()).get(gone[0].publisher, ""),
        len(roster.members),
        asleep(services, roster, here),
        let_in(before, {each.publisher for each in gone}, roster),
    )


def _would_remove(
    services: Services, request: r.SwarmRemoveRequest, before: Roster, here: frozenset[bytes]
) -> r.SwarmRemoveResult:
    namespace, gone, guests = services.memberships.who_goes(
        request.swarm or MINE, request.member, guests=request.guests
    )
    leaving = {*(each.publisher for each in gone), *guests}
    return r.SwarmRemoveResult(
        namespace.name,
        [publisher_text(each) for each in sorted(leaving)],
        names_of(before.members.values()).get(gone[0].publisher, ""),
        len(before.members) - len(leaving),
        asleep(services, before, here),
        [] if request.guests else let_in(before, leaving, before),
    )


def let_in(before: Roster, gone: Collection[bytes], now: Roster) -> list[str]:
    """Label and publisher text of those whom somebody removed had let in, and who are members still.

    Args:
        before: the members when they were in.
        gone: publisher ids of who is out.
        now: the members now.
    """
    still = [now.members[each] for each in before.guests_of(gone) if each in now.members]
    return sorted(f"{escape_text(each.label)} {publisher_text(each.publisher)}".strip() for each in still)


def asleep(services: Services, roster: Roster, here: frozenset[bytes]) -> list[str]:
    """What the members are called that are not connected; this node is not among them."""
    return _others(services, roster, here, away=True)


def awake(services: Services, roster: Roster, here: frozenset[bytes]) -> list[str]:
    """What the members are called that are connected; this node is not among them."""
    return _others(services, roster, here, away=False)


def members_away(services: Services, seen: Mapping[bytes, float]) -> list[r.AwayMember]:
    """The members that are not connected, each machine once, but of swarms that this machine was removed from.

    Args:
        services: of this node.
        seen: when members were last connected, in seconds since 1970, by raw peer id.
    """
    files, gone = services.identity.swarms, removed_from(services)
    own = {key.public for key in services.identity.publisher_keys()}
    members: dict[bytes, Member] = {}
    here: set[bytes] = set()
    for namespace in (files.mine, *files.swarms()):
        roster = services.memberships.rosters.roster(namespace.id)
        if roster is not None and namespace.name not in gone:
            members |= {each.publisher: each for each in roster.members.values()}
            here |= connected(services, namespace)
    names = names_of(members.values())
    found: dict[str, float] = {}
    for each in members.values():
        if each.publisher not in own and here.isdisjoint(each.peers):
            last_s = max((seen.get(peer, 0.0) for peer in each.peers), default=0.0)
            # Keys of one machine are called the same.
            found[names[each.publisher]] = max(last_s, found.get(names[each.publisher], 0.0))
    return [r.AwayMember(name, last_s) for name, last_s in found.items()]


def _others(services: Services, roster: Roster, here: frozenset[bytes], *, away: bool) -> list[str]:
    own = {key.public for key in services.identity.publisher_keys()}
    names = names_of(roster.members.values())
    found = [
        names[each.publisher]
        for each in roster.members.values()
        if each.publisher not in own and here.isdisjoint(each.peers) is away
    ]
    # Keys of one machine are called the same.
    return list(dict.fromkeys(found))


def connected(services: Services, namespace: Namespace) -> frozenset[bytes]:
    """Raw peer ids of everybody who was connected in a namespace just now, whatever lookup secret it proved."""
    sessions = services.node.sessions() if services.node is not None else ()
    return frozenset(bytes(each.peer) for each in sessions if any(proved.id == namespace.id for proved in each.slots))
