"""One laboratory per implementation: makes nodes, starts and stops them."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import pytest
import trio

from kvnet.network.interface import Network
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.network.memory import World


class Lab(Protocol):
    """Makes nodes of one implementation."""

    dead_address: str
    """An address where nobody listens."""

    async def start(self, name: str, *, bootstrap: Sequence[str] = ()) -> Network:
        """Start a node; ``bootstrap`` are addresses of others."""

    async def stop(self, network: Network) -> None:
        """End a node as if its process ended."""


class _Running:
    """Node tasks and how to end them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: dict[Network, tuple[trio.CancelScope, trio.Event]] = {}

    async def start(self, network: Network) -> None:
        scope, ended = trio.CancelScope(), trio.Event()
        self._scopes[network] = scope, ended

        async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
            with scope:
                await network.run(task_status=task_status)
            ended.set()

        await self._nursery.start(run)

    async def stop(self, network: Network) -> None:
        scope, ended = self._scopes.pop(network)
        scope.cancel()
        await ended.wait()


class MemoryLab:
    """Nodes of one simulated world, on a real clock without delays."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.world = World()
        self.dead_address = World().network("nobody").address
        self._running = _Running(nursery)

    async def start(self, name: str, *, bootstrap: Sequence[str] = ()) -> Network:
        network = self.world.network(name, bootstrap=bootstrap, rebootstrap_interval_s=1.0)
        await self._running.start(network)
        return network

    async def stop(self, network: Network) -> None:
        await self._running.stop(network)


class LibP2PLab:
    """Nodes of this process on 127.0.0.1."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._running = _Running(nursery)
        # Port 1 (tcpmux) needs privileges and a service that nobody runs any more.
        self.dead_address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

    async def start(self, name: str, *, bootstrap: Sequence[str] = ()) -> Network:
        seed = hashlib.sha256(name.encode()).digest()
        network = LibP2PNetwork(seed, listen=["127.0.0.1:0"], bootstrap=bootstrap, rebootstrap_interval_s=1.0)
        await self._running.start(network)
        # It takes so many records in ten seconds, which a busy machine may need for one more.
        assert network._providers is not None
        network._providers._dht._provider_rate_window = 3600.0
        return network

    async def stop(self, network: Network) -> None:
        await self._running.stop(network)


@pytest.fixture(params=["memory", pytest.param("libp2p", marks=pytest.mark.loopback)])
def lab(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Lab:
    return MemoryLab(nursery) if request.param == "memory" else LibP2PLab(nursery)
