"""Manifest and chunk list among peers that say nothing."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.locating import HEAD_START_S
from kvnet.network.memory import World
from kvnet.protocol.messages.artifacts import GetChunkList, GetManifest
from kvnet.protocol.messages.control import Reply, Request
from tests.evil import EvilPeer, relay_answer
from tests.simulated.nodes import MINE, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]
N_SILENT = 3


@pytest.mark.parametrize("silent", [GetManifest, GetChunkList])
async def test_peers_that_say_nothing_cost_a_fetch_a_head_start_each(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, silent: type
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record
    relay = relay_answer(record)

    def answer(request: Request) -> Reply | None:
        return None if isinstance(request, silent) else relay(request)

    for number in range(N_SILENT):
        network = world.network(f"evil {number}")
        EvilPeer(network, (MINE,), answer)
        await nursery.start(network.run)
        assert await b.exchange.connect(network.address) is not None
    await b.meet(a)
    began_s = trio.current_time()
    located = await b.exchange.fetcher.locate(record.hash)
    assert await b.exchange.fetcher.chunk_list(located) == record.entries
    assert trio.current_time() - began_s <= N_SILENT * HEAD_START_S + 0.5
