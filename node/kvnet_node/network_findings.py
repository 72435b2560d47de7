"""Why two nodes do not see each other: what was measured, judged. Pure; every finding has its next step."""

from collections.abc import Callable, Iterator

from kvnet.errors import elsewhere
from kvnet.network.places import LOOPBACK, host_of, port_of
from kvnet.protocol.clock import TOLERABLE_SKEW_S
from kvnet.protocol.ids import parse_peer_text, short_peer_text
from kvnet_node.findings import Finding
from kvnet_node.neighbours_text import JOIN_STEPS
from kvnet_node.operations.requests import NeighbourEntry, NetworkCheckResult, Reach
from kvnet_node.output import format_counted, format_seconds

PRIVACY_PATH = "System Settings > Privacy & Security > Local Network"
ALLOW_HERE = f"{PRIVACY_PATH}: allow the terminal that runs kvnet, then start it again"
LET_IN = "let TCP 5864 and 5865 in (on macOS: System Settings > Network > Firewall > Options: allow python)"
DROPPED = "a firewall drops it, there or here on its way out, or that machine has fallen asleep since"
STATUS_THERE = elsewhere("kvnet node status")
TRY_THERE = f"kvnet doctor --network --peer ADDRESS, with an address the {STATUS_THERE} of one of them shows"
USE_SHOWN = f"use an address that {STATUS_THERE} shows on the other machine"


def judge(found: NetworkCheckResult) -> list[Finding]:
    """What keeps this node from seeing others, in the order in which to mend it."""
    return [
        *_node(found),
        *_port(found),
        *_discovery(found),
        *_neighbours(found),
        *_peers(found),
        *_clocks(found),
        *(_asked(found, found.asked) if found.asked is not None else ()),
    ]


def privacy_blocks(platform: str, reach: Reach) -> bool:
    """Whether macOS keeps this program off the local network.

    It then answers "no route to host" for a neighbour at once, although the network works: its router answers others.
    """
    return platform == "darwin" and reach.outcome == "no_route" and reach.near and reach.gateway_answers is True


def _on_loopback_alone(found: NetworkCheckResult) -> bool:
    return all(host_of(address).startswith(LOOPBACK) for address in found.addresses)


def _node(found: NetworkCheckResult) -> Iterator[Finding]:
    if not found.running:
        yield Finding("node", "problem", "none is running here, so nobody can reach it", "kvnet node start")
    elif _on_loopback_alone(found):
        yield Finding(
            "node",
            "problem",
            "it listens on this machine alone",
            "kvnet node start without --listen listens on all networks; see network.listen in kvnet config show",
        )
    else:
        yield Finding("node", "ok", f"listens on {', '.join(found.addresses)}")


def _port(found: NetworkCheckResult) -> Iterator[Finding]:
    closed = [reach for reach in found.own if reach.outcome != "open"]
    for reach in closed:
        yield Finding(
            "port",
            "problem",
            f"this machine's own address {_place(reach.address)} does not answer it: {reach.detail}",
            "a firewall on this machine may drop it: let TCP 5864 and 5865 in, then kvnet doctor --network again",
        )
    if found.own and not closed:
        yield Finding("port", "ok", "this machine's own addresses answer; only another machine can tell of firewalls")
    if found.firewall == "on":
        yield Finding(
            "firewall",
            "note",
            "the application firewall is on and may keep others out",
            "System Settings > Network > Firewall > Options: allow incoming connections for python",
        )


def _discovery(found: NetworkCheckResult) -> Iterator[Finding]:
    if not found.running:
        return
    if not found.discovery.startswith("on "):
        state = "problem" if found.discovery.startswith("failed") else "note"
        hint = "lan.discovery = true in config.toml turns it on; until then: kvnet node start --bootstrap ADDRESS"
        if "listens on no address" in found.discovery:
            hint = (
                "kvnet node start without --listen listens on all networks"
                if _on_loopback_alone(found)
                else "neighbours are looked for in private networks alone; others: kvnet node start --bootstrap ADDRESS"
            )
        elif state == "problem":
            hint = "another program may hold UDP 5353 for itself; until then: kvnet node start --bootstrap ADDRESS"
        yield Finding("discovery", state, found.discovery, hint)
    elif found.hears_itself is False:
        yield Finding(
            "discovery",
            "problem",
            f"{found.discovery}, and not even its own multicast comes back",
            "let UDP 5353 (mDNS) in and out in this machine's firewall; on macOS allow python under " + PRIVACY_PATH,
        )
    else:
        yield Finding("discovery", "ok", found.discovery)


def _neighbours(found: NetworkCheckResult) -> Iterator[Finding]:
    if not found.running or not found.discovery.startswith("on "):
        return
    if not found.neighbours:
        yield Finding(
            "neighbours",
            "note",
            "nobody else is heard on this network",
            f"run {elsewhere('kvnet node start')} on the other machine, on the same network (guest networks keep "
            "machines apart); or name it: kvnet doctor --network --peer ADDRESS, with an address its "
            f"{STATUS_THERE} shows",
        )
    tried = {reach.address: reach for reach in found.unreached}
    for neighbour in found.neighbours:
        reach = tried.get(neighbour.addresses[0])
        yield _neighbour(neighbour) if reach is None else _unreached(neighbour, reach, found.platform)


def _unreached(neighbour: NeighbourEntry, reach: Reach, platform: str) -> Finding:
    """A neighbour that was heard, so that it is near and was awake lately, and was not reached."""
    who, port = _who(neighbour), port_of(reach.address)
    if privacy_blocks(platform, reach) or (platform == "darwin" and reach.outcome == "no_route"):
        text = f"{who} is heard, and macOS keeps this program from it (Local Network Privacy)"
        return Finding("neighbour", "problem", text, ALLOW_HERE)
    match reach.outcome:
        case "timeout":
            text = f"{who} was heard, and TCP {port} gives no answer: {DROPPED}"
            return Finding("neighbour", "problem", text, f"is that machine awake? Then {LET_IN} on it")
        case "refused":
            text = f"{who} is heard, and nothing listens on TCP {port} there: its node has just ended, or restarts"
            return Finding("neighbour", "problem", text, f"{elsewhere('kvnet node start')} there")
        case "open":
            text = f"{who} was not reached before and takes connections now"
            return Finding("neighbour", "note", text, f"kvnet doctor --network --peer {reach.address} tries it whole")
    text = f"{who} is heard and not reached: {reach.detail}"
    return Finding("neighbour", "problem", text, f"kvnet doctor --network --peer {reach.address} tries it whole")


def _who(neighbour: NeighbourEntry) -> str:
    return f"{short_peer_text(parse_peer_text(neighbour.peer))} at {host_of(neighbour.addresses[0])}"


def _neighbour(neighbour: NeighbourEntry) -> Finding:
    who = _who(neighbour)
    match neighbour.state:
        case "member":
            return Finding("neighbour", "ok", f"{who} shares a namespace with this node")
        case "stranger":
            return Finding("neighbour", "note", f"{who} shares no namespace with this node", JOIN_STEPS)
        case "other version":
            said = f": {neighbour.reason}" if neighbour.reason else ""
            text = f"{who} speaks another version of the protocol{said}"
            return Finding("neighbour", "problem", text, "run the same kvnet on both")
        case "no session":
            text = f"{who} is reached and opens no session: {neighbour.reason}"
            return Finding("neighbour", "problem", text, "compare kvnet --version on both; its node.log says more")
        case "unreachable":
            hint = f"kvnet doctor --network --peer {neighbour.addresses[0]}"
            return Finding("neighbour", "problem", f"{who} is heard and does not answer: {neighbour.reason}", hint)
    return Finding("neighbour", "ok", f"{who} is heard; a session is not open yet")


def _peers(found: NetworkCheckResult) -> Iterator[Finding]:
    if not found.running:
        return
    text = _connected(found)
    if found.members:
        yield Finding("peers", "ok", text)
    elif found.remembered:
        met = f"{format_counted(found.remembered, 'member')} met before, none of them connected"
        yield Finding("peers", "note", f"{text}; {met}", TRY_THERE)
    elif not found.neighbours or any(each.state in {"stranger", "found"} for each in found.neighbours):
        yield Finding("peers", "note", text, f"to share: {JOIN_STEPS}")
    else:
        yield Finding("peers", "note", text)


def _connected(found: NetworkCheckResult) -> str:
    text = f"{format_counted(found.connected, 'peer')} connected"
    if not found.connected:
        return text
    if found.connected == 1:
        return f"{text}, which shares {'a' if found.members else 'no'} namespace"
    return f"{text}, {found.members} of them {'shares' if found.members == 1 else 'share'} a namespace"


def _clocks(found: NetworkCheckResult) -> Iterator[Finding]:
    for clock in found.clocks:
        if abs(clock.skew_s) > TOLERABLE_SKEW_S:
            yield _skewed(short_peer_text(parse_peer_text(clock.peer)), clock.skew_s)


def _skewed(who: str, skew_s: int) -> Finding:
    way = "ahead of" if skew_s > 0 else "behind"
    return Finding(
        "clock",
        "problem",
        f"the clock of {who} is {format_seconds(abs(skew_s))} {way} this machine's; what one signs is expired or not "
        "yet valid there",
        "compare the time on both; let both set it by themselves (macOS: System Settings > General > Date & Time)",
    )


def _asked(found: NetworkCheckResult, reach: Reach) -> Iterator[Finding]:
    if privacy_blocks(found.platform, reach):
        yield Finding(
            "peer",
            "problem",
            f"macOS keeps this program off the local network (Local Network Privacy): {_place(reach.address)} has no "
            "route, and the router answers",
            ALLOW_HERE,
        )
        return
    heard = {neighbour.peer for neighbour in found.neighbours}
    if reach.outcome == "timeout" and _peer(reach.address) in heard:
        text = (
            f"{_place(reach.address)} gives no answer, and that machine is heard, so it is awake: a firewall drops it"
        )
        yield Finding("peer", "problem", text, f"{LET_IN} on that machine; see also what it may send here")
        return
    yield _OUTCOMES[reach.outcome](reach)
    if reach.clock_skew_s is not None and abs(reach.clock_skew_s) > TOLERABLE_SKEW_S:
        yield _skewed("that node", reach.clock_skew_s)
    reached = reach.outcome in {"member", "stranger"}
    if reached and found.discovery.startswith("on ") and reach.near and _peer(reach.address) not in heard:
        yield Finding(
            "multicast",
            "note",
            "that node answers at its address, and its multicast does not arrive",
            "the network keeps multicast back (client isolation, a switch with IGMP snooping); use the address: "
            f"kvnet node start --bootstrap {reach.address}",
        )


def _place(address: str) -> str:
    """Host and port of a multiaddress."""
    return f"{host_of(address)} port {port_of(address)}"


def _peer(address: str) -> str:
    return address.rpartition("/p2p/")[2]


def _member(reach: Reach) -> Finding:
    return Finding(
        "peer", "ok", f"{_place(reach.address)} answers ({reach.agent}) and shares a namespace with this node"
    )


def _stranger(reach: Reach) -> Finding:
    text = f"{_place(reach.address)} answers ({reach.agent}) and is in no namespace that this node is in"
    return Finding("peer", "problem", text, JOIN_STEPS)


def _version(reach: Reach) -> Finding:
    return Finding("peer", "problem", f"{_place(reach.address)}: {reach.detail}", "run the same kvnet on both machines")


def _not_kvnet(reach: Reach) -> Finding:
    text = f"{_place(reach.address)} is a libp2p node and speaks no kvnet"
    return Finding("peer", "problem", text, USE_SHOWN)


def _no_session(reach: Reach) -> Finding:
    return Finding(
        "peer",
        "problem",
        f"{_place(reach.address)} is reached and opens no session: {reach.detail}",
        "it may run another version: compare kvnet --version on both; its node.log says more",
    )


def _other_peer(reach: Reach) -> Finding:
    prefix = reach.address.rpartition("/p2p/")[0]
    hint = f"use the address that its {STATUS_THERE} shows now"
    if reach.answered_by:
        hint = f"if that is the node you mean: kvnet doctor --network --peer {prefix}/p2p/{reach.answered_by}"
    return Finding("peer", "problem", f"another node answers at {_place(reach.address)} than the one named", hint)


def _no_handshake(reach: Reach) -> Finding:
    text = f"{_place(reach.address)} is open, and what answers is no node: {reach.detail}"
    return Finding("peer", "problem", text, USE_SHOWN)


def _itself(reach: Reach) -> Finding:
    return Finding(
        "peer", "problem", f"expected another node's address, found this node's own: {reach.address}", USE_SHOWN
    )


def _open(reach: Reach) -> Finding:
    return Finding("peer", "note", f"{_place(reach.address)} is open; nothing more was tried")


def _refused(reach: Reach) -> Finding:
    return Finding(
        "peer",
        "problem",
        f"the machine at {_place(reach.address)} is there, and nothing listens on that port",
        f"run {elsewhere('kvnet node start')} there; its {STATUS_THERE} shows the port it has now",
    )


def _timeout(reach: Reach) -> Finding:
    return Finding(
        "peer",
        "problem",
        f"{_place(reach.address)} says nothing at all: {reach.detail}",
        "the machine sleeps or has another address now, or a firewall drops it: let TCP 5864 in there; different "
        "networks need a way between them, such as Tailscale",
    )


def _no_route(reach: Reach) -> Finding:
    where = "is in this network and does not answer there" if reach.near else "cannot be reached from this network"
    return Finding(
        "peer",
        "problem",
        f"{_place(reach.address)} {where}: {reach.detail}",
        f"is the machine awake and on the same network? its {STATUS_THERE} shows its addresses; on macOS see also "
        + PRIVACY_PATH,
    )


def _no_name(reach: Reach) -> Finding:
    text = f"the name in {reach.address} is not known here: {reach.detail}"
    return Finding("peer", "problem", text, f"use an address with numbers, from {STATUS_THERE} on the other machine")


def _failed(reach: Reach) -> Finding:
    return Finding("peer", "problem", f"{_place(reach.address)}: {reach.detail}", f"{STATUS_THERE} there, then again")


_OUTCOMES: dict[str, Callable[[Reach], Finding]] = {
    "member": _member,
    "stranger": _stranger,
    "version": _version,
    "not_kvnet": _not_kvnet,
    "no_session": _no_session,
    "other_peer": _other_peer,
    "no_handshake": _no_handshake,
    "itself": _itself,
    "open": _open,
    "refused": _refused,
    "timeout": _timeout,
    "no_route": _no_route,
    "no_name": _no_name,
    "failed": _failed,
}
OUTCOMES = tuple(_OUTCOMES)
"""Every outcome of trying an address."""
