"""Nodes on a simulated network, under a clock that jumps whenever everybody waits."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from kvnet.network.memory import MemoryNetwork, World
from kvnet.network.memory_links import Link

StartNetwork = Callable[..., Awaitable[MemoryNetwork]]


@pytest.fixture
def world(autojump_clock: MockClock) -> World:
    """A world whose links are those of a home network: 1 ms, 1 Gbit/s."""
    return World(default_link=Link(latency_s=0.001, rate_bytes_per_s=125e6))


@pytest.fixture
def start_network(world: World, nursery: trio.Nursery) -> StartNetwork:
    """Adds a node to the world and starts it; it ends with the test. Takes what `World.network` takes."""

    async def start(name: str, **settings: object) -> MemoryNetwork:
        network = world.network(name, **settings)  # type: ignore[arg-type]
        await nursery.start(network.run)
        return network

    return start
