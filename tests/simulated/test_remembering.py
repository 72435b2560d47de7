"""Members remembered: reached again after a restart, a change of network and a lost session, without any address."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.lane import InlineLane
from kvnet.exchange.peer_book import BookLimits, PeerRemembrance, RememberedPeer
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.ids import PeerId
from tests.simulated.nodes import OTHER, Node, identity, start_node


@dataclass
class KeptPeers:
    """A keeper in RAM that outlives nodes."""

    peers: dict[PeerId, RememberedPeer] = field(default_factory=dict)

    def load(self) -> list[RememberedPeer]:
        return list(self.peers.values())

    def save(self, changed: Sequence[RememberedPeer], removed: Sequence[PeerId]) -> None:
        for peer in removed:
            del self.peers[peer]
        self.peers |= {each.peer: each for each in changed}


async def remember(node: Node, nursery: trio.Nursery, kept: KeptPeers | None = None) -> PeerRemembrance:
    remembered = PeerRemembrance(
        node.network,
        node.exchange.sessions,
        node.exchange.session_with,
        lane=InlineLane(),
        keeper=kept,
        limits=BookLimits(retry_s=10.0, max_retry_s=60.0),
        wall_s=lambda: 1_800_000_000.0 + trio.current_time(),
    )
    node.exchange.greet_with(remembered.greet)
    await nursery.start(remembered.run)
    return remembered


def members(node: Node) -> list[PeerId]:
    return [session.peer for session in node.exchange.sessions()]


async def test_a_restarted_node_reaches_the_members_it_had_met(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world, kept = World(default_link=Link(latency_s=0.001)), KeptPeers()
    b = await start_node(world, nursery, tmp_path, "b")
    async with trio.open_nursery() as first_run:
        a = await start_node(world, first_run, tmp_path, "a")
        await remember(a, first_run, kept)
        await a.meet(b)
        await trio.sleep(15)
        first_run.cancel_scope.cancel()
    assert list(kept.peers) == [b.network.peer_id]
    a.store.close()
    del world._networks[a.network.peer_id]  # the same name again: a restart
    again = await start_node(world, nursery, tmp_path, "a")
    await remember(again, nursery, kept)
    await trio.sleep(3)
    assert members(again) == [b.network.peer_id]


async def test_a_member_is_remembered_though_the_node_ends_right_after_they_met(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world, kept = World(default_link=Link(latency_s=0.001)), KeptPeers()
    b = await start_node(world, nursery, tmp_path, "b")
    async with trio.open_nursery() as first_run:
        a = await start_node(world, first_run, tmp_path, "a")
        await remember(a, first_run, kept)
        await trio.sleep(0.5)  # what it had looked at before is some time ago, and the next look some time ahead
        await a.meet(b)
        await trio.sleep(0.2)
        first_run.cancel_scope.cancel()
    assert list(kept.peers) == [b.network.peer_id]


async def test_a_member_that_went_is_found_again_when_it_is_back_and_the_pauses_end(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b")
    remembered = await remember(a, nursery)
    await a.meet(b)
    await trio.sleep(5)
    world.kill(b.network)
    await trio.sleep(600)
    assert members(a) == []
    assert len(remembered.book) == 1
    await nursery.start(b.network.run)
    await trio.sleep(65)
    assert members(a) == [b.network.peer_id]


async def test_on_another_network_everybody_is_tried_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b")
    remembered = await remember(a, nursery)
    await a.meet(b)
    await trio.sleep(5)
    world.partition([a.network], [b.network])
    # The connection is dead and nobody has said so; a probe finds out.
    a.exchange.network_changed()
    await trio.sleep(300)
    assert members(a) == []
    world.heal()
    remembered.network_changed()
    await trio.sleep(3)
    assert members(a) == [b.network.peer_id]


async def test_whoever_shares_no_namespace_is_not_remembered(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    stranger = await start_node(world, nursery, tmp_path, "s", who=identity("s", namespaces=(OTHER,)))
    remembered = await remember(a, nursery)
    await a.meet(stranger)
    await trio.sleep(30)
    assert len(remembered.book) == 0


async def test_a_remembered_peer_that_is_no_member_any_more_is_forgotten(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(default_link=Link(latency_s=0.001))
    a = await start_node(world, nursery, tmp_path, "a")
    left = await start_node(world, nursery, tmp_path, "l", who=identity("l", namespaces=(OTHER,)))
    kept = KeptPeers({left.network.peer_id: RememberedPeer(left.network.peer_id, (left.network.address,), (), 1.0)})
    remembered = await remember(a, nursery, kept)
    await trio.sleep(20)
    assert len(remembered.book) == 0
    assert kept.peers == {}
