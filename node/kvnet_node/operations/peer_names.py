"""What members' machines are called, where a peer is shown to a person."""

from kvnet.protocol.ids import PeerId
from kvnet_node.calling import peer_names
from kvnet_node.services import Services


def known_peer_names(services: Services) -> dict[PeerId, str]:
    """What each machine is called that is a member of a namespace of this node; escaped, by peer id."""
    files, rosters = services.identity.swarms, services.memberships.rosters
    known = [roster for each in files.all() if (roster := rosters.roster(each.id)) is not None]
    return peer_names(member for roster in known for member in roster.members.values())
