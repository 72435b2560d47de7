"""What the simulated network simulates: time, rates and faults. That it is a network at all, the contract tests."""

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import NetworkError, PeerUnreachableError, UsageError
from kvnet.network.interface import STREAM_WINDOW_BYTES, ByteStream, StreamKind
from kvnet.network.memory import MemoryNetwork, World
from kvnet.network.memory_links import Link
from kvnet.network.memory_streams import SLOW_READER_LIMIT_S
from kvnet.protocol.ids import PeerId

LATENCY_S = 0.1
RATE = 1_000_000.0


async def _pair(nursery: trio.Nursery, link: Link) -> tuple[World, MemoryNetwork, MemoryNetwork]:
    world = World(default_link=link)
    a, b = world.network("a"), world.network("b")
    for node in (a, b):
        await nursery.start(node.run)
    await a.connect(b.address, timeout_s=10)
    return world, a, b


async def _send_megabyte(peer: PeerId, stream: ByteStream) -> None:
    await stream.send_all(bytes(1_000_000))


async def _hold(peer: PeerId, stream: ByteStream) -> None:
    await trio.sleep_forever()


async def test_bytes_take_latency_and_rate_into_account(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    _, a, b = await _pair(nursery, Link(LATENCY_S, RATE))
    assert trio.current_time() == pytest.approx(2 * LATENCY_S)
    b.set_handler(StreamKind.CHUNKS, _send_megabyte)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    opened_s = trio.current_time()
    await stream.receive_exactly(1_000_000)
    assert trio.current_time() - opened_s == pytest.approx(1.0 + LATENCY_S)
    nursery.cancel_scope.cancel()


async def test_streams_of_one_direction_share_its_rate(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    _, a, b = await _pair(nursery, Link(0.0, RATE))
    b.set_handler(StreamKind.CHUNKS, _send_megabyte)
    async with trio.open_nursery() as readers:
        for _ in range(3):
            stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
            readers.start_soon(stream.receive_exactly, 1_000_000)
    assert trio.current_time() == pytest.approx(3.0)
    nursery.cancel_scope.cancel()


async def test_a_partition_delays_and_healing_delivers(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world, a, b = await _pair(nursery, Link(LATENCY_S))
    b.set_handler(StreamKind.CHUNKS, _send_megabyte)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    stream.idle_timeout_s = None
    world.partition([a], [b])
    with trio.move_on_after(100) as waited:
        await stream.receive_exactly(1_000_000)
    assert waited.cancelled_caught
    with pytest.raises(PeerUnreachableError, match="silence"):
        await a.open_stream(b.peer_id, StreamKind.CHUNKS, timeout_s=1)
    world.heal()
    assert len(await stream.receive_exactly(1_000_000)) == 1_000_000
    nursery.cancel_scope.cancel()


async def test_a_hung_node_is_given_up_after_the_idle_timeout(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world, a, b = await _pair(nursery, Link(LATENCY_S))
    b.set_handler(StreamKind.CHUNKS, _hold)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    world.hang(b)
    began_s = trio.current_time()
    with pytest.raises(PeerUnreachableError, match="15 s"):
        await stream.receive_exactly(1)
    assert trio.current_time() - began_s == pytest.approx(15.0)
    assert a.connected() == []
    with pytest.raises(PeerUnreachableError):
        await a.connect(b.address, timeout_s=2)
    world.resume(b)
    assert await a.connect(b.address, timeout_s=2) == b.peer_id
    nursery.cancel_scope.cancel()


async def test_a_killed_sender_looks_like_a_clean_end(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world, a, b = await _pair(nursery, Link(LATENCY_S))
    b.set_handler(StreamKind.CHUNKS, _hold)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    world.kill(b)
    assert await stream.receive_some(10) == b""
    with pytest.raises(NetworkError, match="expected 10 bytes"):
        await stream.receive_exactly(10)
    with pytest.raises(NetworkError):
        await stream.send_all(b"x")
    nursery.cancel_scope.cancel()


async def test_a_sender_gives_up_on_a_reader_that_takes_nothing(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    _, a, b = await _pair(nursery, Link())
    b.set_handler(StreamKind.CHUNKS, _hold)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    await stream.send_all(bytes(2 * STREAM_WINDOW_BYTES))
    began_s = trio.current_time()
    with pytest.raises(NetworkError, match="reader"):
        await stream.send_all(b"one more")
    assert trio.current_time() - began_s == pytest.approx(SLOW_READER_LIMIT_S)
    nursery.cancel_scope.cancel()


async def test_records_end_with_their_time_to_live(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world, a, b = await _pair(nursery, Link())
    world.record_ttl_s = 10.0
    await a.provide(bytes(32))
    await trio.sleep(9)
    assert [h.peer for h in await b.find_providers(bytes(32))] == [a.peer_id]
    await trio.sleep(2)
    assert await b.find_providers(bytes(32)) == []
    nursery.cancel_scope.cancel()


async def test_a_node_that_lost_its_records_knows_nothing(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world = World()
    a, boot, c = [world.network(name) for name in ("a", "boot", "c")]
    for node in (a, boot, c):
        await nursery.start(node.run)
    await a.connect(boot.address, timeout_s=1)
    await a.provide(bytes(32))
    await trio.sleep(1)
    world.kill(a)
    world.lose_records(boot)
    await c.connect(boot.address, timeout_s=1)
    assert await c.find_providers(bytes(32)) == []
    nursery.cancel_scope.cancel()


def test_two_nodes_of_one_name_are_a_mistake() -> None:
    world = World()
    world.network("a")
    with pytest.raises(UsageError, match="twice"):
        world.network("a")


async def test_a_probe_drops_a_connection_that_says_nothing(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    world, a, b = await _pair(nursery, Link(LATENCY_S, RATE))
    world.hang(b)
    await a.probe(b.peer_id, timeout_s=3.0)
    assert a.connected() == []
    assert trio.current_time() == pytest.approx(2 * LATENCY_S + 3.0)
