"""Multiaddr text: reading peers' addresses, and naming our own when we listen on all interfaces."""

import ipaddress
from collections.abc import Sequence

from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.utils import get_network_addrs

from kvnet.errors import UsageError, elsewhere
from kvnet.network.libp2p.ports import WILDCARDS
from kvnet.network.places import split_scoped
from kvnet.protocol.ids import PeerId

MAX_ADDRESS_CHARACTERS = 256
"""An address text from a peer or a person; a DNS name of 253 characters is the longest sensible part."""

_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")


def parse_peer_address(address: str) -> tuple[Multiaddr, PeerId]:
    """The dialable part and the peer id of an address like ``/ip4/192.0.2.1/tcp/5864/p2p/12D3KooW…``.

    A link-local one has an interface of this machine in front: ``/ip6zone/en0/ip6/fe80::1/tcp/5864/p2p/12D3KooW…``.

    Raises:
        UsageError: it is not host, TCP port and peer id, in this order.
    """
    hint = f"Copy it from the other node's `{elsewhere('kvnet node status')}`."
    if len(address) > MAX_ADDRESS_CHARACTERS:
        raise UsageError(f"expected an address of at most {MAX_ADDRESS_CHARACTERS} characters", hint=hint)
    zone, rest = split_scoped(address) or ("", address)
    try:
        whole = Multiaddr(rest)
        names = [protocol.name for protocol in whole.protocols()]
        peer = ID.from_base58(whole.value_for_protocol("p2p") or "")
    except Exception as error:  # the parser's exceptions have no common base
        raise UsageError(f"expected an address like /ip4/…/tcp/…/p2p/…, found {address!r}", hint=hint) from error
    if len(names) != 3 or names[0] not in _HOST_PROTOCOLS or names[1:] != ["tcp", "p2p"]:
        raise UsageError(f"expected an address like /ip4/…/tcp/…/p2p/…, found {address!r}", hint=hint)
    target = whole.decapsulate(Multiaddr(f"/p2p/{peer}"))
    return Multiaddr(f"/ip6zone/{zone}{target}") if zone else target, PeerId(peer.to_bytes())


def advertised_addresses(listening: Sequence[Multiaddr]) -> list[Multiaddr]:
    """Where others can reach us, given where we listen: wildcards become this machine's addresses; IPv4 first."""
    advertised: list[Multiaddr] = []
    for address in listening:
        family = "ip6" if "ip6" in {p.name for p in address.protocols()} else "ip4"
        host = str(address.value_for_protocol(family))
        hosts = interface_addresses(family) if host in WILDCARDS else [host]
        advertised += [Multiaddr(f"/{family}/{h}/tcp/{address.value_for_protocol('tcp')}") for h in hosts]
    # py-libp2p starts listeners in no particular order; the same node names its addresses in the same one.
    return sorted(set(advertised), key=lambda address: (str(address).startswith("/ip6/"), str(address)))


def interface_addresses(family: str) -> list[str]:
    """This machine's addresses that others may reach; loopback only when there is nothing else.

    Link-local IPv6 addresses are left out: they mean nothing without the name of the reader's interface.
    """
    found = [ipaddress.ip_address(a.partition("%")[0]) for a in get_network_addrs(4 if family == "ip4" else 6)]
    useful = [str(a) for a in found if not (a.is_loopback or a.is_link_local or a.is_unspecified or a.is_multicast)]
    return useful or [str(a) for a in found if a.is_loopback] or (["127.0.0.1"] if family == "ip4" else [])
