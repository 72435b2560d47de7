"""How neighbours are spoken of, and what to do about each."""

from typing import TYPE_CHECKING

from kvnet.errors import elsewhere
from kvnet.network.places import host_of
from kvnet.protocol.ids import short_peer_text

if TYPE_CHECKING:
    from kvnet.exchange.neighbours import Neighbour

JOIN_STEPS = f"kvnet invite --device here, then {elsewhere('kvnet join -')} there"
"""What makes two nodes share: the commands, and where."""


def neighbour_line(neighbour: "Neighbour") -> str:
    """A neighbour and the next step, in a line; "" while it is not known what it is."""
    who = f"neighbour {short_peer_text(neighbour.peer)} at {host_of(neighbour.addresses[0])}"
    match neighbour.state:
        case "member":
            return f"{who} shares a namespace with this node"
        case "stranger":
            return f"{who} shares no namespace with this node; to share: {JOIN_STEPS}"
        case "other version":
            return f"{who} speaks another version of the protocol: run the same kvnet on both"
        case "unreachable":
            return f"{who} does not answer; why: kvnet doctor --network"
        case "no session":
            return f"{who} opens no session; why: kvnet doctor --network"
    return ""
