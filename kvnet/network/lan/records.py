"""What is said on the local network and what of it is believed. Pure.

Everything a neighbour says is a claim by anybody on the network: it is bounded, checked, and cut down to addresses that
lie in a private or link-local network this machine is in itself. That somebody answers there as the peer it claims to
be is proved later, by the handshake of a connection; that it is a member, by the session after it.

What is said names no swarm and no namespace: a service of one type, under names that are random in each run, a port,
and what a dial needs. Two members look like any two nodes.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvnet.errors import UsageError
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text
from kvnet.protocol.messages.handshake import PROTOCOL_VERSION

SERVICE_TYPE = "_kvnet._tcp.local."
NAME_SIZE_BYTES = 8
"""Random bytes in a name; two nodes of one network have the same one practically never."""

MAX_NAME_CHARACTERS = 128
MAX_PROPERTIES = 8
MAX_PROPERTY_BYTES = 128
MAX_ADDRESSES = 4
"""Addresses of one neighbour that are tried."""
MAX_HEARD_ADDRESSES = 32
"""Addresses of one neighbour that are looked at."""
MAX_MERGED = 1024
"""Instances of which it is remembered what each family of addresses has said."""

_PEER, _VERSION = b"id", b"v"


IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class LanInterface:
    """An address of this machine and the network it is in.

    Attributes:
        name: of the interface, such as ``en0``.
        address: with its network.
        index: the system's number of the interface.
    """

    name: str
    address: IPInterface
    index: int = 0

    @property
    def ip(self) -> IPAddress:
        """The address alone."""
        return self.address.ip


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this node says of itself.

    Attributes:
        instance: the full name of the service instance.
        host: the full host name its addresses are under.
        port: where it takes connections.
        addresses: texts, IPv4 and IPv6; those of a family are said in multicast of that family.
        properties: of the TXT record.
    """

    instance: str
    host: str
    port: int
    addresses: tuple[str, ...]
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Heard:
    """What the network says of one service instance, as it came: unchecked.

    Attributes:
        name: the instance.
        port: of its SRV record.
        properties: of its TXT record.
        addresses: texts of its A and AAAA records, link-local ones with the interface's number: ``fe80::1%3``.
    """

    name: str
    port: int | None
    properties: Mapping[bytes, bytes | None]
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A neighbour as it says it is: somebody to try, nothing more.

    Attributes:
        name: the service instance, by which it is also said to have gone.
        peer: its peer id.
        version: the newest protocol version it speaks.
        addresses: multiaddr texts ending in ``/p2p/<id>``.
    """

    name: str
    peer: PeerId
    version: int
    addresses: tuple[str, ...]


def private_interfaces(interfaces: Iterable[LanInterface]) -> list[LanInterface]:
    """Those on which neighbours may be: in a private or link-local network, and not alone in it.

    Every IPv6 interface has a link-local address, those of tunnels, containers and Apple's wireless peer-to-peer links
    too. So one without a private IPv4 address counts only if it has no public one and has an IPv6 address that a router
    or a person gave it.
    """
    named: dict[str, list[LanInterface]] = {}
    for each in interfaces:
        named.setdefault(each.name, []).append(each)
    four, six = [], []
    for here in named.values():
        private = [each for each in here if each.address.version == 4 and _has_neighbours(each)]
        public = any(
            each.address.version == 4 and not is_lan_address(each.ip) and each.ip not in _CLAT for each in here
        )
        given = any(each.address.version == 6 and not each.ip.is_link_local for each in here)
        four += private
        if private or (given and not public):
            six += [each for each in here if each.address.version == 6 and _has_neighbours(each)]
    return four + six


def _has_neighbours(each: LanInterface) -> bool:
    return is_lan_address(each.ip) and each.address.network.num_addresses > 2


def is_lan_address(address: IPAddress) -> bool:
    """Whether an address is private (RFC 1918, RFC 4193) or link-local (RFC 3927, RFC 4291)."""
    return any(address.version == network.version and address in network for network in _LAN_NETWORKS)


_LAN_NETWORKS = [
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10")
]
_CLAT = ipaddress.ip_network("192.0.0.0/29")
"""What a machine in an IPv6 network gives itself to reach IPv4 (RFC 7335); nobody else is in it."""


def places(interfaces: Iterable[LanInterface]) -> frozenset[tuple[str, str]]:
    """What of the interfaces says where this machine is: its addresses, of IPv6 the networks.

    IPv6 addresses change every day for privacy's sake, in a network that stays the same.
    """
    return frozenset(
        (each.name, str(each.address if each.address.version == 4 or each.ip.is_link_local else each.address.network))
        for each in interfaces
    )


def announce(
    peer: PeerId, listening: Iterable[str], interfaces: Sequence[LanInterface], random: bytes
) -> Announcement | None:
    """What to say; None when nobody on a local network could reach this node.

    Args:
        peer: this node.
        listening: where it takes connections, multiaddr texts; ``0.0.0.0`` and ``::`` are all of a family.
        interfaces: this machine's.
        random: `2 * NAME_SIZE_BYTES` fresh random bytes.
    """
    own = [each.ip for each in private_interfaces(interfaces)]
    reachable: dict[int, list[str]] = {}
    for text in listening:
        parts = text.split("/")
        if len(parts) >= 5 and parts[1] in {"ip4", "ip6"} and parts[3] == "tcp":
            here = reachable.setdefault(int(parts[4]), [])
            here += [str(ip) for ip in own if _listens(parts[2], ip) and str(ip) not in here]
    reachable = {port: addresses for port, addresses in reachable.items() if addresses}
    if not reachable:
        return None
    # One port is said; where a node listens on several, the one that most addresses have.
    port = max(reachable, key=lambda each: len(reachable[each]))
    return Announcement(
        f"{random[:NAME_SIZE_BYTES].hex()}.{SERVICE_TYPE}",
        f"{random[NAME_SIZE_BYTES:].hex()}.local.",
        port,
        tuple(reachable[port]),
        {_PEER.decode(): peer_text(peer), _VERSION.decode(): str(PROTOCOL_VERSION)},
    )


def _listens(host: str, ip: IPAddress) -> bool:
    listening = ipaddress.ip_address(host)
    return listening == ip or (listening.is_unspecified and listening.version == ip.version)


def read_heard(heard: Heard, own: PeerId, interfaces: Sequence[LanInterface]) -> Sighting | None:
    """The neighbour behind what was heard; None when it is this node, or not what a node says.

    Args:
        heard: unchecked.
        own: this node's peer id.
        interfaces: this machine's, now.
    """
    if len(heard.name) > MAX_NAME_CHARACTERS or not heard.name.endswith(f".{SERVICE_TYPE}"):
        return None
    if heard.port is None or not 0 < heard.port < 65536 or len(heard.properties) > MAX_PROPERTIES:
        return None
    if any(len(value or b"") > MAX_PROPERTY_BYTES for value in heard.properties.values()):
        return None
    version = heard.properties.get(_VERSION) or b""
    try:
        peer = parse_peer_text((heard.properties.get(_PEER) or b"").decode("ascii"))
    except (UsageError, UnicodeDecodeError):
        return None
    if peer == own or not version.isdigit() or len(version) > 5:
        return None
    near = near_addresses(list(heard.addresses)[:MAX_HEARD_ADDRESSES], interfaces)
    if not near:
        return None
    suffix = f"/tcp/{heard.port}/p2p/{peer_text(peer)}"
    return Sighting(heard.name, peer, int(version), tuple(f"{place}{suffix}" for place in near))


def near_addresses(addresses: Iterable[str], interfaces: Sequence[LanInterface]) -> list[str]:
    """Those in a network that this machine is in itself, as beginnings of multiaddresses: ``/ip4/192.168.1.7``.

    Nobody can make this node dial further than its own cable reaches. A link-local address is behind the interface it
    was heard on, or, where that was not said, behind any that takes part.
    """
    own = private_interfaces(interfaces)
    near: dict[str, None] = {}
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        scope = getattr(address, "scope_id", None)
        bare = ipaddress.ip_address(text.partition("%")[0])
        behind = [each for each in own if _is_neighbour(bare, each) and scope in {None, str(each.index), each.name}]
        if bare.version == 6 and bare.is_link_local:
            near.update(dict.fromkeys(f"/ip6zone/{each.name}/ip6/{bare}" for each in behind))
        elif behind:
            near[f"/ip{bare.version}/{bare}"] = None
    return list(near)[:MAX_ADDRESSES]


def _is_neighbour(address: IPAddress, interface: LanInterface) -> bool:
    network = interface.address.network
    if address.version != network.version or address not in network or address == network.network_address:
        return False
    return not (isinstance(network, ipaddress.IPv4Network) and address == network.broadcast_address)


class Families:
    """Puts together what IPv4 and IPv6 multicast say of one instance: each says the addresses of its own family."""

    def __init__(self) -> None:
        self._said: dict[str, dict[int, Heard]] = {}

    def heard(self, heard: Heard, version: int) -> Heard:
        """All that is known of an instance after one family has said something of it; IPv4 first.

        Args:
            heard: what it said.
            version: 4 or 6.
        """
        said = self._said.pop(heard.name, {})
        self._said[heard.name] = said = {**said, version: heard}
        while len(self._said) > MAX_MERGED:
            del self._said[next(iter(self._said))]
        addresses = [address for each in sorted(said) for address in said[each].addresses]
        return replace(heard, addresses=list(dict.fromkeys(addresses)))

    def gone(self, name: str, version: int) -> Heard | None:
        """What is left of an instance after it went in one family; None when nothing is."""
        said = {each: heard for each, heard in self._said.pop(name, {}).items() if each != version}
        if not said:
            return None
        self._said[name] = said
        return next(iter(said.values()))


class ClockWatch:
    """Notices that the machine slept: its wall clock went on and its monotonic clock did not.

    A clock that somebody sets looks the same; that costs a needless new beginning.

    Args:
        tolerance_s: by how much the two may part between two looks.
    """

    def __init__(self, tolerance_s: float = 5.0) -> None:
        self._tolerance_s = tolerance_s
        self._offset_s: float | None = None

    def jumped(self, wall_s: float, monotonic_s: float) -> bool:
        """Whether the clocks have parted since the last call."""
        before_s, self._offset_s = self._offset_s, wall_s - monotonic_s
        return before_s is not None and abs(self._offset_s - before_s) > self._tolerance_s
