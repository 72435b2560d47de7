"""Neighbours of whole nodes: members become sessions, others are told of with what to do about them."""

from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.neighbours import NeighbourLimits, Neighbours
from kvnet.network.lan.records import Sighting
from kvnet.network.memory import MemoryNetwork, World
from kvnet.network.memory_links import Link
from kvnet_node.config import load_config
from kvnet_node.invocation import Settings
from kvnet_node.neighbours import Surroundings
from kvnet_node.paths import DataPaths
from kvnet_node.suggesting import unmarked
from tests.simulated.nodes import OTHER, Node, identity, start_node


def sighting(network: MemoryNetwork, version: int = 1) -> Sighting:
    return Sighting(f"name of {network.name}", network.peer_id, version, (network.address,))


def surroundings_of(node: Node, directory: Path) -> Surroundings:
    config = load_config(directory, flags={"lan.discovery": False, "store.ram_only": True}, environment={})
    return Surroundings(Settings(DataPaths(directory), config), node.exchange)


async def test_members_get_a_session_and_each_neighbour_is_told_of_with_the_next_step(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b")
    stranger = await start_node(world, nursery, tmp_path, "s", who=identity("s", namespaces=(OTHER,)))
    away, older = world.network("away"), world.network("older")
    around = surroundings_of(a, tmp_path)
    assert around.discovery == "off (lan.discovery)"
    await nursery.start(around.run)
    said: list[str] = []
    nursery.start_soon(around.tell, said.append)
    for each in (b.network, stranger.network, away):
        around._sighted(sighting(each))
    around._sighted(sighting(older, version=0))
    await trio.sleep(15)
    assert [session.peer for session in a.exchange.sessions()] == [b.network.peer_id]
    assert {each.peer: each.state for each in around.neighbours()} == {
        b.network.peer_id: "member",
        stranger.network.peer_id: "stranger",
        away.peer_id: "unreachable",
        older.peer_id: "other version",
    }
    assert around.remembered() == 1
    assert len(said) == 4, "each is told of once"
    by_kind = {line.partition(" at ")[2].partition(" ")[2].split()[0] for line in said}
    assert by_kind == {"shares", "does", "speaks"}
    (strange,) = [line for line in said if "shares no namespace" in line]
    assert unmarked(strange).endswith("kvnet invite --device here, then kvnet join - there")
    (unreachable,) = [line for line in said if "does not answer" in line]
    assert unreachable.endswith("does not answer; why: kvnet doctor --network")


async def test_a_neighbour_that_was_away_is_reached_when_it_is_seen_again(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b")
    around = surroundings_of(a, tmp_path)
    await nursery.start(around.run)
    around._sighted(sighting(b.network))
    await trio.sleep(5)
    assert len(a.exchange.sessions()) == 1
    world.hang(b.network)
    around.network_changed()
    await trio.sleep(60)
    assert a.exchange.sessions() == []
    world.resume(b.network)
    around.network_changed()
    await trio.sleep(5)
    assert [session.peer for session in a.exchange.sessions()] == [b.network.peer_id]


async def test_connections_to_many_strangers_are_let_go_and_bootstrap_peers_are_kept(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    strangers = [
        await start_node(world, nursery, tmp_path, f"s{n}", who=identity(f"s{n}", namespaces=(OTHER,)))
        for n in range(6)
    ]
    kept = strangers[0].network.peer_id
    limits = NeighbourLimits(strangers=2, stranger_s=10.0)
    neighbours = Neighbours(a.network, a.exchange.session_with, limits, keep=frozenset({kept}))
    await nursery.start(neighbours.run)
    for each in strangers:
        neighbours.sighted(sighting(each.network))
    await trio.sleep(60)
    connected = {info.peer for info in a.network.connected()}
    assert kept in connected
    assert len(connected) == 3
    assert len(neighbours.list()) == 6
