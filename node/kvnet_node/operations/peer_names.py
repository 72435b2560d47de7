"""What members' machines and signers are called, where they are shown to a person."""

from collections.abc import Iterator

from kvnet.protocol.ids import PeerId
from kvnet.trust.keys import parse_publisher_text
from kvnet.trust.roster import Member
from kvnet_node.calling import Names, peer_names, signer_names
from kvnet_node.services import Services


def known_peer_names(services: Services) -> dict[PeerId, str]:
    """What each machine is called that is a member of a namespace of this node; escaped, by peer id."""
    return peer_names(_members(services))


def known_names(services: Services) -> Names:
    """The same, and what signers are called: members, and the trusted publishers that were given a label here."""
    identity = services.identity
    trusted = [Member(parse_publisher_text(each.publisher), "trusted", each.label) for each in identity.trusted()]
    own = [key.public for key in identity.publisher_keys()]
    return Names(known_peer_names(services), signer_names([*_members(services), *trusted], own))


def _members(services: Services) -> Iterator[Member]:
    files, rosters = services.identity.swarms, services.memberships.rosters
    for namespace in files.all():
        if (roster := rosters.roster(namespace.id)) is not None:
            yield from roster.members.values()
