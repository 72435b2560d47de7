"""Chunks over a bulk connection, from peers that behave and peers that do not."""

import os
import threading
import tracemalloc
from collections import deque
from dataclasses import dataclass, field

import pytest
import trio

from kvnet.errors import NetworkError, ProtocolViolationError
from kvnet.format.hashes import blake3_hash
from kvnet.network.arrivals import BytesArrived, ChunkArrived, ChunkEvent
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.receiving import AHEAD_BYTES, Receiver
from kvnet.network.bulk.sending import Answers, HeldChunk, Pause, Room, Sender
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import (
    CancelChunks,
    ChunkAnswer,
    ChunkHeader,
    ChunkRefused,
    GetChunks,
    decode_chunk_answer,
)
from tests.loopback.network.bulk.conftest import PEER, Listening
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback

MIB = 1 << 20
Chunks = dict[int, bytes]


def asking(*indices: int) -> GetChunks:
    return GetChunks(session=bytes(16), slot=0, artifact=bytes(32), indices=indices)


def header(index: int, length_bytes: int) -> bytes:
    return encode_frame(encode_message(ChunkHeader(index=index, length_bytes=length_bytes)))


@dataclass
class Source:
    """Gives what it has, from the buffer it is offered."""

    chunks: Chunks
    pause_s: float = 0.0

    def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
        assert peer == PEER
        for index in request.indices:
            data = self.chunks.get(index)
            if data is None:
                yield ChunkRefused(index=index, reason="not_held")
                continue
            if self.pause_s:
                yield Pause(self.pause_s)
            view = room(len(data))
            view[:] = data
            yield HeldChunk(index, view if index % 2 else data)


@dataclass
class Pair:
    """A receiver, and what answers it."""

    receiver: Receiver
    answering: Link
    ahead: deque[ChunkEvent] = field(default_factory=deque)

    async def next(self) -> ChunkEvent:
        """The next event that is no progress."""
        with trio.fail_after(PATIENCE_S):
            while not self.ahead:
                events = await self.receiver.next_events()
                self.ahead.extend(event for event in events if not isinstance(event, BytesArrived))
        return self.ahead.popleft()

    async def end(self) -> None:
        self.receiver.stop()
        with trio.fail_after(PATIENCE_S):
            await self.receiver.done.wait()


async def connect(listening: Listening) -> Pair:
    link = await listening.dial(listening.agree())
    await listening.arrived.wait()
    receiver = Receiver(link, trio.lowlevel.current_trio_token())
    receiver.start(lambda: None)
    return Pair(receiver, listening.links[0])


async def served(listening: Listening, source: Source) -> tuple[Pair, Sender]:
    pair = await connect(listening)
    sender = Sender(pair.answering, PEER, source)
    sender.start(trio.lowlevel.current_trio_token(), lambda: None)
    return pair, sender


async def answered_with(listening: Listening, pieces: list[bytes], request: GetChunks, lengths: dict[int, int]) -> Pair:
    """A peer that answers a request with these bytes, and then says nothing more."""
    pair = await connect(listening)
    pair.receiver.request(request, lengths)

    def answer() -> None:
        pair.answering.receive_frame(silence_s=5)
        for piece in pieces:
            pair.answering.send_all(memoryview(piece), stall_s=5)

    await trio.to_thread.run_sync(answer)
    return pair


async def test_chunks_and_refusals_come_in_the_order_asked_for_with_their_hashes(listening: Listening) -> None:
    chunks = {index: os.urandom(size) for index, size in enumerate([1, 100, MIB, 3 * MIB + 7, 16 * MIB])}
    pair, sender = await served(listening, Source(chunks))
    lengths = {index: len(data) for index, data in chunks.items()} | {9: 5}
    pair.receiver.request(asking(3, 9, 0), lengths)
    pair.receiver.request(asking(4, 1, 2), lengths)
    for index in (3, 9, 0, 4, 1, 2):
        event = await pair.next()
        if index == 9:
            assert event == ChunkRefused(index=9, reason="not_held")
        else:
            assert isinstance(event, ChunkArrived)
            assert (event.index, event.digest) == (index, blake3_hash(chunks[index]))
            assert bytes(event.data) == chunks[index]
            pair.receiver.finished(event.data)
    assert pair.receiver.usable
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_chunks_that_come_together_are_handed_over_together(listening: Listening) -> None:
    chunks = {index: os.urandom(1000) for index in range(200)}
    pair, sender = await served(listening, Source(chunks))
    pair.receiver.request(asking(*chunks), dict.fromkeys(chunks, 1000))
    handed: list[list[ChunkEvent]] = []
    with trio.fail_after(PATIENCE_S):
        while sum(map(len, handed)) < 200:
            handed.append(await pair.receiver.next_events())
    arrived = [event for events in handed for event in events]
    assert [event.index for event in arrived if isinstance(event, ChunkArrived)] == list(chunks)
    assert len(handed) < 200
    assert pair.receiver.usable
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_buffer_of_a_chunk_is_filled_again_only_after_it_was_sent(listening: Listening) -> None:
    size, n = 16 * MIB, 6
    read = [threading.Event() for _ in range(n)]

    class Watched(Source):
        def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
            for index in request.indices:
                view = room(size)
                view[:] = bytes([index]) * size
                read[index].set()
                yield HeldChunk(index, view)

    pair, sender = await served(listening, Watched({}))
    pair.receiver.request(asking(*range(n)), dict.fromkeys(range(n), size))
    # The receiver stops reading when so much waits for somebody to take it: the chunk after that cannot leave.
    stuck = AHEAD_BYTES // size
    assert await trio.to_thread.run_sync(read[stuck].wait, 10)
    assert not read[-1].is_set()
    for index in range(n):
        event = await pair.next()
        assert isinstance(event, ChunkArrived)
        assert event.digest == blake3_hash(bytes([index]) * size)
        pair.receiver.finished(event.data)
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_connection_at_rest_keeps_little_memory_and_works_on(listening: Listening) -> None:
    chunks = dict.fromkeys(range(12), os.urandom(MIB))
    pair, sender = await served(listening, Source(chunks))
    tracemalloc.start()
    try:
        for _ in range(2):
            pair.receiver.request(asking(*chunks), dict.fromkeys(chunks, MIB))
            events = [await pair.next() for _ in chunks]
            for event in events:
                assert isinstance(event, ChunkArrived)
                pair.receiver.finished(event.data)
            del event, events
            before, _ = tracemalloc.get_traced_memory()
            pair.receiver.rest()
            after, _ = tracemalloc.get_traced_memory()
            assert before - after >= 6 * MIB
    finally:
        tracemalloc.stop()
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_requests_that_were_taken_back_leave_the_connection_as_good_as_new(listening: Listening) -> None:
    read: list[int] = []

    class Counted(Source):
        def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
            for answer in super().answers(peer, request, room):
                read.append(len(read))
                yield answer

    chunks = {index: index.to_bytes(2, "big") * (MIB // 2) for index in range(200)}
    pair, sender = await served(listening, Counted(chunks))
    lengths = dict.fromkeys(chunks, MIB)
    for start in range(0, 200, 50):
        pair.receiver.request(asking(*range(start, start + 50)), lengths)
    assert isinstance(await pair.next(), ChunkArrived)
    with trio.fail_after(PATIENCE_S):
        await pair.receiver.cancel()
    pair.ahead.clear()
    assert pair.receiver.usable
    assert len(read) < 150
    for index in (7, 199):
        pair.receiver.request(asking(index), {index: MIB})
        event = await pair.next()
        assert isinstance(event, ChunkArrived)
        assert (event.index, bytes(event.data)) == (index, chunks[index])
    with trio.fail_after(PATIENCE_S):
        await pair.receiver.cancel()  # nothing to take back
    assert pair.receiver.usable
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_request_that_was_taken_back_is_refused_and_the_next_one_answered(listening: Listening) -> None:
    link = await listening.dial(listening.agree())
    await listening.arrived.wait()
    sender = Sender(listening.links[0], PEER, Source({0: b"x", 1: b"y", 2: b"z"}))
    sender.start(trio.lowlevel.current_trio_token(), lambda: None)
    frames = b"".join(encode_frame(encode_message(ask)) for ask in (asking(0, 1), CancelChunks(), asking(2)))

    def ask() -> list[ChunkAnswer]:
        link.send_all(memoryview(frames), stall_s=5)
        return [decode_chunk_answer(link.receive_frame(silence_s=5)) for _ in range(3)]

    assert await trio.to_thread.run_sync(ask) == [
        ChunkRefused(index=0, reason="cancelled"),
        ChunkRefused(index=1, reason="cancelled"),
        ChunkHeader(index=2, length_bytes=1),
    ]
    link.close()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_peer_that_is_silent_makes_no_connection_free_again(listening: Listening) -> None:
    pair = await answered_with(listening, [header(0, MIB)], asking(0), {0: MIB})
    with trio.move_on_after(0.2) as waited:
        await pair.receiver.cancel()
    assert waited.cancelled_caught
    assert not pair.receiver.usable
    await pair.end()
    pair.answering.close()


async def test_pause_of_the_sender_is_kept_and_can_be_ended(listening: Listening) -> None:
    pair, sender = await served(listening, Source({0: b"x"}, pause_s=3600))
    pair.receiver.request(asking(0), {0: 1})
    with trio.move_on_after(0.2) as waited:
        await pair.receiver.next_events()
    assert waited.cancelled_caught
    sender.stop()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()
        with pytest.raises(NetworkError):
            await pair.receiver.next_events()
        await pair.receiver.done.wait()


async def test_wrong_bytes_arrive_with_the_hash_that_shows_it(listening: Listening) -> None:
    data = os.urandom(MIB)
    pair = await answered_with(listening, [header(0, MIB), b"!" + data[1:]], asking(0), {0: MIB})
    event = await pair.next()
    assert isinstance(event, ChunkArrived)
    assert event.digest != blake3_hash(data)
    assert event.digest == blake3_hash(bytes(event.data))
    await pair.end()
    pair.answering.close()


@pytest.mark.parametrize(
    "answer", [header(1, 10), header(0, 11), header(0, 9)], ids=["another chunk", "longer", "shorter"]
)
async def test_chunk_that_was_not_asked_for_is_reported_and_not_read(listening: Listening, answer: bytes) -> None:
    pair = await answered_with(listening, [answer, bytes(100)], asking(0), {0: 10})
    assert isinstance(await pair.next(), ChunkHeader)
    with pytest.raises(ProtocolViolationError, match="a chunk that was asked for"):
        await pair.next()
    await pair.end()
    pair.answering.close()


async def test_bytes_after_everything_was_answered_end_the_connection(listening: Listening) -> None:
    pair = await answered_with(listening, [header(0, 1) + b"x", b"more"], asking(0), {0: 1})
    assert isinstance(await pair.next(), ChunkArrived)
    with pytest.raises(ProtocolViolationError, match="nothing from a peer that was asked nothing"):
        await pair.next()
    assert not pair.receiver.usable
    pair.answering.close()


@pytest.mark.parametrize(
    "junk",
    [b"\xff\xff\xff\xff" + bytes(100), bytes(4), encode_frame(b"\x81" * 500 + b"\0")],
    ids=["4 GB", "0", "nested"],
)
async def test_junk_for_an_answer_ends_the_connection_and_costs_no_memory(listening: Listening, junk: bytes) -> None:
    pair = await answered_with(listening, [junk], asking(0), {0: 10})
    with pytest.raises(ProtocolViolationError):
        await pair.next()
    with trio.fail_after(PATIENCE_S):
        await pair.receiver.done.wait()
    pair.answering.close()


async def test_end_inside_a_chunk_is_an_error(listening: Listening) -> None:
    pair = await answered_with(listening, [header(0, MIB), bytes(MIB // 2)], asking(0), {0: MIB})
    pair.answering.close()
    with pytest.raises(NetworkError):
        await pair.next()


async def test_bytes_of_a_slow_chunk_are_reported_before_it_is_whole(listening: Listening) -> None:
    pair = await answered_with(listening, [header(0, MIB), b"x"], asking(0), {0: MIB})
    with trio.fail_after(PATIENCE_S):
        assert await pair.receiver.next_events() == [BytesArrived(1)]
    await pair.end()
    pair.answering.close()


@pytest.mark.parametrize("pieces", [[], [header(0, MIB)], [header(0, MIB), bytes(MIB // 2)]])
async def test_connection_to_a_peer_that_fell_silent_ends_at_once_when_told_to_and_leaves_no_thread(
    listening: Listening, pieces: list[bytes]
) -> None:
    pair = await answered_with(listening, pieces, asking(0), {0: MIB})
    await pair.end()
    assert [each.name for each in threading.enumerate() if each.name.startswith("kvnet-bulk")] == []
    pair.answering.close()


async def test_receiver_whose_chunks_nobody_takes_stops_reading(listening: Listening) -> None:
    chunks = dict.fromkeys(range(64), bytes(MIB))
    pair, sender = await served(listening, Source(chunks))
    pair.receiver.request(asking(*chunks), dict.fromkeys(chunks, MIB))
    held: list[ChunkArrived] = []
    while len(held) < AHEAD_BYTES // MIB:
        event = await pair.next()
        assert isinstance(event, ChunkArrived)
        held.append(event)
    assert not pair.ahead
    with trio.move_on_after(0.5) as waited:
        while not waited.cancelled_caught:
            assert not any(isinstance(event, ChunkArrived) for event in await pair.receiver.next_events())
    for event in held:
        pair.receiver.finished(event.data)
    for _ in range(64 - len(held)):
        event = await pair.next()
        assert isinstance(event, ChunkArrived)
        pair.receiver.finished(event.data)
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


async def test_buffers_are_used_again(listening: Listening) -> None:
    pair, sender = await served(listening, Source(dict.fromkeys(range(200), bytes(MIB))))
    buffers: set[int] = set()
    for start in range(0, 200, 50):
        indices = range(start, start + 50)
        pair.receiver.request(asking(*indices), dict.fromkeys(indices, MIB))
        for _ in indices:
            event = await pair.next()
            assert isinstance(event, ChunkArrived)
            assert isinstance(event.data, memoryview)
            buffers.add(id(event.data.obj))
            pair.receiver.finished(event.data)
    assert len(buffers) <= AHEAD_BYTES // MIB
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()


@pytest.mark.parametrize(
    "request_", [b"\xff\xff\xff\xff", encode_frame(b"junk"), header(0, 1)], ids=["4 GB", "junk", "an answer"]
)
async def test_sender_ends_the_connection_of_a_peer_that_sends_no_request(
    listening: Listening, request_: bytes
) -> None:
    link = await listening.dial(listening.agree())
    await listening.arrived.wait()
    sender = Sender(listening.links[0], PEER, Source({}))
    sender.start(trio.lowlevel.current_trio_token(), lambda: None)
    await trio.to_thread.run_sync(lambda: link.send_all(memoryview(request_), stall_s=5))
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()
    assert sender.failure
    link.close()


async def test_sender_ends_when_a_peer_takes_nothing_and_is_told_to(listening: Listening) -> None:
    link = await listening.dial(listening.agree())
    await listening.arrived.wait()
    sender = Sender(listening.links[0], PEER, Source(dict.fromkeys(range(64), bytes(MIB))))
    sender.start(trio.lowlevel.current_trio_token(), lambda: None)
    frame = encode_frame(encode_message(asking(*range(64))))
    await trio.to_thread.run_sync(lambda: link.send_all(memoryview(frame), stall_s=5))
    with trio.move_on_after(0.2):
        await sender.done.wait()
    assert not sender.done.is_set()
    sender.stop()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()
    link.close()
