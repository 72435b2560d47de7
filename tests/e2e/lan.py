"""Machines on a local network: network namespaces joined by a bridge, made by a test and gone with it.

Each has an address in 10.77.0.0/24, or with IPv6 alone in fd77::/64, a link-local one, and multicast; nothing leaves
the namespaces.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import trio

from kvnet_node.control_client import call_running_node
from kvnet_node.operations.registry import OPERATIONS
from tests.e2e.conftest import Kvnet


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def require_namespaces() -> None:
    """Skip where network namespaces cannot be made."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    name = f"kvnet-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    ip("netns", "delete", name)


class Machine:
    """A network namespace with one cable to the bridge."""

    def __init__(self, lan: "Lan", number: int, *, ipv4: bool = True) -> None:
        self.namespace = f"{lan.name}-{number}"
        self.address = f"10.77.0.{number}"
        self.mac = f"02:00:00:00:77:{number:02x}"
        self._lan = lan
        ip("netns", "add", self.namespace)
        outer, inner = f"{lan.name[-6:]}o{number}", f"{lan.name[-6:]}i{number}"
        ip("-n", lan.name, "link", "add", outer, "type", "veth", "peer", "name", inner)
        ip("-n", lan.name, "link", "set", outer, "master", "lan0", "up")
        ip("-n", lan.name, "link", "set", inner, "netns", self.namespace, "name", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "address", self.mac)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        if ipv4:
            self.join(self.address)
        else:
            ip("-n", self.namespace, "address", "add", f"fd77::{number}/64", "dev", "eth0")
            ip("-n", self.namespace, "link", "set", "eth0", "up")

    def join(self, address: str) -> None:
        """Have an address on the network."""
        self.address = address
        ip("-n", self.namespace, "address", "add", f"{address}/24", "broadcast", "10.77.0.255", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "route", "replace", "224.0.0.0/4", "dev", "eth0")

    def leave(self) -> None:
        """Have no address any more."""
        ip("-n", self.namespace, "address", "flush", "dev", "eth0")

    def wrap(self, kvnet: Kvnet) -> Kvnet:
        """The command, run on this machine."""
        kvnet.prefix = ("ip", "netns", "exec", self.namespace)
        return kvnet


class Lan:
    """The bridge and the machines on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.machines: list[Machine] = []

    def machine(self, *, ipv4: bool = True) -> Machine:
        """One machine more, with or without IPv4."""
        made = Machine(self, len(self.machines) + 1, ipv4=ipv4)
        self.machines.append(made)
        return made


@contextmanager
def lan() -> Iterator[Lan]:
    """A network for one test."""
    require_namespaces()
    made = Lan(f"kvnet-lan-{os.getpid()}")
    ip("netns", "add", made.name)
    try:
        ip("-n", made.name, "link", "add", "lan0", "type", "bridge", "mcast_snooping", "0")
        ip("-n", made.name, "link", "set", "lan0", "up")
        yield made
    finally:
        for machine in made.machines:
            subprocess.run(["ip", "netns", "delete", machine.namespace], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", made.name], check=False, capture_output=True)


CAPTURE = """
import socket
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
wire.bind(("lan0", 0))
print("listening", flush=True)
while True:
    frame = wire.recv(65535)
    packet, datagram = frame[14:], b""
    if frame[12:14] == b"\\x08\\x00" and packet[9] == 17:
        datagram = packet[(packet[0] & 15) * 4 :]
    elif frame[12:14] == b"\\x86\\xdd" and packet[6] == 17:
        datagram = packet[40:]
    if datagram[2:4] == (5353).to_bytes(2, "big"):
        print(frame[6:12].hex(":"), datagram[8:].hex(), flush=True)
"""
"""A program that says when it listens, and then prints whatever multicast DNS crosses the bridge: the sender's hardware
address and the message."""


FLOOD = """
import random, socket, sys, time
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText, const
from zeroconf import current_time_millis

def announcement(n):
    out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    kind, name, host = "_kvnet._tcp.local.", f"{n:016x}._kvnet._tcp.local.", f"{n:016x}.local."
    digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    peer = "12D3KooW" + "".join(random.Random(n).choices(digits, k=44))
    text = b"".join(bytes([len(v)]) + v for v in (b"id=" + peer.encode(), b"v=1"))
    out.add_answer_at_time(DNSPointer(kind, const._TYPE_PTR, const._CLASS_IN, 120, name), 0)
    out.add_answer_at_time(DNSService(name, const._TYPE_SRV, const._CLASS_IN, 120, 0, 0, 9, host), 0)
    out.add_answer_at_time(DNSText(name, const._TYPE_TXT, const._CLASS_IN, 120, text), 0)
    for address in (f"10.77.0.{n % 200 + 20}", "8.8.8.8"):
        out.add_answer_at_time(DNSAddress(host, const._TYPE_A, const._CLASS_IN, 120, socket.inet_aton(address)), 0)
    return out.packets()[0]

sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
sender.bind(("", 5353))
for n in range(int(sys.argv[1])):
    sender.sendto(announcement(n), ("224.0.0.251", 5353))
    time.sleep(0.001)
"""
"""A program that announces as many invented neighbours as it is told, at addresses where nobody is."""


async def asked(kvnet: Kvnet, verb: str) -> dict[str, Any]:
    """The result of a verb without arguments from a running node, without a process for it."""
    request = OPERATIONS[verb].request()
    ask = partial(call_running_node, kvnet.data_dir, verb, request, lambda _event: None)
    said = await trio.to_thread.run_sync(ask)
    assert said is not None
    found: dict[str, Any] = json.loads(said)
    return found
