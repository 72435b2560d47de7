"""Which addresses that others have told are dialled, and how often for whom. Pure.

Whoever is a member, or a DHT server, can say that somebody is at any address. A dial sends bytes that say nothing of
anybody, and nobody is told how it went; but it goes from this machine, to where the teller perhaps cannot reach. So an
address is passed over unless a kvnet node may really be there: a number and no name, a port that needs no rights of its
own, and no narrower a network than this node is in itself. What a person gives by hand is not judged here.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

from kvnet.protocol.gossip import Allowance

MIN_PORT: Final = 1024
"""Below it are the services of a machine, which a kvnet node is none of unless somebody took pains."""

UNANSWERED_BURST: Final = 16.0
"""Addresses dialled in vain by one publisher's word: two machines with eight each."""
UNANSWERED_PER_S: Final = 1 / 30
"""What is regained of them."""
MAX_SIGNERS: Final = 1024
"""Publishers whose allowance is remembered; who was heard of longest ago goes first."""


class Reach(IntEnum):
    """From where an address is reached; the narrower the lower."""

    THIS_MACHINE = 0
    THIS_LINK = 1
    PRIVATE = 2
    WORLD = 3


_SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598: VPNs such as Tailscale number their machines there
_NOBODYS = (
    ipaddress.ip_network("0.0.0.0/8"),  # "this host": it reaches the machine itself
    ipaddress.ip_network("::/96"),  # but for ::1 the same, and IPv4 addresses in disguise
    ipaddress.ip_network("64:ff9b::/96"),  # IPv4 addresses behind a translator
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("2001::/32"),  # tunnels with IPv4 addresses inside
    ipaddress.ip_network("2002::/16"),
)


def reach_of(host: str) -> Reach | None:
    """From where a host is reached; None for what is no address of one machine, names among it.

    Args:
        host: of an address, as text.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return Reach.THIS_MACHINE
    if address.is_multicast or address.is_reserved or any(_within(address, network) for network in _NOBODYS):
        return None
    if address.is_link_local:
        return Reach.THIS_LINK
    is_private = address.is_private or (isinstance(address, ipaddress.IPv4Address) and address in _SHARED)
    return Reach.PRIVATE if is_private else Reach.WORLD


def _within(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: ipaddress.IPv4Network | ipaddress.IPv6Network
) -> bool:
    return address.version == network.version and address in network


def plausible(told: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Of the addresses that somebody has told, those that are dialled.

    Args:
        told: multiaddress texts.
        own: those of this node. One that is reached from its own machine alone, as in a test, dials everything.
    """
    narrowest = _narrowest(own)
    return tuple(each for each in told if _is_plausible(each, narrowest))


def _narrowest(own: Iterable[str]) -> Reach:
    reaches = {reach for each in own if (reach := reach_of(_host_and_port(each)[0])) is not None}
    beyond = reaches - {Reach.THIS_MACHINE}
    if beyond:
        return min(beyond)
    return Reach.THIS_MACHINE if reaches else Reach.PRIVATE


def _is_plausible(address: str, narrowest: Reach) -> bool:
    if address.startswith("/memory/"):
        return True  # of simulated networks; no real one takes it
    host, port = _host_and_port(address)
    reach = reach_of(host)
    return reach is not None and reach >= narrowest and port >= MIN_PORT


def _host_and_port(address: str) -> tuple[str, int]:
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port, *_] if port.isascii() and port.isdigit() and len(port) <= 5:
            return host, int(port)
        case _:
            return "", 0


class Unanswered:
    """How many addresses are dialled in vain on one publisher's word; one that answers costs nothing."""

    def __init__(self) -> None:
        self._left: OrderedDict[bytes, Allowance] = OrderedDict()

    def take(self, signer: bytes, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """The first of these that may be dialled now; they count as dialled in vain.

        Args:
            signer: publisher id of who says that somebody is there.
            addresses: that are plausible.
            now: of a steady clock.
        """
        left = self._left.pop(signer, None) or Allowance(UNANSWERED_PER_S, UNANSWERED_BURST, now)
        self._left[signer] = left
        if len(self._left) > MAX_SIGNERS:
            self._left.popitem(last=False)
        return tuple(addresses[: left.take(len(addresses), now)])

    def answered(self, signer: bytes, n: int) -> None:
        """The peer was there: what was dialled for it is given back.

        Args:
            signer: as in `take`.
            n: addresses.
        """
        left = self._left.get(signer)
        if left is not None:
            left.give_back(n)
