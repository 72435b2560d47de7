"""Discovery begins anew when the network changes or the machine slept, is bounded, and never ends the node."""

import errno
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import trio

from kvnet.network.lan import discovery
from kvnet.network.lan.discovery import QUEUE, LanDiscovery, LanEvents, LanPace, LanSystem
from kvnet.network.lan.records import SERVICE_TYPE, Announcement, Heard, LanInterface, Sighting
from kvnet.network.lan.responder import OnGone, OnHeard
from kvnet.protocol.ids import PeerId, peer_text

OWN = PeerId(bytes.fromhex("002408011220") + bytes(32))
OTHER = PeerId(bytes.fromhex("002408011220") + bytes([7]) * 32)
PACE = LanPace(look_s=0.01, first_pause_s=0.03, max_pause_s=0.05)
LOOPBACK = LanInterface("lo", ipaddress.IPv4Interface("127.0.0.1/8"))


def home(last: int = 5) -> list[LanInterface]:
    return [LOOPBACK, LanInterface("en0", ipaddress.IPv4Interface(f"192.168.1.{last}/24"))]


def heard(number: int) -> Heard:
    properties = {b"id": peer_text(OTHER).encode(), b"v": b"1"}
    return Heard(f"{number}.{SERVICE_TYPE}", 5864, properties, ["192.168.1.7"])


class Spoken:
    """A run of mDNS without a network."""

    def __init__(self, said: Announcement, addresses: Sequence[str], on_heard: OnHeard, on_gone: OnGone) -> None:
        self.said, self.addresses, self.on_heard, self.on_gone = said, list(addresses), on_heard, on_gone
        self.failure, self.heard_itself, self.alive = "", False, False

    def start(self) -> None:
        self.alive = True

    def stop(self) -> None:
        self.alive = False


@dataclass
class Machine:
    """Interfaces and clocks that a test sets, and the runs of mDNS that were begun."""

    interfaces: list[LanInterface] = field(default_factory=home)
    wall_s: float = 1000.0
    runs: list[Spoken] = field(default_factory=list)
    sighted: list[Sighting] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    changes: int = 0
    discovery: LanDiscovery = field(init=False)

    def __post_init__(self) -> None:
        counter = iter(range(1, 1 << 20))
        system = LanSystem(lambda: self.interfaces, self._respond, lambda: (self.wall_s, 0.0))
        events = LanEvents(self.sighted.append, self.gone.append, self._changed)
        self.discovery = LanDiscovery(
            OWN, self._addresses, events, random=lambda n: bytes([next(counter)]) * n, pace=PACE, system=system
        )

    def _addresses(self) -> list[str]:
        return [f"/ip4/{each.address.ip}/tcp/5864" for each in self.interfaces]

    def _respond(self, said: Announcement, addresses: Sequence[str], on_heard: OnHeard, on_gone: OnGone) -> Spoken:
        self.runs.append(Spoken(said, addresses, on_heard, on_gone))
        return self.runs[-1]

    def _changed(self) -> None:
        self.changes += 1


async def until(what: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not what():  # noqa: ASYNC110 — the discovery runs at its own pace
            await trio.sleep(0.005)


async def test_neighbours_come_and_go(nursery: trio.Nursery) -> None:
    machine = Machine()
    await nursery.start(machine.discovery.run)
    (run,) = machine.runs
    assert run.addresses == ["192.168.1.5"]
    assert machine.discovery.status == "on en0 (192.168.1.5)"
    await trio.to_thread.run_sync(run.on_heard, heard(1))
    await trio.to_thread.run_sync(run.on_gone, "1")
    await until(lambda: machine.gone == ["1"])
    assert [each.peer for each in machine.sighted] == [OTHER]


async def test_another_address_begins_anew_under_other_names(nursery: trio.Nursery) -> None:
    machine = Machine()
    await nursery.start(machine.discovery.run)
    machine.interfaces = home(99)
    await until(lambda: machine.changes == 1)
    first, second = machine.runs
    assert (first.alive, second.alive) == (False, True)
    assert second.said.addresses == ("192.168.1.99",)
    assert first.said.instance != second.said.instance
    assert first.said.host != second.said.host


async def test_after_a_sleep_it_begins_anew_and_says_so(nursery: trio.Nursery) -> None:
    machine = Machine()
    await nursery.start(machine.discovery.run)
    # Before it has looked for the first time.
    machine.wall_s += 8 * 3600
    await until(lambda: machine.changes == 1)
    assert [run.alive for run in machine.runs] == [False, True]
    await trio.sleep(0.05)
    assert machine.changes == 1


async def test_without_a_network_it_is_silent_and_begins_when_there_is_one(nursery: trio.Nursery) -> None:
    machine = Machine(interfaces=[LOOPBACK])
    await nursery.start(machine.discovery.run)
    assert machine.runs == []
    assert machine.discovery.status.startswith("off: ")
    assert machine.discovery.hears_itself is None
    machine.interfaces = home()
    await until(lambda: len(machine.runs) == 1)
    assert machine.discovery.hears_itself is False


async def test_one_that_fails_is_tried_again_after_growing_pauses(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    said: list[tuple[str, float]] = []
    # What is so for some hundredths of a second is not to be seen by looking for it.
    monkeypatch.setattr(
        discovery._log, "warning", lambda _text, pause_s, _reason: said.append((machine.discovery.status, pause_s))
    )
    await nursery.start(machine.discovery.run)
    for attempt in range(1, 4):
        run = machine.runs[-1]
        run.failure, run.alive = "OSError: no buffer space", False
        await until(lambda attempt=attempt: len(machine.runs) == attempt + 1 and machine.runs[-1].alive)  # type: ignore[misc]
    await until(lambda: machine.discovery.status.startswith("on "))
    assert said == [("failed: OSError: no buffer space", pause_s) for pause_s in (0.03, 0.05, 0.05)]


async def test_of_more_than_the_queue_holds_the_oldest_is_dropped(nursery: trio.Nursery) -> None:
    machine = Machine()
    await nursery.start(machine.discovery.run)
    for number in range(10 * QUEUE):  # no turn of the loop in between
        machine.runs[0].on_heard(heard(number))
    await until(lambda: bool(machine.sighted))
    await trio.sleep(0.05)
    assert len(machine.sighted) == QUEUE
    assert machine.sighted[-1].name == f"{10 * QUEUE - 1}.{SERVICE_TYPE}"


async def test_mdns_ends_with_the_discovery() -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.discovery.run)
        nursery.cancel_scope.cancel()
    assert [run.alive for run in machine.runs] == [False]


async def test_it_goes_on_with_the_interfaces_it_knew_while_the_system_cannot_say(nursery: trio.Nursery) -> None:
    machine = Machine()
    failing = True
    asked = 0

    def interfaces() -> list[LanInterface]:
        nonlocal asked
        asked += 1
        if failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return home(99)

    system = LanSystem(interfaces, machine._respond, lambda: (machine.wall_s, 0.0))
    events = LanEvents(machine.sighted.append, machine.gone.append, machine._changed)
    discovery = LanDiscovery(
        OWN, lambda: ["/ip4/192.168.1.99/tcp/5864"], events, random=lambda n: b"r" * n, pace=PACE, system=system
    )
    await nursery.start(discovery.run)
    await until(lambda: asked > 2)
    assert machine.runs == []
    failing = False
    await until(lambda: len(machine.runs) == 1)
