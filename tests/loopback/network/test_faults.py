"""What the adapter makes of processes that die, stop, misbehave, and of cancellations in the middle of things."""

import hashlib
import struct
from contextlib import suppress

import pytest
import trio
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA, YAMUX_HEADER_FORMAT

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.interface import STREAM_WINDOW_BYTES, ByteStream, StreamKind
from kvnet.network.libp2p import muxer, streams
from kvnet.network.libp2p.connections import swarm_of
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.network.libp2p.muxer import BUFFER_LIMIT_BYTES, SafeYamux
from kvnet.network.libp2p.translate import FOREIGN
from kvnet.protocol.ids import PeerId
from tests.loopback.network.conftest import PATIENCE_S, SpawnPeer, StartNode

pytestmark = pytest.mark.loopback

MIB = 1024 * 1024


async def _ask(stream: ByteStream, payload: bytes) -> bytes:
    await stream.send_all(len(payload).to_bytes(4, "big") + payload)
    return await stream.receive_exactly(int.from_bytes(await stream.receive_exactly(4), "big"))


SOON_S = 10.0
"""Sooner than by silence, which a write waits out for 15 s and a read for 30 s."""


async def _echo(peer: PeerId, stream: ByteStream) -> None:
    while size := await stream.receive_some(4):
        size += await stream.receive_exactly(4 - len(size))
        await stream.send_all(size + await stream.receive_exactly(int.from_bytes(size, "big")))


async def _pair(start_node: StartNode) -> tuple[LibP2PNetwork, LibP2PNetwork]:
    a, b = await start_node("a"), await start_node("b")
    b.set_handler(StreamKind.CONTROL, _echo)
    await a.connect(b.addresses()[0], timeout_s=PATIENCE_S)
    return a, b


def _muxed(network: LibP2PNetwork) -> SafeYamux:
    assert network._host is not None
    (connection,) = swarm_of(network._host).get_connections()
    assert isinstance(connection.muxed_conn, SafeYamux)
    return connection.muxed_conn


async def test_a_killed_sender_is_an_error_although_it_looks_like_a_clean_end(
    start_node: StartNode, spawn_peer: SpawnPeer
) -> None:
    a, other = await start_node("a"), spawn_peer()
    peer = await a.connect(other.address, timeout_s=PATIENCE_S)
    stream = await a.open_stream(peer, StreamKind.CHUNKS)
    await stream.send_all(b"H")
    size = int.from_bytes(await stream.receive_exactly(4), "big")
    await stream.receive_exactly(MIB)
    other.kill()
    with pytest.raises(NetworkError), trio.fail_after(SOON_S):
        await stream.receive_exactly(size - MIB)


async def test_a_killed_reader_fails_the_sender_soon(start_node: StartNode, spawn_peer: SpawnPeer) -> None:
    a, other = await start_node("a"), spawn_peer()
    peer = await a.connect(other.address, timeout_s=PATIENCE_S)
    stream = await a.open_stream(peer, StreamKind.CHUNKS)
    await stream.send_all(b"S" + bytes(MIB))
    other.kill()
    with pytest.raises(NetworkError), trio.fail_after(SOON_S):
        while True:
            await stream.send_all(bytes(MIB))
    with pytest.raises(PeerUnreachableError):
        await a.connect(other.address, timeout_s=PATIENCE_S)


async def test_a_stopped_process_is_given_up_after_the_idle_timeout(
    start_node: StartNode, spawn_peer: SpawnPeer
) -> None:
    a, stopped, fine = await start_node("a"), spawn_peer("stopped"), spawn_peer("fine")
    peer = await a.connect(stopped.address, timeout_s=PATIENCE_S)
    honest = await a.open_stream(await a.connect(fine.address, timeout_s=PATIENCE_S), StreamKind.CONTROL)
    stream = await a.open_stream(peer, StreamKind.CONTROL)
    assert await _ask(stream, b"1") == b"1"
    stopped.stop()
    stream.idle_timeout_s = 0.3
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(PeerUnreachableError, match="silence"):
            await stream.receive_exactly(1)
        assert peer not in [p.peer for p in a.connected()]
        with pytest.raises(PeerUnreachableError):  # its kernel still accepts; nobody shakes hands
            await a.connect(stopped.address, timeout_s=0.5)
        assert await _ask(honest, b"others go on") == b"others go on"


async def test_a_stream_to_a_stopped_process_is_not_waited_for(start_node: StartNode, spawn_peer: SpawnPeer) -> None:
    a, stopped = await start_node("a"), spawn_peer("stopped")
    peer = await a.connect(stopped.address, timeout_s=PATIENCE_S)
    stopped.stop()
    with pytest.raises(PeerUnreachableError), trio.fail_after(SOON_S):
        await a.open_stream(peer, StreamKind.CONTROL, timeout_s=0.3)


async def test_a_connection_on_which_nothing_comes_is_closed_although_nobody_waits(
    start_node: StartNode, spawn_peer: SpawnPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muxer, "PING_INTERVAL_S", 0.05)
    # The other one answers pings, but not always within half a second on a busy machine.
    monkeypatch.setattr(muxer, "SILENCE_LIMIT_S", 2.0)
    a, stopped, fine = await start_node("a"), spawn_peer("stopped"), spawn_peer("fine")
    await a.connect(stopped.address, timeout_s=PATIENCE_S)
    honest = await a.connect(fine.address, timeout_s=PATIENCE_S)
    stopped.stop()
    with trio.fail_after(PATIENCE_S):
        while len(a.connected()) > 1:  # noqa: ASYNC110 — a network has no event for this
            await trio.sleep(0.02)
    assert [p.peer for p in a.connected()] == [honest]


async def test_cancelled_writes_leave_the_connection_whole(start_node: StartNode) -> None:
    a, b = await _pair(start_node)
    held = trio.Event()

    async def swallow(peer: PeerId, stream: ByteStream) -> None:
        while await stream.receive_some(MIB):
            pass

    b.set_handler(StreamKind.CHUNKS, swallow)
    good = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    before = _muxed(a)
    for round_number in range(40):
        doomed = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
        with trio.move_on_after(0.001 * (round_number % 10)):
            await doomed.send_all(bytes(64 * MIB))
        assert await _ask(good, b"whole") == b"whole"
    assert _muxed(a) is before
    held.set()


async def test_cancelled_reads_in_the_middle_of_bulk_leave_the_connection_whole(
    start_node: StartNode, spawn_peer: SpawnPeer
) -> None:
    a, other = await start_node("a"), spawn_peer()
    peer = await a.connect(other.address, timeout_s=PATIENCE_S)
    before = _muxed(a)
    stream = await a.open_stream(peer, StreamKind.CHUNKS)
    await stream.send_all(b"B" + (24).to_bytes(2, "big") + (256).to_bytes(2, "big"))
    received = 0
    while received < 24 * MIB:
        with trio.move_on_after(0.003):
            received += len(await stream.receive_exactly(3 * 64 * 1024 if received < 23 * MIB else 64 * 1024))
    assert received == 24 * MIB
    assert await stream.receive_some(1) == b""
    assert _muxed(a) is before


async def test_cancelled_lookups_leave_the_connection_whole(start_node: StartNode) -> None:
    a, b = await _pair(start_node)
    good = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    before = _muxed(a)
    for round_number in range(30):
        await a.find_providers(bytes([round_number]) * 32, timeout_s=0.0005 * (round_number % 10))
        assert await _ask(good, b"whole") == b"whole"
    assert _muxed(a) is before


async def test_streams_opened_by_callers_who_left_do_not_pile_up(start_node: StartNode) -> None:
    a, b = await _pair(start_node)
    free = _muxed(a).stream_backlog_semaphore.value
    for round_number in range(40):
        with trio.move_on_after(0.0005 * (round_number % 10)):
            await (await a.open_stream(b.peer_id, StreamKind.CONTROL)).reset()
    with trio.fail_after(PATIENCE_S):
        while _muxed(a).stream_backlog_semaphore.value < free:  # noqa: ASYNC110 — the semaphore tells nobody
            await trio.sleep(0.01)


async def test_a_sender_far_ahead_of_its_reader_is_reset_and_memory_stays_bounded(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FULL_BUFFER_LIMIT_S", 0.2)
    a, b = await _pair(start_node)
    release = trio.Event()
    held: list[ByteStream] = []

    async def never_read(peer: PeerId, stream: ByteStream) -> None:
        held.append(stream)
        await release.wait()

    b.set_handler(StreamKind.CHUNKS, never_read)
    greedy = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    with pytest.raises(NetworkError), trio.fail_after(PATIENCE_S):
        for _ in range(200):
            await greedy.send_all(bytes(MIB))
    with pytest.raises(NetworkError, match="ahead of the reader"):
        await held[0].receive_exactly(4 * STREAM_WINDOW_BYTES)
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"still served") == b"still served"
    release.set()


async def test_a_peer_that_ignores_its_window_is_cut_off_before_it_fills_our_memory(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FULL_BUFFER_LIMIT_S", 60.0)
    a, b = await _pair(start_node)
    c = await start_node("c")
    release = trio.Event()
    most_held = 0

    async def never_read(peer: PeerId, stream: ByteStream) -> None:
        await release.wait()

    b.set_handler(StreamKind.CHUNKS, never_read)
    greedy = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    held = _muxed(b).stream_buffers
    greedy._raw.muxed_stream.send_window = 2**40  # type: ignore[attr-defined]
    with pytest.raises(NetworkError), trio.fail_after(PATIENCE_S):
        for _ in range(400):
            await greedy.send_all(bytes(MIB))
            most_held = max(most_held, sum(map(len, held.values())))
    assert most_held <= BUFFER_LIMIT_BYTES
    await c.connect(b.addresses()[0], timeout_s=PATIENCE_S)
    assert await _ask(await c.open_stream(b.peer_id, StreamKind.CONTROL), b"served") == b"served"
    release.set()


async def test_a_failing_handler_does_not_end_the_process(start_node: StartNode) -> None:
    a, b = await _pair(start_node)

    async def fail(peer: PeerId, stream: ByteStream) -> None:
        raise ExceptionGroup("several", [ValueError("a bug"), KeyError("another")])

    b.set_handler(StreamKind.CHUNKS, fail)
    for _ in range(5):
        with pytest.raises(NetworkError):
            await (await a.open_stream(b.peer_id, StreamKind.CHUNKS)).receive_exactly(1)
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"alive") == b"alive"


@pytest.mark.parametrize(
    "junk", [b"\x05\xff\xfe\xfd\xfc\n", b"\xff" * 20, b"\x00", b"\x03ls\n" * 50, b"\x80\x80\x80\x04"]
)
async def test_junk_while_a_protocol_is_agreed_on_does_not_end_the_process(start_node: StartNode, junk: bytes) -> None:
    a, b = await _pair(start_node)
    assert a._host is not None
    (connection,) = swarm_of(a._host).get_connections()
    raw = await connection.new_stream()
    assert isinstance(raw, NetStream)
    await raw.write(b"\x13/multistream/1.0.0\n" + junk)
    await raw.muxed_stream.close()
    with trio.move_on_after(0.5), suppress(*FOREIGN):
        while True:
            await raw.read(1024)
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"alive") == b"alive"


async def test_four_hundred_silent_connections_do_not_keep_an_honest_peer_out(start_node: StartNode) -> None:
    b, a = await start_node("b"), await start_node("a")
    b.set_handler(StreamKind.CONTROL, _echo)
    port = int(b.addresses()[0].split("/")[4])
    silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(400)]
    peer = await a.connect(b.addresses()[0], timeout_s=PATIENCE_S)
    assert await _ask(await a.open_stream(peer, StreamKind.CONTROL), b"served") == b"served"
    for each in silent:
        await trio.aclose_forcefully(each)


async def test_a_frame_that_declares_four_gigabytes_ends_its_connection_only(start_node: StartNode) -> None:
    a, b = await _pair(start_node)
    c = await start_node("c")
    await c.connect(b.addresses()[0], timeout_s=PATIENCE_S)
    await _muxed(a)._write_frame(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, 1, 2**32 - 1))
    with trio.fail_after(PATIENCE_S):
        while a.peer_id in [p.peer for p in b.connected()]:  # noqa: ASYNC110 — a network has no event for this
            await trio.sleep(0.01)
    assert await _ask(await c.open_stream(b.peer_id, StreamKind.CONTROL), b"served") == b"served"


async def test_ten_thousand_junk_frames_do_no_harm(start_node: StartNode) -> None:
    a, b = await _pair(start_node)
    junk = [struct.pack(YAMUX_HEADER_FORMAT, n % 3, n % 7, 0, 1000 + n, 0) for n in range(200) if n % 7 != 3]
    for _ in range(10_000 // len(junk) + 1):
        await _muxed(a)._write_frame(b"".join(junk))
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"served") == b"served"


async def test_junk_instead_of_a_handshake_keeps_nobody_out(start_node: StartNode) -> None:
    a, b = await start_node("a"), await start_node("b")
    b.set_handler(StreamKind.CONTROL, _echo)
    port = int(b.addresses()[0].split("/")[4])
    for seed in range(50):
        tcp = await trio.open_tcp_stream("127.0.0.1", port)
        with suppress(trio.BrokenResourceError):
            await tcp.send_all(hashlib.shake_128(bytes([seed])).digest(2000))
        await trio.aclose_forcefully(tcp)
    peer = await a.connect(b.addresses()[0], timeout_s=PATIENCE_S)
    assert await _ask(await a.open_stream(peer, StreamKind.CONTROL), b"served") == b"served"


async def test_plaintext_is_not_offered(start_node: StartNode) -> None:
    b = await start_node("b")
    port = int(b.addresses()[0].split("/")[4])
    offers = (b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0")
    async with await trio.open_tcp_stream("127.0.0.1", port) as tcp:
        await tcp.send_all(b"\x13/multistream/1.0.0\n")
        answer = bytearray()
        for offer in offers:
            await tcp.send_all(bytes([len(offer) + 1]) + offer + b"\n")
        with trio.fail_after(PATIENCE_S):
            while answer.count(b"na\n") < len(offers):
                answer += await tcp.receive_some(1024)
    assert not any(offer in answer for offer in offers)


async def test_somebody_else_at_the_address_is_not_accepted(start_node: StartNode) -> None:
    a, b = await start_node("a"), await start_node("b")
    other = LibP2PNetwork(hashlib.sha256(b"other").digest(), listen=["127.0.0.1:0"])
    base = b.addresses()[0].rpartition("/")[0]
    with pytest.raises(PeerUnreachableError, match="somebody else"):
        await a.connect(f"{base}/{ID(other.peer_id)}", timeout_s=PATIENCE_S)
    assert await a.connect(b.addresses()[0], timeout_s=PATIENCE_S) == b.peer_id


async def test_a_probe_drops_a_connection_whose_peer_has_stopped(start_node: StartNode, spawn_peer: SpawnPeer) -> None:
    a, stopped = await start_node("a"), spawn_peer("stopped")
    peer = await a.connect(stopped.address, timeout_s=PATIENCE_S)
    await a.probe(peer, timeout_s=PATIENCE_S)
    assert a.connected()
    stopped.stop()
    with trio.fail_after(PATIENCE_S):
        while a.connected():  # what it had sent before it was stopped still counts as an answer
            await a.probe(peer, timeout_s=0.3)
