"""Provider records on a simulated DHT: found late, renewed, healed, and never in a burst."""

from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.node import NodeOptions
from kvnet.network.memory import World
from kvnet.protocol.announce import AnnounceLimits
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(600)]
OPTIONS = NodeOptions(announce=AnnounceLimits(interval_s=1.2, reprovide_s=4.0, retry_s=2.0, verify_s=3.0))


async def found_by(node: Node, provider: Node, artifact: bytes) -> bool:
    """Whether a lookup from ``node`` names the provider."""
    hints = await node.exchange.providers_of(artifact, timeout_s=3.0)  # type: ignore[arg-type]
    return provider.network.peer_id in [hint.peer for hint in hints]


async def test_a_provider_that_started_alone_is_found_and_stays_found_when_the_bootstrap_forgets(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World(record_ttl_s=10.0)
    hub_network = world.network("hub")  # its address is known; nobody answers there yet
    a = await start_node(
        world, nursery, tmp_path, "a", options=OPTIONS, bootstrap=(hub_network.address,), rebootstrap_interval_s=2.0
    )
    added = await a.add(TOKENS)
    await trio.sleep(5)
    assert a.exchange.announcing().announced == 0
    assert a.exchange.announcing().never > 0
    assert a.exchange.announcing().failed == 0
    await nursery.start(hub_network.run)
    b = await start_node(
        world,
        nursery,
        tmp_path,
        "b",
        who=identity("b", trusts=["a"]),
        bootstrap=(hub_network.address,),
        rebootstrap_interval_s=2.0,
    )
    await trio.sleep(15)
    assert await found_by(b, a, added.record.hash)
    # Far beyond the records' lifetime: they are renewed on a plain timer.
    await trio.sleep(45)
    assert await found_by(b, a, added.record.hash)
    assert a.exchange.announcing().verified > 0
    world.lose_records(hub_network)
    await trio.sleep(8)
    assert await found_by(b, a, added.record.hash)


async def test_announcements_are_paced_below_what_a_server_keeps(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World()
    hub = await start_node(world, nursery, tmp_path, "hub")
    options = NodeOptions(announce=AnnounceLimits(interval_s=1.2, reprovide_s=900.0, verify_s=0.0))
    a = await start_node(world, nursery, tmp_path, "a", options=options, bootstrap=(hub.network.address,))
    for first in range(3, 15):
        await a.add([first, *TOKENS[1:]])
    await trio.sleep(90)
    status = a.exchange.announcing()
    assert status.keys > 30
    assert status.never == 0
    assert status.failed == 0
    b = await start_node(
        world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), bootstrap=(hub.network.address,)
    )
    await trio.sleep(5)
    for record in a.store.artifacts():
        assert await found_by(b, a, record.hash)


async def test_what_is_removed_is_announced_no_longer_but_shared_keys_are(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World()
    a = await start_node(world, nursery, tmp_path, "a", options=OPTIONS)
    first = await a.add(TOKENS)
    alone = a.exchange.announcing().keys
    second = await a.add([*TOKENS, 9, 9, 9])
    both = a.exchange.announcing().keys
    assert alone < both < 2 * alone
    a.store.remove(first.record.hash)
    a.exchange.removed(first.record.hash)
    assert a.exchange.announcing().keys == both - 2  # its own hash and its own end
    a.store.remove(second.record.hash)
    a.exchange.removed(second.record.hash)
    assert a.exchange.announcing().keys == 0
