"""This machine's network interfaces."""

import ipaddress

import ifaddr

from kvnet.network.lan.records import LanInterface


def list_interfaces() -> list[LanInterface]:
    """Every IPv4 address of this machine with its network, in a stable order. One call to the system."""
    found = [
        LanInterface(adapter.name, ipaddress.IPv4Interface(f"{ip.ip}/{ip.network_prefix}"))
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4
    ]
    return sorted(found, key=lambda each: (each.name, each.address))
