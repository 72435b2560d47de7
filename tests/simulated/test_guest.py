"""A node that is a good guest: what it does on battery, on a metered link, paused, after sleep and at the end."""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.presence import Presences, PresenceState
from kvnet.network.memory import World
from kvnet_node.guest.awake import AwakeHolder
from kvnet_node.guest.guest import Guest, Machine
from kvnet_node.guest.pausing import Pause
from kvnet_node.guest.policy import Why
from tests.simulated.nodes import Node, StartNode, identity, start_node

TOKENS = list(range(3, 200)) * 3


@dataclass
class Set:
    """The machine, as a test sets it."""

    on_battery: bool | None = None
    metered: bool | None = None
    asleep_s: float = 0.0
    uploading: bool = False
    wanted: list[bool] = field(default_factory=list)


class Holder(AwakeHolder):
    """Notes what is wanted, and starts nothing."""

    def __init__(self, machine: Set) -> None:
        super().__init__([])
        self._machine = machine

    def hold(self, *, wanted: bool) -> None:
        self._machine.wanted.append(wanted)


@pytest.fixture
def start(world: World, nursery: trio.Nursery, tmp_path: Path) -> StartNode:
    return partial(start_node, world, nursery, tmp_path)


async def guest_of(node: Node, machine: Set, directory: Path, nursery: trio.Nursery, battery: str = "auto") -> Guest:
    pause = Pause(directory / "paused.json")
    pause.load()
    seen = Machine(
        look=lambda: (machine.on_battery, machine.metered),
        awake=Holder(machine),
        uploading=lambda: machine.uploading,
        asleep=lambda: machine.asleep_s,
        wall_s=trio.current_time,
    )
    guest = Guest(node.exchange, pause, node.lane, seen, battery=battery)
    await nursery.start(guest.run)
    return guest


async def test_a_node_on_battery_serves_nothing_says_so_and_serves_again_on_mains(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b", who=identity("b", trusts=["a"]))
    seen, machine = Presences(a.exchange), Set()
    guest = await guest_of(b, machine, tmp_path, nursery)
    await a.meet(b)
    await b.add(TOKENS)
    machine.on_battery = True
    await trio.sleep(31.0)
    assert (guest.conduct.why, b.exchange.serving) == (Why.BATTERY, False)
    assert seen.of(b.network.peer_id) is PresenceState.PAUSED
    assert (await a.generate([*TOKENS, 5])).reused_tokens == 0
    machine.on_battery = False
    await trio.sleep(31.0)
    assert seen.of(b.network.peer_id) is PresenceState.SERVING
    assert (await a.generate([*TOKENS, 6])).reused_tokens > 500


async def test_an_owner_who_says_so_serves_on_battery_and_nobody_on_a_metered_link(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b, machine = await start("b"), Set(on_battery=True)
    guest = await guest_of(b, machine, tmp_path, nursery, battery="serve")
    assert guest.conduct.serve
    machine.metered = True
    await trio.sleep(31.0)
    assert guest.conduct.why is Why.METERED


async def test_a_pause_ends_at_its_time_and_not_at_the_next_look(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b = await start("b")
    Pause(tmp_path / "paused.json").begin(trio.current_time() + 10.0)
    guest = await guest_of(b, Set(), tmp_path, nursery)
    assert guest.conduct.why is Why.PAUSED
    await trio.sleep(10.1)
    assert guest.conduct.serve
    assert b.exchange.serving
    guest.pause.begin()
    guest.apply()
    assert guest.left_s() == math.inf
    await trio.sleep(3600.0)
    assert not b.exchange.serving


async def test_a_node_that_wakes_is_there_again_at_once(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, machine = await start("a"), await start("b"), Set()
    await guest_of(b, machine, tmp_path, nursery)
    await a.meet(b)
    await b.add(TOKENS)
    await trio.sleep(60.0)
    announced = b.exchange.announcing().announced
    await trio.sleep(60.0)
    assert b.exchange.announcing().announced == announced > 0
    machine.asleep_s = 3600.0
    await trio.sleep(60.0)
    assert b.exchange.announcing().announced > announced


async def test_a_node_that_falls_asleep_says_so_and_is_asked_again_when_it_wakes(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b", who=identity("b", trusts=["a"]))
    seen, machine = Presences(a.exchange), Set()
    guest = await guest_of(b, machine, tmp_path, nursery)
    await a.meet(b)
    await b.add(TOKENS)
    await guest.fall_asleep()
    assert (b.exchange.serving, seen.of(b.network.peer_id)) == (False, PresenceState.LEAVING)
    await trio.sleep(31.0)  # a look at the machine in between changes nothing
    assert (b.exchange.serving, seen.of(b.network.peer_id)) == (False, PresenceState.LEAVING)
    machine.asleep_s = 3600.0  # the session may outlive a short sleep
    await trio.sleep(3.0)
    assert (b.exchange.serving, seen.of(b.network.peer_id)) == (True, PresenceState.SERVING)
    assert (await a.generate([*TOKENS, 5])).reused_tokens > 500


async def test_a_sleep_that_was_announced_and_does_not_come_is_over_after_a_minute(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a"), await start("b")
    seen = Presences(a.exchange)
    guest = await guest_of(b, Set(), tmp_path, nursery)
    await a.meet(b)
    await guest.fall_asleep()
    await trio.sleep(50.0)
    assert seen.of(b.network.peer_id) is PresenceState.LEAVING
    await trio.sleep(15.0)
    assert seen.of(b.network.peer_id) is PresenceState.SERVING


async def test_a_node_paused_before_it_slept_is_paused_after_it(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a"), await start("b")
    seen = Presences(a.exchange)
    guest = await guest_of(b, Set(), tmp_path, nursery)
    await a.meet(b)
    guest.pause.begin()
    guest.apply()
    await guest.fall_asleep()
    guest.awake()
    await trio.sleep(1.0)
    assert seen.of(b.network.peer_id) is PresenceState.PAUSED


async def test_a_node_that_ends_says_so_and_is_not_called_back_by_the_next_look(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b", who=identity("b", trusts=["a"]))
    seen, machine = Presences(a.exchange), Set()
    guest = await guest_of(b, machine, tmp_path, nursery)
    await a.meet(b)
    await guest.leave()
    assert seen.of(b.network.peer_id) is PresenceState.LEAVING
    await trio.sleep(31.0)
    assert seen.of(b.network.peer_id) is PresenceState.LEAVING
    assert not b.exchange.serving
    assert machine.wanted[-1] is False


async def test_the_machine_is_kept_awake_while_chunks_go_out_and_a_little_longer(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b, machine = await start("b"), Set()
    await guest_of(b, machine, tmp_path, nursery)
    await trio.sleep(3.0)
    assert machine.wanted == []
    machine.uploading = True
    await trio.sleep(3.0)
    assert machine.wanted == [True]
    machine.uploading = False
    await trio.sleep(10.0)
    assert machine.wanted == [True]
    await trio.sleep(30.0)
    assert machine.wanted == [True, False]
    machine.uploading, machine.on_battery = True, True
    await trio.sleep(60.0)
    assert machine.wanted[-1] is False
