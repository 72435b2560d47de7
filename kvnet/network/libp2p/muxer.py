"""Yamux made safe: writes that cannot be cancelled half-way, and bounds a peer cannot talk us out of.

py-libp2p 0.8.1 encrypts a frame, which advances the Noise nonce, and then sends it. When the task is cancelled between
the two, or a send is cut, every later frame fails authentication and all streams of the connection die. This happens
to anyone who writes: our streams, the DHT, identify, and the window updates that *reading* sends. So the cure is here,
below all of them.
"""

import struct
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.exceptions import RawConnError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_SYN,
    MAX_WINDOW_SIZE,
    PROTOCOL_ID,
    TYPE_PING,
    YAMUX_HEADER_FORMAT,
    Yamux,
)

WRITE_STALL_LIMIT_S = 15.0
"""A peer that takes no byte from its socket for this long while we send one frame is gone; the connection is closed."""

PING_INTERVAL_S = 20.0
SILENCE_LIMIT_S = 30.0
"""A connection on which nothing comes, not even the answer to a ping, is closed after this long. TCP alone would keep
a peer whose cable was pulled for a quarter of an hour, and a stopped one for ever."""

MAX_INBOUND_STREAMS = 64
"""Streams of any protocol that a peer may hold open on one connection; more are reset as they come."""

BUFFER_LIMIT_BYTES = 3 * MAX_WINDOW_SIZE
"""Unread bytes of all streams of one connection together. Streams here are emptied as they fill, so an honest peer
stays far below; Yamux in py-libp2p only logs when a peer ignores its window and stores what it sends."""


class _BoundedBuffer(bytearray):
    """The unread bytes of one stream; takes no more once its connection holds too much."""

    def __init__(self, siblings: "_BoundedBuffers") -> None:
        super().__init__()
        self._siblings = siblings

    def extend(self, data: Any) -> None:
        self._siblings.heard_at_s = trio.current_time()
        if sum(map(len, self._siblings.values())) + len(data) > BUFFER_LIMIT_BYTES:
            # Of what may be raised here, this alone makes Yamux close the connection instead of reading on.
            raise trio.TooSlowError("the peer sent more than its windows allow")
        super().extend(data)


class _BoundedBuffers(dict[int, bytearray]):
    """The buffers of a connection: the empty ones that Yamux stores become bounded ones."""

    heard_at_s = 0.0

    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        bounded = _BoundedBuffer(self)
        super().__setitem__(stream_id, bounded)
        bounded.extend(buffer)


class SafeYamux(Yamux):
    """Yamux whose frames are written whole or not at all, and whose peers cannot fill our memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = _BoundedBuffers()
        self.stream_buffers = self._buffers
        self._aborted = False

    @property
    def is_alive(self) -> bool:
        """Whether the connection is of use; it is forgotten by the swarm a little after it stopped being that."""
        return not (self._aborted or self.event_shutting_down.is_set())

    async def _write_frame(self, data: bytes) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_STALL_LIMIT_S) as scope:
            try:
                await super()._write_frame(data)
            except (ConnectionClosedError, RawConnError, OSError):
                await self.abort()
                raise
        if scope.cancelled_caught:
            await self.abort()
            raise ConnectionClosedError(f"the peer took nothing for {WRITE_STALL_LIMIT_S:g} s", transport="tcp")
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _measure_rtt_loop(self) -> None:
        """Ping the peer as long as the connection lives, and close it when nothing comes back."""
        while not self.event_shutting_down.is_set():
            if not await self._ping():
                return
            if not await self._hears_from_peer():
                await self.abort()
                return
            with trio.move_on_after(PING_INTERVAL_S):
                await self.event_shutting_down.wait()

    async def _ping(self) -> bool:
        """Send a ping; False when the connection is gone."""
        self._ping_id += 1
        self._ping_event = trio.Event()
        ping = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, self._ping_id & 0xFFFFFFFF)
        try:
            await self._write_frame(ping)
        except (ConnectionClosedError, RawConnError, OSError):
            return False
        self._ping_sent_time = trio.current_time()
        return True

    async def answers(self, limit_s: float) -> bool:
        """Whether anything comes from the peer within so many seconds, if only the answer to a ping."""
        asked_at_s = trio.current_time()
        answered = False
        with trio.move_on_after(limit_s):
            if self._ping_event.is_set() and not await self._ping():
                return False
            # A ping that was under way already counts: its answer is on the same line.
            await self._ping_event.wait()
            answered = True
        return answered or self._buffers.heard_at_s > asked_at_s

    async def _hears_from_peer(self) -> bool:
        """Wait for the answer to a ping; data counts too, for on a slow link the answer queues up behind it."""
        while not self._ping_event.is_set():
            heard_at_s = max(self._ping_sent_time, self._buffers.heard_at_s)
            if trio.current_time() - heard_at_s >= SILENCE_LIMIT_S:
                return False
            with trio.move_on_at(heard_at_s + SILENCE_LIMIT_S):
                await self._ping_event.wait()
        return True

    async def accept_stream(self) -> Any:
        """The next stream the peer opens, unless it holds too many already."""
        while True:
            stream = await super().accept_stream()
            held = sum(1 for s in self.streams.values() if not s.is_initiator and not s.closed)
            if held <= MAX_INBOUND_STREAMS:
                return stream
            await stream.reset()

    async def abort(self) -> None:
        """Close the socket under the connection: wakes whoever is stuck on it and ends all its streams."""
        self._aborted = True
        with trio.CancelScope(shield=True):
            await self.secured_conn.close()


class SafeMuxers(MuxerMultistream):
    """Negotiates Yamux and nothing else.

    py-libp2p ignores the class it is given for Yamux's protocol id and makes its own, so the choice is replaced whole.
    """

    def __init__(self) -> None:
        super().__init__({TProtocol(PROTOCOL_ID): SafeYamux})

    async def new_conn(self, conn: Any, peer_id: Any) -> Any:
        """Agree on Yamux with the peer and wrap the secured connection."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = SafeYamux(conn, peer_id, is_initiator=conn.is_initiator)
        return self._annotate_connection(muxed, conn, protocol)
