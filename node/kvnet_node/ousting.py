"""Taking a revoked key out of the namespaces it is a member of: whoever revokes a stolen machine's key wants it out.

A revoked key is believed no more, and would prove the namespaces' secrets all the same: only a new secret keeps it out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvnet.errors import KvnetError, elsewhere
from kvnet.protocol.escaping import escape_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import Namespace
from kvnet.trust.roster import Roster
from kvnet_node.identity import NodeIdentity
from kvnet_node.membership import Memberships
from kvnet_node.namespace_files import MINE

AGREE: Final = f"{elsewhere('kvnet namespace import')} of a new one on each of your machines, and invite them again"


@dataclass(frozen=True, slots=True)
class Seat:
    """A namespace that somebody is a member of.

    Attributes:
        namespace: which.
        why_not: why this node cannot take them out, and what helps; empty when it can.
    """

    namespace: Namespace
    why_not: str = ""


def seats_of(identity: NodeIdentity, memberships: Memberships, publisher: bytes) -> list[Seat]:
    """Where a publisher is a member, among the namespaces of this node."""
    files, found = identity.swarms, list[Seat]()
    for namespace in (files.mine, *files.swarms()):
        roster = memberships.rosters.roster(namespace.id)
        if roster is not None and publisher in roster.members:
            found.append(Seat(namespace, _why_not(memberships, namespace, roster, publisher)))
    return found


def _why_not(memberships: Memberships, namespace: Namespace, roster: Roster, publisher: bytes) -> str:
    name, own = namespace.name, memberships.rosters.own_key(roster)
    if publisher == roster.founder:
        return f"{name}: it founded it, and a founder cannot be removed; " + (
            AGREE if name == MINE else "make a new swarm, and invite everybody else"
        )
    if own is None:
        return f"{name}: this machine is no member of it any more"
    if name != MINE and own.public != roster.founder:
        founder = escape_text(roster.members[roster.founder].label) or publisher_text(roster.founder)
        command = elsewhere(f"kvnet swarm remove {publisher_text(publisher)} --swarm {name}")
        return f"{name}: its founder, {founder}, alone can remove it: {command}"
    return ""


async def take_out(
    identity: NodeIdentity,
    memberships: Memberships,
    publisher: bytes,
    *,
    guests: bool = False,
    gone: Callable[[Namespace], None] = lambda _: None,
) -> list[Seat]:
    """Remove a publisher, with all keys of its machine, wherever this node may.

    An old key of this node goes alone.

    Args:
        identity: of this node.
        memberships: of this node.
        publisher: publisher id.
        guests: whom its machine has let in goes as well.
        gone: told of each namespace that it was removed from.

    Returns:
        Where it is a member still, and why.
    """
    left: list[Seat] = []
    for seat in seats_of(identity, memberships, publisher):
        if seat.why_not:
            left.append(seat)
            continue
        try:
            if any(key.public == publisher for key in identity.publisher_keys()):
                await memberships.rekeyer.remove(seat.namespace.id, [publisher])
            else:
                await memberships.remove(seat.namespace.name, publisher_text(publisher), guests=guests)
        except KvnetError as error:
            left.append(Seat(seat.namespace, f"{seat.namespace.name}: {error.message} ({error.hint})"))
        else:
            gone(seat.namespace)
    return left
