"""What every network keeps to, whichever one it is."""

import pytest
import trio
import trio.testing

from kvnet.errors import NetworkError, PeerRefusedError, PeerUnreachableError, UsageError
from kvnet.network.dialing import connect_any
from kvnet.network.interface import STREAM_WINDOW_BYTES, ByteStream, Network, ProviderHint, StreamKind
from kvnet.protocol.ids import PeerId
from tests.contract.network.conftest import Lab

KEY = bytes(range(32))


async def _connected_pair(lab: Lab) -> tuple[Network, Network]:
    a, b = await lab.start("a"), await lab.start("b")
    assert await a.connect(b.addresses()[0], timeout_s=60) == b.peer_id
    return a, b


async def _echo(peer: PeerId, stream: ByteStream) -> None:
    while True:
        size = await stream.receive_some(4)
        if not size:
            return
        size += await stream.receive_exactly(4 - len(size)) if len(size) < 4 else b""
        await stream.send_all(size + await stream.receive_exactly(int.from_bytes(size, "big")))


async def _ask(stream: ByteStream, payload: bytes) -> bytes:
    await stream.send_all(len(payload).to_bytes(4, "big") + payload)
    return await stream.receive_exactly(int.from_bytes(await stream.receive_exactly(4), "big"))


async def _wait_for_disconnection(network: Network, peer: PeerId) -> None:
    with trio.fail_after(60):
        while peer in [p.peer for p in network.connected()]:  # noqa: ASYNC110 — a network has no event for this
            await trio.sleep(0.01)


async def test_each_side_knows_who_the_other_is(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    seen: list[PeerId] = []
    answered = trio.Event()

    async def note(peer: PeerId, stream: ByteStream) -> None:
        seen.extend((peer, stream.peer))
        answered.set()

    b.set_handler(StreamKind.CONTROL, note)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    await answered.wait()
    assert seen == [a.peer_id, a.peer_id]
    assert (stream.peer, stream.kind) == (b.peer_id, StreamKind.CONTROL)
    assert [p.peer for p in a.connected()] == [b.peer_id]
    assert [p.peer for p in b.connected()] == [a.peer_id]
    assert b.addresses()[0] in a.connected()[0].addresses


async def test_messages_pass_in_both_directions_on_one_stream(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    b.set_handler(StreamKind.CONTROL, _echo)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    for payload in (b"", b"x", bytes(200_000)):
        assert await _ask(stream, payload) == payload
    await stream.aclose()


async def test_bulk_bytes_arrive_whole_and_in_order(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    data = bytes(range(256)) * 4096 * 4

    async def serve(peer: PeerId, stream: ByteStream) -> None:
        await stream.send_all(len(data).to_bytes(4, "big"))
        await stream.send_all(memoryview(data))

    b.set_handler(StreamKind.CHUNKS, serve)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    size = int.from_bytes(await stream.receive_exactly(4), "big")
    parts = [await stream.receive_exactly(min(70_001, size - at)) for at in range(0, size, 70_001)]
    assert b"".join(parts) == data
    assert await stream.receive_some(1) == b""


async def test_a_failing_handler_costs_its_own_stream_only(lab: Lab) -> None:
    a, b = await _connected_pair(lab)

    async def fail(peer: PeerId, stream: ByteStream) -> None:
        raise RuntimeError("a bug in a handler")

    b.set_handler(StreamKind.CONTROL, _echo)
    b.set_handler(StreamKind.CHUNKS, fail)
    good = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    with pytest.raises(NetworkError):  # at once, or at the first use
        await (await a.open_stream(b.peer_id, StreamKind.CHUNKS)).receive_exactly(1)
    assert await _ask(good, b"still here") == b"still here"
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"and anew") == b"and anew"


async def test_a_protocol_without_handler_is_refused(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    with pytest.raises(PeerRefusedError) as refused:
        await a.open_stream(b.peer_id, StreamKind.CONTROL)
    assert refused.value.reason == "protocol"


async def test_an_address_where_nobody_listens_is_an_error_that_says_so(lab: Lab) -> None:
    a = await lab.start("a")
    with pytest.raises(PeerUnreachableError, match="expected"):
        await a.connect(lab.dead_address, timeout_s=60)
    assert a.connected() == []


@pytest.mark.parametrize("address", ["", "localhost:5864", "/ip4/127.0.0.1/tcp/1", "/p2p/abc", "x" * 10_000])
async def test_a_malformed_address_is_a_usage_error(lab: Lab, address: str) -> None:
    a = await lab.start("a")
    with pytest.raises(UsageError):
        await a.connect(address, timeout_s=1)


async def test_our_own_address_is_not_dialled(lab: Lab) -> None:
    a = await lab.start("a")
    with pytest.raises(PeerUnreachableError):
        await a.connect(a.addresses()[0], timeout_s=1)


async def test_opening_a_stream_to_a_stranger_is_an_error(lab: Lab) -> None:
    a, b = await lab.start("a"), await lab.start("b")
    with pytest.raises(PeerUnreachableError):
        await a.open_stream(b.peer_id, StreamKind.CONTROL)


async def test_a_stream_that_ends_early_is_an_error_not_a_short_result(lab: Lab) -> None:
    a, b = await _connected_pair(lab)

    async def half(peer: PeerId, stream: ByteStream) -> None:
        await stream.send_all(b"12345")

    b.set_handler(StreamKind.CHUNKS, half)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    with pytest.raises(NetworkError, match="expected 10 bytes, the stream ended after 5"):
        await stream.receive_exactly(10)


async def test_a_cancelled_wait_for_bytes_loses_none(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    b.set_handler(StreamKind.CONTROL, _echo)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    for round_number in range(20):
        with trio.move_on_after(0.002):
            await stream.receive_exactly(4)
        payload = round_number.to_bytes(2, "big") * 100
        assert await _ask(stream, payload) == payload


async def test_a_cancelled_send_costs_its_own_stream_only(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    never = trio.Event()

    async def never_read(peer: PeerId, stream: ByteStream) -> None:
        await never.wait()

    b.set_handler(StreamKind.CONTROL, _echo)
    b.set_handler(StreamKind.CHUNKS, never_read)
    good = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    for _ in range(8):
        doomed = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
        with trio.move_on_after(0.02):
            await doomed.send_all(bytes(100 * 1024 * 1024))
        with pytest.raises(NetworkError):
            await doomed.send_all(b"more")
            await doomed.receive_exactly(1)
        assert await _ask(good, b"untouched") == b"untouched"
    never.set()


async def test_reset_wakes_a_waiting_reader(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    b.set_handler(StreamKind.CONTROL, _echo)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(NetworkError):
                    await stream.receive_exactly(1)

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await stream.reset()


async def test_a_reset_reaches_the_other_side(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    failed = trio.Event()

    async def read(peer: PeerId, stream: ByteStream) -> None:
        try:
            await stream.receive_exactly(1)
        except NetworkError:
            failed.set()

    b.set_handler(StreamKind.CONTROL, read)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    await stream.reset()
    with trio.fail_after(60):
        await failed.wait()


async def test_a_silent_peer_loses_its_connection_after_the_idle_timeout(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    release = trio.Event()

    async def silent(peer: PeerId, stream: ByteStream) -> None:
        await stream.send_all(b"1")
        await release.wait()

    b.set_handler(StreamKind.CHUNKS, silent)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    assert stream.idle_timeout_s is not None
    stream.idle_timeout_s = 0.2
    with pytest.raises(PeerUnreachableError, match="silence"):
        await stream.receive_exactly(2)
    await _wait_for_disconnection(a, b.peer_id)
    await _wait_for_disconnection(b, a.peer_id)
    release.set()


async def test_control_streams_may_be_idle(lab: Lab) -> None:
    assert StreamKind.CONTROL.default_idle_timeout_s is None


async def test_a_reader_that_is_busy_elsewhere_gets_everything_it_asked_for(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    sent = trio.Event()

    async def serve(peer: PeerId, stream: ByteStream) -> None:
        for _ in range(STREAM_WINDOW_BYTES // (1024 * 1024)):
            await stream.send_all(bytes(1024 * 1024))
        sent.set()
        await stream.receive_some(1)

    b.set_handler(StreamKind.CHUNKS, serve)
    stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
    with trio.fail_after(60):
        await sent.wait()  # the sender is done although nobody has read a byte
    assert len(await stream.receive_exactly(STREAM_WINDOW_BYTES)) == STREAM_WINDOW_BYTES
    await stream.aclose()


async def test_a_peer_with_too_many_streams_is_refused_more(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    release = trio.Event()

    async def hold(peer: PeerId, stream: ByteStream) -> None:
        await stream.send_all(b"!")
        await release.wait()

    b.set_handler(StreamKind.CHUNKS, hold)
    with pytest.raises(NetworkError):
        for _ in range(100):
            stream = await a.open_stream(b.peer_id, StreamKind.CHUNKS)
            await stream.receive_exactly(1)
    release.set()


async def test_disconnect_ends_the_streams_of_both_sides(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    b.set_handler(StreamKind.CONTROL, _echo)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    assert await _ask(stream, b"before") == b"before"
    await b.disconnect(a.peer_id)
    await _wait_for_disconnection(a, b.peer_id)
    with pytest.raises(NetworkError):
        await _ask(stream, b"after")
    assert await a.connect(b.addresses()[0], timeout_s=60) == b.peer_id
    assert await _ask(await a.open_stream(b.peer_id, StreamKind.CONTROL), b"again") == b"again"


async def test_a_stopped_node_ends_streams_and_is_not_reached_again(lab: Lab) -> None:
    a, b = await _connected_pair(lab)
    address = b.addresses()[0]
    b.set_handler(StreamKind.CONTROL, _echo)
    stream = await a.open_stream(b.peer_id, StreamKind.CONTROL)
    assert await _ask(stream, b"before") == b"before"
    await lab.stop(b)
    with pytest.raises(NetworkError), trio.fail_after(60):
        await stream.receive_exactly(1)
    await _wait_for_disconnection(a, b.peer_id)
    assert b.addresses() == []
    with pytest.raises(PeerUnreachableError):
        await a.connect(address, timeout_s=60)


async def test_a_hint_is_reached_at_the_address_that_answers(lab: Lab) -> None:
    a, b = await lab.start("a"), await lab.start("b")
    hint = ProviderHint(b.peer_id, (lab.dead_address, "nonsense", b.addresses()[0]))
    assert await a.connect_hint(hint) == b.peer_id


async def test_an_address_that_failed_is_not_dialled_again_at_once(lab: Lab) -> None:
    a, b = await lab.start("a"), await lab.start("b")
    address = b.addresses()[0]
    await lab.stop(b)
    hint = ProviderHint(b.peer_id, (address,))
    with pytest.raises(PeerUnreachableError, match="none"):
        await a.connect_hint(hint)
    with pytest.raises(PeerUnreachableError, match="failed lately"):
        await a.connect_hint(hint)


async def test_of_many_hints_the_living_ones_are_connected(lab: Lab) -> None:
    a, b, c = [await lab.start(name) for name in "abc"]
    dead = ProviderHint(c.peer_id, (lab.dead_address,))
    alive = ProviderHint(b.peer_id, tuple(b.addresses()))
    assert await connect_any(a, [dead, alive], wanted=2) == [b.peer_id]


async def _provide(network: Network, key: bytes) -> int:
    reported = trio.Event()
    sent_to: list[int] = []

    def report(reported_key: bytes, count: int) -> None:
        assert reported_key == key
        sent_to.append(count)
        reported.set()

    await network.provide(key, report=report)
    with trio.fail_after(60):
        await reported.wait()
    return sent_to[0]


async def test_a_provider_is_found_through_a_third_node(lab: Lab) -> None:
    boot = await lab.start("boot")
    a, b = [await lab.start(name) for name in "ab"]
    for node in (a, b):
        await node.connect(boot.addresses()[0], timeout_s=60)
    assert await _provide(a, KEY) >= 1
    assert await b.find_providers(KEY) == [ProviderHint(a.peer_id, tuple(a.addresses()))]
    assert await b.find_providers(bytes(32)) == []


async def test_a_lookup_never_answers_with_ourselves_and_names_each_provider_once(lab: Lab) -> None:
    boot = await lab.start("boot")
    a, b, c = [await lab.start(name, bootstrap=boot.addresses()) for name in "abc"]
    for node in (a, b, c):
        await node.connect(boot.addresses()[0], timeout_s=60)
    await _provide(a, KEY)
    await _provide(b, KEY)
    for _ in range(2):  # what the first lookup learnt does not change the second
        assert {h.peer for h in await a.find_providers(KEY)} == {b.peer_id}
        found = [h.peer for h in await c.find_providers(KEY)]
        assert sorted(found) == sorted([a.peer_id, b.peer_id])
        assert len(await c.find_providers(KEY, limit=1)) == 1


async def test_records_that_a_server_drops_for_coming_too_fast_do_not_count_as_sent(lab: Lab) -> None:
    server, a = [await lab.start(name) for name in ("server", "a")]
    await a.connect(server.addresses()[0], timeout_s=60)
    counts = [await _provide(a, bytes([n]) * 32) for n in range(13)]
    assert counts == [1] * 10 + [0] * 3
    assert [h.peer for h in await server.find_providers(bytes([9]) * 32)] == [a.peer_id]


async def test_a_key_is_32_bytes(lab: Lab) -> None:
    a = await lab.start("a")
    with pytest.raises(ValueError, match="32"):
        await a.provide(b"short")
    with pytest.raises(ValueError, match="32"):
        await a.find_providers(b"short")


async def test_announcing_alone_reports_that_nobody_heard_it(lab: Lab) -> None:
    a = await lab.start("a")
    assert a.routing_peers() == 0
    assert await _provide(a, KEY) == 0


async def test_a_provider_that_started_alone_is_found_once_others_are_there(lab: Lab) -> None:
    a = await lab.start("a")
    assert await _provide(a, KEY) == 0
    boot = await lab.start("boot")
    b = await lab.start("b")
    for node in (a, b):
        await node.connect(boot.addresses()[0], timeout_s=60)
    assert await _provide(a, KEY) >= 1
    assert [h.peer for h in await b.find_providers(KEY)] == [a.peer_id]


async def test_a_dead_provider_stays_listed_and_costs_one_quick_dial(lab: Lab) -> None:
    boot = await lab.start("boot")
    a, b = [await lab.start(name, bootstrap=boot.addresses()) for name in "ab"]
    for node in (a, b):
        await node.connect(boot.addresses()[0], timeout_s=60)
    await _provide(a, KEY)
    await lab.stop(a)
    await _wait_for_disconnection(b, a.peer_id)
    hints = await b.find_providers(KEY)
    assert [h.peer for h in hints] == [a.peer_id]
    assert await connect_any(b, hints, wanted=1) == []


async def test_a_probe_leaves_a_connection_alone_that_answers(lab: Lab) -> None:
    a, b = await lab.start("a"), await lab.start("b")
    await a.connect(b.addresses()[0], timeout_s=60)
    await a.probe(b.peer_id, timeout_s=60)
    await a.probe(b.peer_id, timeout_s=60)
    assert [info.peer for info in a.connected()] == [b.peer_id]
    await a.disconnect(b.peer_id)
    await a.probe(b.peer_id)
