"""This machine's network interfaces."""

import ipaddress
import socket

import ifaddr

from kvnet.network.lan.records import LanInterface


def list_interfaces() -> list[LanInterface]:
    """Every address of this machine with its network, in a stable order, IPv4 first. A few calls to the system."""
    found = [_interface(adapter, ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return sorted(filter(_is_ready, found), key=lambda each: (each.ip.version, each.name, each.ip.packed))


def _interface(adapter: ifaddr.Adapter, ip: ifaddr.IP) -> LanInterface:
    # An IPv6 address comes with its flow and scope; of the scope the index of the interface says the same.
    address = ip.ip if isinstance(ip.ip, str) else ip.ip[0].partition("%")[0]
    return LanInterface(adapter.name, ipaddress.ip_interface(f"{address}/{ip.network_prefix}"), adapter.index or 0)


def _is_ready(each: LanInterface) -> bool:
    """Whether an address can be used: a link-local one is not until the system knows that nobody else has it."""
    if not (each.ip.version == 6 and each.ip.is_link_local):
        return True
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind((str(each.ip), 0, 0, each.index))
    except OSError:
        return False
    return True
