"""Whom ``kvnet fetch`` asks, how long that takes where somebody says nothing, and what is said meanwhile."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import NotFoundError
from kvnet.exchange.locating import HEAD_START_S
from kvnet.network.memory import World
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.session import SessionLimits
from kvnet_node.operations.reaching import Looking, not_found, waiting_words
from tests.evil import EvilPeer
from tests.simulated.nodes import MINE, OTHER, Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]


def say_nothing(_: Request) -> Reply | None:
    """What a process that was stopped answers."""
    return None


async def meet_silent(world: World, nursery: trio.Nursery, node: Node) -> PeerId:
    """Connect to a member that answers no request; its peer id."""
    network = world.network("silent")
    EvilPeer(network, (MINE,), say_nothing)
    await nursery.start(network.run)
    assert await node.exchange.connect(network.address) is not None
    return network.peer_id


async def test_a_lone_member_that_says_nothing_is_waited_for_once_and_named(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    artifact = (await a.add(TOKENS)).record.hash
    silent = await meet_silent(world, nursery, b)
    looking = Looking(b.exchange, artifact, {silent: "studio"})
    began_s = trio.current_time()
    said: list[str] = []

    async def listen() -> None:
        while True:
            said.append(looking.words())
            await trio.sleep(1)

    nursery.start_soon(listen)
    with pytest.raises(NotFoundError, match="the one peer asked does not have it"):
        await looking.locate()
    assert trio.current_time() - began_s <= SessionLimits().request_s + 1
    assert said[0] == "asking studio"
    assert looking.asked_anybody


async def test_the_dht_is_asked_while_a_member_says_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hub = await start_node(world, nursery, tmp_path, "hub", who=identity("hub", namespaces=(OTHER,)))
    bootstrap = (hub.network.address,)
    a = await start_node(world, nursery, tmp_path, "a", bootstrap=bootstrap)
    artifact = (await a.add(TOKENS)).record.hash
    await trio.sleep(60)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), bootstrap=bootstrap)
    await trio.sleep(5)
    await meet_silent(world, nursery, b)
    began_s = trio.current_time()
    located = await Looking(b.exchange, artifact, {}).locate()
    assert located.session.peer == a.network.peer_id
    assert trio.current_time() - began_s < HEAD_START_S + 2


async def test_with_nobody_to_ask_it_says_so(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    artifact = (await a.add(TOKENS)).record.hash
    alone = await start_node(world, nursery, tmp_path, "alone", who=identity("alone", trusts=["a"]))
    looking = Looking(alone.exchange, artifact, {})
    with pytest.raises(NotFoundError, match="found none connected"):
        await looking.locate()
    assert not looking.asked_anybody


NOW_S = 1_800_000_000.0


def test_a_holder_that_is_away_is_named_with_what_brings_it_back() -> None:
    error = not_found("nobody has it", "kvnet peers", {"vm": NOW_S - 60}, [], NOW_S)
    assert error.message == "nobody has it; vm (seen 1 min 0 s ago) holds it and is away"
    assert error.hint.endswith("node start on it, then the same again")
    several = not_found("nobody has it", "kvnet peers", {"vm": NOW_S - 60, "lab": 0.0}, [], NOW_S)
    assert several.message.endswith("; vm (seen 1 min 0 s ago) and lab hold it and are away")
    assert "on one of them" in several.hint


def test_a_machine_that_was_removed_from_a_swarm_is_told_so_where_nobody_has_an_artifact() -> None:
    error = not_found("nobody has it", "kvnet peers", {}, ["mine"], NOW_S)
    assert error.message == "nobody has it"
    assert error.hint.startswith("this machine was removed from mine")
    assert error.hint.endswith("; kvnet peers")
    assert not_found("nobody has it", "kvnet peers", {}, [], NOW_S).hint == "kvnet peers"


def test_bootstrap_nodes_are_spoken_of_where_some_are_set() -> None:
    assert waiting_words(()) == "waiting for a member to be reached"
    assert waiting_words(("/ip4/192.0.2.1/tcp/1",)).endswith(" through the bootstrap nodes")
