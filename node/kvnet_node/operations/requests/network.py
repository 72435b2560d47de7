"""Why two nodes do not see each other: what is looked at, and what was found."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result
from kvnet_node.operations.requests.node import NeighbourEntry


class NetworkCheckRequest(Request, frozen=True):
    """Look at this node's network, and at the node behind one address.

    Attributes:
        peer: address of another node, /ip4/…/tcp/…/p2p/…; "" for none.
    """

    peer: str = ""


class Reach(msgspec.Struct, frozen=True):
    """What came of trying one address.

    Attributes:
        address: multiaddress text.
        outcome: ``member`` (a session with a common namespace), ``stranger`` (a session without one), ``version``,
            ``not_kvnet``, ``no_session``, ``other_peer``, ``no_handshake``, ``itself``; or how TCP ended: ``open``
            (nothing more was tried), ``refused``, ``timeout``, ``no_route``, ``no_name``, ``failed``.
        detail: what was found, in words.
        near: it is in a network this machine is in.
        gateway_answers: whether the router of this network answers, where that was looked at.
        agent: the other node's program and version.
        clock_skew_s: by how much its clock is ahead; None when it has not said.
        answered_by: who answers there in place of the peer named.
        seconds: until the outcome was clear.
    """

    address: str
    outcome: str
    detail: str = ""
    near: bool = False
    gateway_answers: bool | None = None
    agent: str = ""
    clock_skew_s: int | None = None
    answered_by: str = ""
    seconds: float = 0.0


class PeerClock(msgspec.Struct, frozen=True):
    """By how many seconds a connected peer's clock is ahead of this machine's."""

    peer: str
    skew_s: int


class NetworkCheckResult(Result, frozen=True, tag="network check"):
    """Everything that was looked at.

    Attributes:
        running: a node runs in this data directory.
        platform: as ``sys.platform``.
        addresses: where the node listens.
        own: its own addresses, tried from this machine.
        discovery: where neighbours are looked for, or why not.
        hears_itself: whether its own multicast came back; None when that is not known.
        neighbours: nodes on the local network.
        unreached: what came of trying neighbours once more that were heard and not reached.
        remembered: members met before.
        connected: peers.
        members: of these, how many share a namespace.
        clocks: of connected peers.
        firewall: ``on`` or ``off`` where the system tells, else "".
        asked: the address asked for.
    """

    running: bool
    platform: str
    addresses: list[str] = []
    own: list[Reach] = []
    discovery: str = ""
    hears_itself: bool | None = None
    neighbours: list[NeighbourEntry] = []
    unreached: list[Reach] = []
    remembered: int = 0
    connected: int = 0
    members: int = 0
    clocks: list[PeerClock] = []
    firewall: str = ""
    asked: Reach | None = None
