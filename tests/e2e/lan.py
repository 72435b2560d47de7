"""Machines on a local network: network namespaces joined by a bridge, made by a test and gone with it.

Each has an address in 10.77.0.0/24 and multicast; nothing leaves the namespaces.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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

    def __init__(self, lan: "Lan", number: int) -> None:
        self.namespace = f"{lan.name}-{number}"
        self.address = f"10.77.0.{number}"
        self._lan = lan
        ip("netns", "add", self.namespace)
        outer, inner = f"{lan.name[-6:]}o{number}", f"{lan.name[-6:]}i{number}"
        ip("-n", lan.name, "link", "add", outer, "type", "veth", "peer", "name", inner)
        ip("-n", lan.name, "link", "set", outer, "master", "lan0", "up")
        ip("-n", lan.name, "link", "set", inner, "netns", self.namespace, "name", "eth0")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self.join(self.address)

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

    def machine(self) -> Machine:
        """One machine more."""
        made = Machine(self, len(self.machines) + 1)
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


def prepared_on(machine: Machine, folder: Path, name: str) -> Kvnet:
    """The command on a data directory of its own, on one machine."""
    return machine.wrap(Kvnet(folder / name))


def neighbours(kvnet: Kvnet) -> dict[str, Any]:
    """The states of a node's neighbours, by peer id."""
    return {each["peer"]: each["state"] for each in kvnet.json("peers")["neighbours"]}
