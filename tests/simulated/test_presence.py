"""Nodes that pause or leave say so, and are not asked until they serve again."""

from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import KvnetError
from kvnet.exchange.presence import Presences, PresenceState
from kvnet.network.memory import World
from kvnet.protocol.messages.liveness import Presence
from tests.simulated.nodes import Node, StartNode, identity, start_node

TOKENS = list(range(3, 200)) * 3


@pytest.fixture
def start(world: World, nursery: trio.Nursery, tmp_path: Path) -> StartNode:
    return partial(start_node, world, nursery, tmp_path)


async def pair(start: StartNode) -> tuple[Node, Presences, Node, Presences]:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b", who=identity("b", trusts=["a"]))
    return a, Presences(a.exchange), b, Presences(b.exchange)


def pause(node: Node, presences: Presences, *, paused: bool) -> None:
    node.exchange.serving = not paused
    presences.become(PresenceState.PAUSED if paused else PresenceState.SERVING)


async def test_a_paused_peer_is_not_asked_and_one_that_serves_again_is_at_once(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, ours, b, theirs = await pair(start)
    await a.meet(b)
    added = await b.add(TOKENS)
    pause(b, theirs, paused=True)
    await trio.sleep(1.0)
    assert ours.of(b.network.peer_id) is PresenceState.PAUSED
    asked = dict(b.exchange.counters())
    answer = await a.generate([*TOKENS, 5])
    assert answer.reused_tokens == 0
    assert b.exchange.counters() == asked
    with pytest.raises(KvnetError):
        await a.fetch(added.record.hash)
    pause(b, theirs, paused=False)
    await trio.sleep(0.1)
    assert ours.askable(b.network.peer_id)
    assert (await a.generate([*TOKENS, 6])).reused_tokens > 500


async def test_a_node_that_was_paused_before_they_met_says_so_when_they_do(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, ours, b, theirs = await pair(start)
    pause(b, theirs, paused=True)
    await a.meet(b)
    await trio.sleep(0.1)
    assert ours.of(b.network.peer_id) is PresenceState.PAUSED


async def test_a_paused_node_goes_on_asking_others(autojump_clock: MockClock, start: StartNode) -> None:
    a, ours, b, _ = await pair(start)
    await a.meet(b)
    await b.add(TOKENS)
    pause(a, ours, paused=True)
    await trio.sleep(0.1)
    assert (await a.generate([*TOKENS, 5])).reused_tokens > 500


async def test_a_node_that_leaves_says_so_before_it_goes(autojump_clock: MockClock, start: StartNode) -> None:
    a, ours, b, theirs = await pair(start)
    await a.meet(b)
    await theirs.leave(1.0)
    assert ours.of(b.network.peer_id) is PresenceState.LEAVING
    assert not ours.askable(b.network.peer_id)
    # Its session ends; when it comes back it has left no longer.
    (session,) = a.exchange.sessions()
    theirs.become(PresenceState.SERVING)
    session.close()
    await session.closed.wait()
    await trio.sleep(2.0)
    await a.meet(b)
    assert ours.askable(b.network.peer_id)


async def test_of_two_sessions_with_a_paused_peer_one_may_end(autojump_clock: MockClock, start: StartNode) -> None:
    a, ours, b, theirs = await pair(start)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.exchange.connect, b.network.address)
        nursery.start_soon(b.exchange.connect, a.network.address)
    await trio.sleep(1.0)
    sessions = list(a.exchange._sessions._by_id.values())
    assert len(sessions) == 2
    pause(b, theirs, paused=True)
    await trio.sleep(0.1)
    for session in sessions:
        assert ours.of(b.network.peer_id) is PresenceState.PAUSED
        session.close()
        await trio.sleep(0.5)


async def test_nobody_waits_for_a_peer_that_does_not_hear_that_this_node_leaves(
    autojump_clock: MockClock, start: StartNode, world: World
) -> None:
    a, ours, b, _ = await pair(start)
    await a.meet(b)
    await b.network.disconnect(a.network.peer_id)
    began = trio.current_time()
    await ours.leave(1.0)
    assert trio.current_time() - began <= 1.0


async def test_a_state_nobody_knows_is_not_the_ordinary_one(autojump_clock: MockClock, start: StartNode) -> None:
    a, _, b, theirs = await pair(start)
    await a.meet(b)
    (session,) = a.exchange.sessions()
    await session.ask(Presence(request_id=0, state="hibernating"))
    assert theirs.of(a.network.peer_id) is PresenceState.PAUSED


async def test_a_paused_node_announces_nothing(autojump_clock: MockClock, start: StartNode) -> None:
    a, _, b, theirs = await pair(start)
    pause(b, theirs, paused=True)
    await a.meet(b)
    await b.add(TOKENS)
    await trio.sleep(60.0)
    assert b.exchange.announcing().announced == 0
    pause(b, theirs, paused=False)
    await trio.sleep(60.0)
    assert b.exchange.announcing().announced > 0
