"""Streams over py-libp2p that may be cancelled, abandoned or read slowly without harm to their connection.

Each stream has a pump: a task that reads all the time into a bounded buffer. So an idle or cancelled reader never
touches the connection; the multiplexer, which gives a sender 5 s, sees a reader that is always there; and `reset`
wakes a waiting reader, which py-libp2p's own reset does not.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.exceptions import StreamEOF

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.interface import STREAM_WINDOW_BYTES, ByteStream, StreamKind
from kvnet.network.libp2p.translate import FOREIGN, translate_stream
from kvnet.network.news import News
from kvnet.network.receiving import receive_in_parts
from kvnet.protocol.ids import PeerId

BUFFER_LIMIT_BYTES = 2 * STREAM_WINDOW_BYTES
"""Twice what a reader may have asked for: a peer that answers what it was asked never meets this limit."""

FULL_BUFFER_LIMIT_S = 4.0
"""How long the pump waits for a reader when the buffer is full; below the 5 s after which the sender gives up."""

LINGER_S = 10.0
"""How long a closed stream waits for the peer to end its side before it is reset."""

_READ_BYTES = 256 * 1024
_WRITE_BYTES = 1024 * 1024


class StreamOwner(Protocol):
    """What a stream needs of its host."""

    def start_task(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that raises nothing, until the host stops; does nothing when it has stopped."""

    async def disconnect(self, peer: PeerId) -> None:
        """Drop every connection to `peer`."""


class LibP2PStream(ByteStream):
    """One stream. Its pump is started by whoever makes it (`start`).

    Args:
        raw: py-libp2p's stream, which nobody else reads or writes.
        peer: the peer at the other end.
        kind: which protocol the stream speaks.
        owner: the host; runs the pump.
    """

    def __init__(self, raw: INetStream, peer: PeerId, kind: StreamKind, owner: StreamOwner) -> None:
        self.idle_timeout_s = kind.default_idle_timeout_s
        self._raw = raw
        self._peer = peer
        self._kind = kind
        self._owner = owner
        self._parts: deque[memoryview] = deque()  # views, so that taking a header copies no more than it
        self._buffered_bytes = 0
        self._ended = False
        self._error: NetworkError | None = None
        self._closed = False
        self._changed = News()
        self._pump_scope = trio.CancelScope()
        self._pump_done = trio.Event()
        self._send_lock = trio.Lock()

    @property
    def peer(self) -> PeerId:
        """The peer at the other end, as Noise proved it."""
        return self._peer

    @property
    def kind(self) -> StreamKind:
        """Which protocol the stream speaks."""
        return self._kind

    def start(self) -> None:
        """Begin to read."""
        self._owner.start_task(self._pump)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream.send_all`."""
        view = memoryview(data).cast("B")
        async with self._send_lock:
            if self._error is not None or self._closed:
                raise self._error or NetworkError("the stream is closed")
            try:
                for start in range(0, len(view), _WRITE_BYTES):
                    await self._raw.write(bytes(view[start : start + _WRITE_BYTES]))
            except FOREIGN as error:
                translated = translate_stream(error)
                await self._give_up(translated)
                raise translated from error
            except trio.Cancelled:
                # Part of the message may be gone: nothing sent after it would make sense to the peer.
                self._owner.start_task(self.reset)
                raise
        await trio.lowlevel.checkpoint_if_cancelled()

    async def receive_exactly(self, n_bytes: int) -> bytes:
        """See `ByteStream.receive_exactly`."""
        if n_bytes > BUFFER_LIMIT_BYTES:
            try:
                return await receive_in_parts(self, n_bytes)
            except trio.Cancelled:
                # What was taken already is lost, and nothing after it would make sense.
                self._owner.start_task(self.reset)
                raise
        while self._buffered_bytes < n_bytes:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise NetworkError(f"expected {n_bytes} bytes, the stream ended after {self._buffered_bytes}")
            await self._wait_for_more()
        return self._take(n_bytes)

    async def receive_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.receive_some`."""
        while not self._buffered_bytes:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._wait_for_more()
        return self._take(min(max_bytes, self._buffered_bytes))

    async def _wait_for_more(self) -> None:
        if self._closed:
            raise NetworkError("the stream is closed")
        limit_s = self.idle_timeout_s
        with trio.move_on_after(float("inf") if limit_s is None else limit_s) as scope:
            await self._changed.wait()
        if scope.cancelled_caught:
            silent = PeerUnreachableError(f"expected something from the peer within {limit_s:g} s, found silence")
            self._fail(silent)
            await self._owner.disconnect(self._peer)
            raise silent

    def _take(self, n_bytes: int) -> bytes:
        taken: list[memoryview] = []
        missing = n_bytes
        while missing:
            part = self._parts.popleft()
            if len(part) > missing:
                self._parts.appendleft(part[missing:])
                part = part[:missing]
            taken.append(part)
            missing -= len(part)
        self._buffered_bytes -= n_bytes
        self._changed.tell()
        return b"".join(taken)

    def _fail(self, error: NetworkError) -> None:
        if self._error is None:
            self._error = error
            self._parts.clear()
            self._buffered_bytes = 0
            self._changed.tell()

    async def _pump(self) -> None:
        try:
            with self._pump_scope:
                await self._read_for_ever()
        except StreamEOF:
            self._ended = True
            self._changed.tell()
        except FOREIGN as error:
            self._fail(translate_stream(error))
        finally:
            self._pump_done.set()

    async def _read_for_ever(self) -> None:
        while True:
            part = await self._raw.read(_READ_BYTES)
            if self._closed or self._error is not None:
                continue  # nobody reads any more; taking the bytes lets the peer finish
            self._parts.append(memoryview(part))
            self._buffered_bytes += len(part)
            self._changed.tell()
            if self._buffered_bytes > BUFFER_LIMIT_BYTES and not await self._wait_for_reader():
                await self._give_up(
                    NetworkError(
                        f"expected at most {BUFFER_LIMIT_BYTES} bytes ahead of the reader, found more for"
                        f" {FULL_BUFFER_LIMIT_S:g} s; the stream is reset"
                    )
                )
                return

    async def _wait_for_reader(self) -> bool:
        with trio.move_on_after(FULL_BUFFER_LIMIT_S):
            while self._buffered_bytes > BUFFER_LIMIT_BYTES:
                await self._changed.wait()
        return self._buffered_bytes <= BUFFER_LIMIT_BYTES

    async def aclose(self) -> None:
        """See `ByteStream.aclose`."""
        if self._closed:
            return
        self._closed = True
        self._parts.clear()
        self._buffered_bytes = 0
        self._changed.tell()
        with trio.CancelScope(shield=True), suppress(*FOREIGN):
            await self._raw.close()
        if not self._pump_done.is_set():
            self._owner.start_task(self._linger)

    async def _linger(self) -> None:
        with trio.move_on_after(LINGER_S):
            await self._pump_done.wait()
        if not self._pump_done.is_set():
            self._pump_scope.cancel()
            await self._reset_raw()

    async def reset(self) -> None:
        """See `ByteStream.reset`."""
        await self._give_up(NetworkError("the stream was reset"))

    async def _give_up(self, error: NetworkError) -> None:
        self._fail(error)
        self._closed = True
        self._pump_scope.cancel()
        await self._reset_raw()

    async def _reset_raw(self) -> None:
        with trio.CancelScope(shield=True), suppress(*FOREIGN):
            await self._raw.reset()
