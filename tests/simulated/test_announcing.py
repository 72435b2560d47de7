"""Provider records on a simulated DHT: found late, renewed, healed, and never in a burst."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.announcer import Announcer, KeptKey
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.node import NodeOptions
from kvnet.network.memory import MemoryNetwork, World
from kvnet.protocol.announce import AnnounceLimits
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(600)]
OPTIONS = NodeOptions(announce=AnnounceLimits(interval_s=1.2, reprovide_s=4.0, retry_s=2.0, verify_s=3.0))


@dataclass
class KeptKeys:
    """A keeper in RAM that outlives announcers."""

    keys: dict[bytes, KeptKey] = field(default_factory=dict)

    def load(self) -> list[KeptKey]:
        return list(self.keys.values())

    def save(self, changed: Sequence[KeptKey], removed: Sequence[bytes]) -> None:
        for key in removed:
            self.keys.pop(key, None)
        self.keys |= {each.key: each for each in changed}


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
    assert a.exchange.announcing().alone == 1
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


async def test_that_nobody_is_there_and_that_announcements_fail_is_counted_and_logged(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    hub = world.network("hub")
    await nursery.start(hub.run)
    a = await start_node(world, nursery, tmp_path, "a", options=OPTIONS)
    await a.add(TOKENS)
    await trio.sleep(5)
    assert a.exchange.announcing().alone == 1
    assert "nobody to announce to" in caplog.text
    await a.network.connect(hub.address, timeout_s=5)
    world.kill(hub)
    await trio.sleep(120)
    assert a.exchange.announcing().failed > 3
    assert a.exchange.announcing().announced == 0
    assert 1 <= caplog.text.count("an announcement reached nobody") <= 4, "said, and not over and over"


async def test_a_peer_that_comes_back_is_told_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world = World()
    hub, other = world.network("hub"), world.network("other")
    for each in (hub, other):
        await nursery.start(each.run)
    options = NodeOptions(announce=AnnounceLimits(interval_s=1.2, reprovide_s=900.0, verify_s=0.0))
    a = await start_node(
        world, nursery, tmp_path, "a", options=options, bootstrap=(hub.address, other.address),
        rebootstrap_interval_s=2.0,
    )  # fmt: skip
    added = await a.add(TOKENS)
    await trio.sleep(100)
    assert a.exchange.announcing().never == 0
    world.kill(hub)
    world.lose_records(hub)
    world.lose_records(other)
    await trio.sleep(20)
    await nursery.start(hub.run)
    await trio.sleep(30)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), bootstrap=(hub.address,))
    await trio.sleep(5)
    assert await found_by(b, a, added.record.hash)


async def test_what_was_announced_goes_on_after_a_restart(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    world, kept = World(), KeptKeys()
    hub = world.network("hub")
    await nursery.start(hub.run)
    lane, counter = InlineLane(), iter(range(1 << 20))

    def announcer(network: MemoryNetwork) -> Announcer:
        return Announcer(
            network,
            AnnounceLimits(interval_s=1.2, reprovide_s=900.0, verify_s=0.0),
            lane=lane,
            keeper=kept,
            random=lambda n: bytes(next(counter) % 256 for _ in range(n)),
            wall_s=lambda: 1_800_000_000.0 + trio.current_time(),
        )

    network = world.network("a", bootstrap=[hub.address])
    await nursery.start(network.run)
    async with trio.open_nursery() as first_run:
        first = announcer(network)
        first.add([bytes([n]) * 32 for n in range(5)])
        first.used([bytes(32)])
        await first_run.start(first.run)
        await trio.sleep(10)
        first_run.cancel_scope.cancel()
    assert {each.key for each in kept.keys.values() if each.announced_s is not None} == {
        bytes([n]) * 32 for n in range(5)
    }
    second = announcer(network)
    await second.load()
    second.add([bytes([n]) * 32 for n in (0, 1, 2, 9)])
    await second.loaded()
    assert second.status().never == 1
    assert set(kept.keys) == {bytes([n]) * 32 for n in (0, 1, 2)}, "what is no longer held is forgotten"
    await nursery.start(second.run)
    await trio.sleep(1)
    assert second.status().never == 0, "what is new comes first"
    await trio.sleep(10)
    assert second.status().announced == 4, "and all the rest again: this node may be elsewhere now"


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
