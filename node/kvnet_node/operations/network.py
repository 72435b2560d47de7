"""Look at the network of this node: what `kvnet_node.network_findings` judges."""

import errno
import ipaddress
import sys
from collections.abc import Sequence

import trio

from kvnet.errors import PeerUnreachableError
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.session import PeerSession
from kvnet.network.places import host_of, port_of
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import NeighbourEntry, NetworkCheckRequest, NetworkCheckResult, PeerClock, Reach
from kvnet_node.services import Services
from kvnet_node.session_reasons import explain_no_session
from kvnet_node.system_network import firewall_state, gateway_answers

TCP_LIMIT_S = 4.0
CONNECT_LIMIT_S = 8.0
MAX_TRIED = 8
"""Addresses of one node that are tried."""

_OUTCOME_OF = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no_route",
    errno.ENETUNREACH: "no_route",
    errno.EADDRNOTAVAIL: "no_route",
    errno.EHOSTDOWN: "no_route",
    errno.ETIMEDOUT: "timeout",
}


async def check(context: OperationContext, request: NetworkCheckRequest) -> NetworkCheckResult:
    """Try this node's own addresses and the one asked for, and tell what is known of neighbours and peers.

    Raises:
        UsageError: the address asked for is none.
    """
    services = context.services
    around, node = services.surroundings, services.node
    neighbours = neighbour_entries(services)
    asked = await _ask(node, request.peer) if request.peer and node is not None else None
    known = node.peers() if node is not None and context.serving else []
    skews = {each.info.peer: node.clock_skew_s(each.info.peer) for each in known} if node is not None else {}
    return NetworkCheckResult(
        running=context.serving,
        platform=sys.platform,
        addresses=services.addresses() if context.serving else [],
        own=await _own(services.addresses()) if context.serving else [],
        discovery=around.discovery if around is not None else "",
        hears_itself=around.hears_itself if around is not None else None,
        neighbours=neighbours,
        unreached=await try_each([each.addresses[0] for each in neighbours if each.state == "unreachable"]),
        remembered=around.remembered() if around is not None else 0,
        connected=len(known),
        members=sum(each.member for each in known),
        clocks=[PeerClock(peer_text(peer), skew) for peer, skew in skews.items() if skew is not None],
        firewall=await trio.to_thread.run_sync(firewall_state),
        asked=asked,
    )


def neighbour_entries(services: Services) -> list[NeighbourEntry]:
    """Nodes on the local network, and how it stands with them."""
    found = services.surroundings.neighbours() if services.surroundings is not None else []
    return [NeighbourEntry(peer_text(each.peer), list(each.addresses), each.state, each.reason) for each in found]


async def _own(addresses: list[str]) -> list[Reach]:
    """This node's addresses beyond loopback, dialled from this machine."""
    return await try_each([text for text in addresses if not ipaddress.ip_address(host_of(text)).is_loopback])


async def try_each(addresses: Sequence[str]) -> list[Reach]:
    """Open TCP connections to multiaddresses, `MAX_TRIED` of them, side by side."""
    found: dict[str, Reach] = {}

    async def dial(address: str) -> None:
        found[address] = await try_tcp(address)

    wanted = addresses[:MAX_TRIED]
    async with trio.open_nursery() as nursery:
        for address in wanted:
            nursery.start_soon(dial, address)
    return [found[address] for address in wanted]


def is_online() -> bool:
    """Whether this machine has an address that others could know."""
    from kvnet.network.lan.interfaces import list_interfaces

    return any(not each.ip.is_loopback and not each.ip.is_link_local for each in list_interfaces())


async def try_tcp(address: str) -> Reach:
    """Open a TCP connection to a multiaddress and close it."""
    began_s = trio.current_time()
    host, port = host_of(address), port_of(address)
    outcome, detail = "timeout", f"no answer within {TCP_LIMIT_S:g} s"
    with trio.move_on_after(TCP_LIMIT_S):
        try:
            (kind, _, _, _, where), *_ = await trio.socket.getaddrinfo(
                host, int(port), family=trio.socket.AF_INET6 if ":" in host else 0, type=trio.socket.SOCK_STREAM
            )
        except OSError as error:
            return Reach(address, "no_name", error.strerror or str(error))
        with trio.socket.socket(kind, trio.socket.SOCK_STREAM) as sock:
            try:
                await sock.connect(where)
                outcome, detail = "open", ""
            except OSError as error:
                outcome, detail = _OUTCOME_OF.get(error.errno or 0, "failed"), error.strerror or str(error)
    return Reach(address, outcome, detail, near=_is_near(host), seconds=trio.current_time() - began_s)


def _is_near(host: str) -> bool:
    """Whether a host is in a network this machine is in."""
    from kvnet.network.lan.interfaces import list_interfaces

    try:
        bare = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(bare in each.address.network for each in list_interfaces())


async def _ask(node: ExchangeNode, address: str) -> Reach:
    """Try another node's address, as far as it goes: TCP, the handshake, the session, a common namespace.

    Raises:
        UsageError: it is no address of a peer.
    """
    from kvnet.network.libp2p.addresses import parse_peer_address

    parse_peer_address(address)
    peer = parse_peer_text(address.rpartition("/p2p/")[2])
    if peer == node.network.peer_id:
        return Reach(address, "itself")
    tcp = await try_tcp(address)
    if tcp.outcome != "open":
        answers = await trio.to_thread.run_sync(gateway_answers) if tcp.outcome == "no_route" and tcp.near else None
        return Reach(address, tcp.outcome, tcp.detail, near=tcp.near, gateway_answers=answers, seconds=tcp.seconds)
    began_s = trio.current_time()
    outcome, detail, answered_by, session = await _talk(node, address, peer)
    return Reach(
        address,
        outcome,
        detail,
        near=tcp.near,
        agent=session.opened.agent if session is not None else "",
        clock_skew_s=node.clock_skew_s(peer),
        answered_by=answered_by,
        seconds=trio.current_time() - began_s,
    )


async def _talk(node: ExchangeNode, address: str, peer: PeerId) -> tuple[str, str, str, PeerSession | None]:
    """Outcome, detail, who answered instead, and the session."""
    try:
        session = await node.connect(address, timeout_s=CONNECT_LIMIT_S)
    except PeerUnreachableError as error:
        if error.answered_by is not None:
            return "other_peer", str(error), peer_text(PeerId(error.answered_by)), None
        return "no_handshake", str(error), "", None
    if session is not None:
        return ("member" if session.slots else "stranger"), "", "", session
    return (*explain_no_session(node.session_error(peer)), "", None)
