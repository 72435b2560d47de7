"""The answering end of a bulk connection: its thread reads requests and sends chunks."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from kvnet.errors import KvnetError, PeerUnreachableError
from kvnet.format.hashes import BytesLike
from kvnet.network.bulk.link import Link, run_soon
from kvnet.protocol.chunk_header import chunk_header_frame
from kvnet.protocol.framing import FrameReader, encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import CancelChunks, ChunkRefused, GetChunks, decode_bulk_ask
from kvnet.protocol.messages.refusals import RefusalReason

REST_S: Final = 120.0
"""Seconds without a request after which a connection is closed; the asking side gives it up earlier."""

STALL_S: Final = 30.0
"""Seconds in which a peer that asked must take something of the answer."""

HEADROOM_BYTES: Final = 64
"""Room for a chunk's header in front of its bytes, so that both leave in one piece. A header takes about 40 bytes."""

MAX_ASKED: Final = 64
"""Requests that wait while one is answered; more are left to TCP."""

LOOK_S: Final = 0.005
"""Seconds between two looks for requests while chunks are sent."""

ASK_PIECE_BYTES: Final = 16 * 1024
"""Bytes of requests looked at in one go."""

_logger = logging.getLogger(__name__)

PIECE_S: Final = 0.25
MIN_PIECE_BYTES: Final = 128
"""Bytes that are spread over time go in pieces of so many seconds, and no smaller than this."""

Room = Callable[[int], memoryview]
"""A buffer of so many bytes, valid until the next one is asked for; a chunk read into it is sent without a copy."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Send nothing for so many seconds: the peer has had what it may have."""

    seconds: float


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """Send these bytes, which matched their hash just now, spread over so many seconds."""

    index: int
    data: BytesLike
    spread_s: float = 0.0


def pieces_of(n_bytes: int, spread_s: float) -> int:
    """In how many pieces so many bytes are sent over so many seconds."""
    return max(1, min(math.ceil(spread_s / PIECE_S), n_bytes // MIN_PIECE_BYTES))


Answer = HeldChunk | ChunkRefused | Pause
Answers = Generator[Answer, None, None]


class ChunkSource(Protocol):
    """What a sender gets chunks from."""

    def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
        """Answer each chunk of a request, in its order; may block on the disk.

        Called in the connection's thread; an answer is sent before the next one is asked for.
        """
        ...


class Sender:
    """Answers one peer's requests until it goes.

    Args:
        link: to the peer.
        peer: who it is.
        source: what it gets.
    """

    def __init__(self, link: Link, peer: PeerId, source: ChunkSource) -> None:
        self._link = link
        self._peer = peer
        self._source = source
        self._buffer = memoryview(bytearray())
        self._frames = FrameReader()
        self._piece = memoryview(bytearray(ASK_PIECE_BYTES))
        self._asked: deque[GetChunks] = deque()
        # Requests from here on that are wanted no more, the one that is being answered first.
        self._taken_back = 0
        self._looked_s = 0.0
        self.done = trio.Event()
        self.failure = ""

    def start(self, token: trio.lowlevel.TrioToken, ended: Callable[[], None]) -> None:
        """Start the thread; `ended` is called on the trio side when it is over."""

        def over() -> None:
            thread.join()
            self.done.set()
            ended()

        def run() -> None:
            self.run()
            run_soon(token, over)

        thread = threading.Thread(target=run, name="kvnet-bulk-send", daemon=True)
        thread.start()

    def stop(self) -> None:
        """End the connection; `done` is set soon after, whatever the peer does."""
        self._link.stop()

    def run(self) -> None:
        """Answer until the link is stopped, breaks or rests too long."""
        try:
            while True:
                self._answer(self._next_request())
        except KvnetError as error:
            self.failure = str(error)
        except Exception:
            self.failure = "an error of this program"
            _logger.exception("bulk: sending ended by an error of this program")
        finally:
            self._link.close()

    def _next_request(self) -> GetChunks:
        while not self._asked:
            if not self._look() and not self._link.wait_readable(REST_S):
                raise PeerUnreachableError(f"expected a request within {REST_S:g} s, found silence")
        return self._asked.popleft()

    def _look(self) -> bool:
        """Take what the peer has sent meanwhile; whether that is anything."""
        received = self._link.receive_some(self._piece)
        self._looked_s = time.monotonic()
        for body in self._frames.feed(self._piece[:received]):
            ask = decode_bulk_ask(body)
            if isinstance(ask, CancelChunks):
                # The one that is being answered, too.
                self._taken_back = len(self._asked) + 1
            else:
                self._asked.append(ask)
        return received > 0

    def _answer(self, request: GetChunks) -> None:
        self._taken_back = max(0, self._taken_back - 1)
        n_answered = 0
        if not self._is_taken_back():
            with closing(self._source.answers(self._peer, request, self._room)) as answers:
                for answer in answers:
                    if isinstance(answer, Pause):
                        self._link.pause(answer.seconds)
                    else:
                        self._send_answer(answer)
                        n_answered += 1
                    if time.monotonic() >= self._looked_s + LOOK_S and len(self._asked) < MAX_ASKED:
                        self._look()
                        if self._is_taken_back():
                            break
        # Answers come in the order asked for.
        for index in request.indices[n_answered:] if self._is_taken_back() else ():
            self._send_answer(ChunkRefused(index=index, reason=RefusalReason.CANCELLED))

    def _is_taken_back(self) -> bool:
        """Whether the request that is being answered is wanted no more."""
        return self._taken_back > 0

    def _room(self, n_bytes: int) -> memoryview:
        if len(self._buffer) < HEADROOM_BYTES + n_bytes:
            self._buffer = memoryview(bytearray(HEADROOM_BYTES + n_bytes))
        return self._buffer[HEADROOM_BYTES : HEADROOM_BYTES + n_bytes]

    def _send_answer(self, answer: HeldChunk | ChunkRefused) -> None:
        if isinstance(answer, ChunkRefused):
            self._send(memoryview(encode_frame(encode_message(answer))))
            return
        data = answer.data
        header = chunk_header_frame(answer.index, len(data))
        start = HEADROOM_BYTES - len(header)
        if isinstance(data, memoryview) and data.obj is self._buffer.obj and start >= 0:
            self._buffer[start:HEADROOM_BYTES] = header
            self._send_spread(self._buffer[start : HEADROOM_BYTES + len(data)], answer.spread_s)
        else:
            self._send(memoryview(header))
            self._send_spread(memoryview(data), answer.spread_s)

    def _send_spread(self, view: memoryview, spread_s: float) -> None:
        """In pieces with pauses between, so that a peer is never silent for long."""
        if not spread_s:
            self._send(view)
            return
        n_pieces = pieces_of(len(view), spread_s)
        size = -(-len(view) // n_pieces)
        for start in range(0, len(view), size):
            self._send(view[start : start + size])
            self._link.pause(spread_s / n_pieces)

    def _send(self, view: memoryview) -> None:
        self._link.send_all(view, stall_s=STALL_S)
