import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.dialing import (
    FIRST_PENALTY_S,
    MAX_ADDRESSES_PER_PEER,
    MAX_PENALTY_S,
    MAX_REMEMBERED,
    STAGGER_S,
    FailureMemory,
    connect_any,
    dial_first,
    keep_connected,
)
from kvnet.network.interface import ProviderHint
from kvnet.network.memory import World
from kvnet.network.memory_links import Link


def test_an_address_is_left_alone_for_longer_after_each_failure() -> None:
    memory = FailureMemory()
    now_s = 1000.0
    for count in range(12):
        assert memory.usable("x", now_s)
        memory.note_failure("x", now_s)
        penalty_s = min(FIRST_PENALTY_S * 2**count, MAX_PENALTY_S)
        assert not memory.usable("x", now_s + penalty_s - 0.001)
        now_s += penalty_s


def test_a_success_clears_an_address() -> None:
    memory = FailureMemory()
    memory.note_failure("x", 0.0)
    memory.note_success("x")
    assert memory.usable("x", 0.0)
    memory.note_failure("x", 0.0)
    assert memory.usable("x", FIRST_PENALTY_S)


def test_the_memory_of_failures_is_bounded() -> None:
    memory = FailureMemory()
    for number in range(MAX_REMEMBERED + 10):
        memory.note_failure(str(number), 0.0)
    assert memory.usable("0", 0.0)
    assert not memory.usable(str(MAX_REMEMBERED + 9), 0.0)


def test_only_some_of_very_many_addresses_are_tried() -> None:
    memory = FailureMemory()
    memory.note_failure("bad", 0.0)
    usable = memory.usable_addresses(["bad", "a", "a", *map(str, range(100))], 0.0)
    assert usable == ["a", *map(str, range(MAX_ADDRESSES_PER_PEER - 1))]


async def test_the_first_address_to_answer_wins_and_the_others_are_given_up(autojump_clock: MockClock) -> None:
    given_up: list[str] = []

    async def dial(address: str) -> str:
        try:
            await trio.sleep({"slow": 60.0, "quick": 1.0}[address])
        except trio.Cancelled:
            given_up.append(address)
            raise
        return address

    assert await dial_first(["slow", "quick"], dial) == "quick"
    assert trio.current_time() == pytest.approx(STAGGER_S + 1.0)
    assert given_up == ["slow"]


async def test_an_address_that_fails_at_once_does_not_hold_up_the_next(autojump_clock: MockClock) -> None:
    async def dial(address: str) -> str:
        await trio.lowlevel.checkpoint()
        if address == "bad":
            raise NetworkError("refused")
        return address

    assert await dial_first(["bad", "good"], dial) == "good"
    assert trio.current_time() == 0


async def test_when_all_addresses_fail_each_is_named_with_its_reason(autojump_clock: MockClock) -> None:
    async def dial(address: str) -> str:
        raise NetworkError(f"{address} is closed")

    with pytest.raises(PeerUnreachableError, match="one: one is closed; two: two is closed"):
        await dial_first(["one", "two"], dial)


async def test_enough_connections_end_the_dialling(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world = World()
    nodes = [world.network(name) for name in ("a", "near", "far")]
    for node in nodes:
        await nursery.start(node.run)
    a, near, far = nodes
    world.set_link(a, far, Link(latency_s=2.0))
    hints = [ProviderHint(n.peer_id, (n.address,)) for n in (far, near)]
    assert await connect_any(a, hints, wanted=1) == [near.peer_id]
    assert trio.current_time() < 1.0
    assert await connect_any(a, hints, wanted=2) == [near.peer_id, far.peer_id]


async def test_a_bootstrap_that_comes_back_is_found_again_within_the_interval(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    world = World()
    a, boot = world.network("a"), world.network("boot")
    await nursery.start(a.run)
    nursery.start_soon(lambda: keep_connected(a, [boot.address], interval_s=30.0))
    await trio.sleep(100.0)
    assert a.connected() == []
    await nursery.start(boot.run)
    await trio.sleep(31.0)
    assert [p.peer for p in a.connected()] == [boot.peer_id]
    world.kill(boot)
    await trio.sleep(100.0)
    assert a.connected() == []
    await nursery.start(boot.run)
    await trio.sleep(31.0)
    assert [p.peer for p in a.connected()] == [boot.peer_id]
    nursery.cancel_scope.cancel()
