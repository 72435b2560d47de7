"""Where an address leads: the host in a multiaddress text, link-local IPv6 with its interface included. Pure.

A link-local address means nothing without the interface it is behind: ``/ip6zone/en0/ip6/fe80::1/tcp/5864``, as libp2p
writes it. The interface is one of this machine, so such an address is never told to anybody else.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

SCOPED: Final = re.compile(r"/ip6zone/([A-Za-z0-9._:@-]{1,32})(/ip6/[0-9A-Fa-f:]{2,39}/tcp/\d{1,5}(?:/p2p/[^/]+)?)")
"""An address with an interface: its name, and the rest of the address."""

LOOPBACK: Final = ("127.", "::1")
"""How hosts begin that are this machine alone."""


def split_scoped(address: str) -> tuple[str, str] | None:
    """Interface and rest of a link-local address; None for an address without an interface."""
    match = SCOPED.fullmatch(address)
    if match is None:
        return None
    try:
        link_local = ipaddress.IPv6Address(match[2].split("/")[2]).is_link_local
    except ValueError:
        return None
    return (match[1], match[2]) if link_local else None


def host_of(address: str) -> str:
    """The host in a multiaddress, as sockets take it: ``192.0.2.1``, ``fd00::1``, ``fe80::1%en0``, or a DNS name."""
    parts = address.split("/")
    if parts[1:2] == ["ip6zone"] and len(parts) > 4:
        return f"{parts[4]}%{parts[2]}"
    return parts[2] if len(parts) > 2 else ""


def port_of(address: str) -> str:
    """The TCP port in a multiaddress."""
    parts = address.split("/")
    return parts[6 if parts[1:2] == ["ip6zone"] else 4]


def hosts_of(addresses: Sequence[str]) -> list[str]:
    """The IP addresses in multiaddresses, each once, in their order."""
    return list(dict.fromkeys(host_of(each) for each in addresses if each.startswith(("/ip4/", "/ip6/", "/ip6zone/"))))
