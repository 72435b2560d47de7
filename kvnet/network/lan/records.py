"""What is said on the local network and what of it is believed. Pure.

Everything a neighbour says is a claim by anybody on the network: it is bounded, checked, and cut down to addresses that
lie in a private network this machine is in itself. That somebody answers there as the peer it claims to be is proved
later, by the handshake of a connection; that it is a member, by the session after it.

What is said names no swarm and no namespace: a service of one type, under names that are random in each run, a port,
and what a dial needs. Two members look like any two nodes.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvnet.errors import UsageError
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text
from kvnet.protocol.messages import PROTOCOL_VERSION

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

_PEER, _VERSION = b"id", b"v"


@dataclass(frozen=True, slots=True)
class LanInterface:
    """An IPv4 address of this machine and the network it is in."""

    name: str
    address: ipaddress.IPv4Interface


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this node says of itself.

    Attributes:
        instance: the full name of the service instance.
        host: the full host name its addresses are under.
        port: where it takes connections.
        addresses: IPv4 texts.
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
        addresses: texts of its A records.
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
    """Those on which neighbours may be: in a private or link-local network, and not alone in it."""
    return [each for each in interfaces if is_lan_address(each.address.ip) and each.address.network.prefixlen < 31]


def is_lan_address(address: ipaddress.IPv4Address) -> bool:
    """Whether an address is one of RFC 1918 or of RFC 3927 (link-local)."""
    return any(address in network for network in _LAN_NETWORKS)


_LAN_NETWORKS = [
    ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
]


def announce(
    peer: PeerId, listening: Iterable[str], interfaces: Sequence[LanInterface], random: bytes
) -> Announcement | None:
    """What to say; None when nobody on a local network could reach this node.

    Args:
        peer: this node.
        listening: its addresses, multiaddr texts.
        interfaces: those to announce on.
        random: `2 * NAME_SIZE_BYTES` fresh random bytes.
    """
    own = {str(each.address.ip) for each in private_interfaces(interfaces)}
    reachable: dict[int, list[str]] = {}
    for text in listening:
        parts = text.split("/")
        if len(parts) >= 5 and parts[1] == "ip4" and parts[3] == "tcp" and parts[2] in own:
            reachable.setdefault(int(parts[4]), []).append(parts[2])
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
    return Sighting(heard.name, peer, int(version), tuple(f"/ip4/{address}{suffix}" for address in near))


def near_addresses(addresses: Iterable[str], interfaces: Sequence[LanInterface]) -> list[str]:
    """The addresses that lie in one of this machine's own private networks, at most `MAX_ADDRESSES`, each once.

    Nobody can make this node dial further than its own cable reaches.
    """
    networks = [each.address.network for each in private_interfaces(interfaces)]
    near: dict[str, None] = {}
    for text in addresses:
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            continue
        if any(
            address in network and address not in (network.network_address, network.broadcast_address)
            for network in networks
        ):
            near[str(address)] = None
    return list(near)[:MAX_ADDRESSES]


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
