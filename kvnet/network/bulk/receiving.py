"""The asking end of a bulk connection: its thread reads chunks, hashes them as they arrive, and hands them to trio."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import trio
from blake3 import blake3

from kvnet.errors import KvnetError, NetworkError, ProtocolViolationError
from kvnet.format.hashes import BytesLike, ChunkHash
from kvnet.network.arrivals import BytesArrived, ChunkArrived, ChunkEvent
from kvnet.network.bulk.link import Link, run_soon
from kvnet.network.news import News
from kvnet.protocol.chunk_header import chunk_header_frame
from kvnet.protocol.framing import LENGTH_SIZE_BYTES, encode_frame, frame_length
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import CancelChunks, ChunkRefused, GetChunks, decode_chunk_answer

AHEAD_BYTES: Final = 16 * 1024 * 1024
"""Bytes of whole chunks that nobody has done with yet; beyond it the thread stops reading, and the peer sending."""

AT_REST_BYTES: Final = 4 * 1024 * 1024
"""Memory of buffers that a connection keeps between fetches."""

REPORT_S: Final = 0.25
"""How often bytes of a chunk that is not whole are reported, while the thread waits for more."""

TOGETHER_BYTES: Final = 8 * 1024 * 1024
TOGETHER_S: Final = 0.02
"""Whole chunks are handed over together: so many bytes, or whatever has come after so much time. Each handing over
makes both threads wait for the interpreter in turn."""

HASHED_BYTES: Final = 64 * 1024
"""Bytes hashed at a time are a multiple of this, but for the last of a chunk."""

WAIT_S: Final = 3600.0
"""One wait of the thread; who is too slow is decided elsewhere, and then the link is stopped."""

_logger = logging.getLogger(__name__)


class Receiver:
    """Requests go out, chunks come in. Methods belong to the trio side, `run` to the connection's thread.

    Args:
        link: to a peer that answers chunk requests.
        token: of the trio loop.

    Attributes:
        done: set when the thread has ended.
        discarded_bytes: of chunks that came after they were taken back.
    """

    def __init__(self, link: Link, token: trio.lowlevel.TrioToken) -> None:
        self._link = link
        self._token = token
        self._changed = News()
        self.done = trio.Event()
        self._thread: threading.Thread | None = None
        # Written on one side and read on the other; deques and single assignments need no lock.
        self._wanted: deque[tuple[bytes, dict[int, int]]] = deque()
        self._events: deque[ChunkEvent] = deque()
        self._free: deque[bytearray] = deque()
        self._error: KvnetError | None = None
        self._posted_bytes = 0
        self._finished_bytes = 0
        self._full = False
        self._pending = 0
        self._discards = False
        self.discarded_bytes = 0
        # The thread's own.
        self._output = b""
        self._expected: dict[int, int] = {}
        self._largest = 0
        self._unreported = 0
        self._reported_s = 0.0
        self._untold_bytes = 0
        self._untold_s = 0.0
        link.on_wake = self._take_requests

    # --- trio ---

    def start(self, ended: Callable[[], None]) -> None:
        """Start the thread; `ended` is called on the trio side when it is over."""

        def over() -> None:
            if self._thread is not None:
                self._thread.join()
            self.done.set()
            self._notify()
            ended()

        def run() -> None:
            self.run()
            run_soon(self._token, over)

        self._thread = threading.Thread(target=run, name="kvnet-bulk-receive", daemon=True)
        self._thread.start()

    @property
    def stands(self) -> bool:
        """Whether the connection has not broken or ended."""
        return self._error is None and not self.done.is_set()

    @property
    def usable(self) -> bool:
        """Whether the connection stands, and no answer of an earlier request is on its way."""
        return self.stands and not self._pending and not self._events

    def request(self, request: GetChunks, lengths: Mapping[int, int]) -> None:
        """Ask for chunks; goes out at once.

        Args:
            request: what to ask.
            lengths: the length of each chunk asked for: nothing else is allocated or read.
        """
        self._pending += len(request.indices)
        self._wanted.append(
            (encode_frame(encode_message(request)), {index: lengths[index] for index in request.indices})
        )
        self._link.wake()

    async def next_events(self) -> list[ChunkEvent]:
        """What happens next, and all that has happened by then.

        Raises:
            NetworkError: the connection broke or ended.
            ProtocolViolationError: the peer sent something that is no answer.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return [self._take_event() for _ in range(len(self._events))]

    def _take_event(self) -> ChunkEvent:
        event = self._events.popleft()
        if isinstance(event, ChunkArrived | ChunkRefused):
            self._pending -= 1
        return event

    def finished(self, data: BytesLike) -> None:
        """These bytes of a `ChunkArrived` are not needed any more; their buffer is used again."""
        if isinstance(data, memoryview) and isinstance(data.obj, bytearray):
            self._finished_bytes += len(data)
            self._free.append(data.obj)
            if self._full:
                self._link.wake()

    def rest(self) -> None:
        """Nothing will be asked for a while: give back the memory of buffers, but for the first few chunks."""
        kept_bytes = sum(map(len, self._free))
        while kept_bytes > AT_REST_BYTES and self._free:
            # The thread takes none now: nothing is expected.
            kept_bytes -= len(self._free.pop())

    async def cancel(self) -> None:
        """Take back all that was asked for, and throw away what still comes; returns when nothing more will.

        The peer must understand `CancelChunks`. Afterwards the connection is `usable` again, unless it broke.
        """
        if self._pending:
            self._wanted.append((encode_frame(encode_message(CancelChunks())), {}))
            self._link.wake()
        self._discards = True
        self._discard()
        while self._pending and self._error is None:
            await self._changed.wait()
        self._discards = False

    def _discard(self) -> None:
        while self._events:
            event = self._take_event()
            if isinstance(event, ChunkArrived):
                self.discarded_bytes += len(event.data)
                self.finished(event.data)

    def stop(self) -> None:
        """End the connection; `done` is set soon after, whatever the peer does."""
        self._link.stop()

    def _notify(self) -> None:
        if self._discards:
            self._discard()
        self._changed.tell()

    # --- the thread ---

    def run(self) -> None:
        """Read until the link is stopped or breaks."""
        error: KvnetError = NetworkError("the connection ended")
        try:
            while True:
                self._take_requests()
                if self._expected:
                    self._receive_answer()
                else:
                    self._rest()
        except KvnetError as failure:
            error = failure
        except Exception:
            _logger.exception("bulk: receiving ended by an error of this program")
        finally:
            self._error = error
            self._link.close()

    def _post(self, event: ChunkEvent) -> None:
        """Hand over an event, at once."""
        self._events.append(event)
        self._tell()

    def _tell(self) -> None:
        self._untold_bytes = 0
        run_soon(self._token, self._notify)

    def _post_chunk(self, event: ChunkArrived) -> None:
        """Hand over a chunk, soon: with those that are just coming, when there are any."""
        self._events.append(event)
        if not self._untold_bytes:
            self._untold_s = time.monotonic()
        self._untold_bytes += len(event.data)
        if not self._expected or self._untold_bytes >= TOGETHER_BYTES:
            self._tell()
        else:
            self._tell_when_due()

    def _tell_when_due(self) -> float:
        """Hand over what has waited long enough; returns how long the thread may wait for more."""
        if not self._untold_bytes:
            return WAIT_S
        left_s = self._untold_s + TOGETHER_S - time.monotonic()
        if left_s > 0:
            return left_s
        self._tell()
        return WAIT_S

    def _take_requests(self) -> None:
        while self._wanted:
            frame, lengths = self._wanted.popleft()
            self._output += frame
            self._expected.update(lengths)
        while self._output:
            sent = self._link.send_some(memoryview(self._output))
            if not sent:
                return
            self._output = self._output[sent:]

    def _wait(self, missing_bytes: int = 0) -> None:
        """Wait for bytes, or until a request wants to go out.

        Args:
            missing_bytes: of a chunk under way: a thread that woke for each few of them would do little else.
        """
        if self._unreported:
            now_s = time.monotonic()
            if now_s >= self._reported_s + REPORT_S:
                self._post(BytesArrived(self._unreported))
                self._unreported = 0
                self._reported_s = now_s
        wait_s = self._tell_when_due()
        if self._output:
            self._link.wait_both(wait_s)
        else:
            self._link.wait_readable(min(wait_s, REPORT_S) if missing_bytes else wait_s, missing_bytes)
        self._take_requests()

    def _rest(self) -> None:
        """Nothing is asked for: wait for a request. The peer has nothing to say meanwhile."""
        # Looked for first: what is in memory already wakes nobody.
        if self._link.receive_some(memoryview(bytearray(1))):
            raise ProtocolViolationError("expected nothing from a peer that was asked nothing, found bytes")
        self._wait()

    def _receive_answer(self) -> None:
        frame = self._receive_frame()
        # Answers come in the order asked for: nearly always it is this chunk, and nothing needs to be decoded.
        index, length = next(iter(self._expected.items()))
        if frame == chunk_header_frame(index, length):
            del self._expected[index]
            self._receive_chunk(index, length)
            return
        answer = decode_chunk_answer(frame[LENGTH_SIZE_BYTES:])
        expected = self._expected.pop(answer.index, None)
        if isinstance(answer, ChunkRefused):
            self._post(answer)
        elif expected == answer.length_bytes:
            self._receive_chunk(answer.index, expected)
        else:
            # Whoever asked says what that means; not a byte of it is read.
            self._post(answer)
            raise ProtocolViolationError("expected a chunk that was asked for, in its length; found another")

    def _receive_frame(self) -> bytes:
        frame = bytearray(LENGTH_SIZE_BYTES)
        self._fill(memoryview(frame))
        body = bytearray(frame_length(bytes(frame)))
        self._fill(memoryview(body))
        return bytes(frame + body)

    def _receive_chunk(self, index: int, length: int) -> None:
        view = self._buffer(length)
        hasher = blake3()
        filled = hashed = 0
        while filled < length:
            received = self._link.receive_some(view[filled:])
            if received:
                filled += received
                self._unreported += received
                # Hashed while it is still in the processor's cache, and in pieces that BLAKE3 hashes side by side.
                whole = filled - filled % HASHED_BYTES if filled < length else length
                if whole > hashed:
                    hasher.update(view[hashed:whole])
                    hashed = whole
            else:
                self._wait(length - filled)
            if self._wanted:
                self._take_requests()
        self._link.check()
        self._unreported = 0
        self._posted_bytes += length
        self._post_chunk(ChunkArrived(index, view, ChunkHash(hasher.digest())))

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            received = self._link.receive_some(view[filled:])
            filled += received
            if not received:
                self._wait()

    def _buffer(self, n_bytes: int) -> memoryview:
        """Room for a chunk, once so much has been done with that memory stays bounded."""
        while 0 < self._posted_bytes - self._finished_bytes > AHEAD_BYTES - n_bytes:
            self._full = True
            if self._untold_bytes:
                self._tell()
            # Looked at again after the flag is set: what was done with in between would wake nobody.
            if 0 < self._posted_bytes - self._finished_bytes > AHEAD_BYTES - n_bytes:
                self._link.wait_woken(WAIT_S)
            self._full = False
        self._largest = max(self._largest, n_bytes)
        while self._free:
            buffer = self._free.popleft()
            if len(buffer) >= n_bytes:
                return memoryview(buffer)[:n_bytes]
        return memoryview(bytearray(self._largest))[:n_bytes]
