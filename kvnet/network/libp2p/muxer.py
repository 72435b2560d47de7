"""Yamux made safe: writes that cannot be cancelled half-way, and bounds a peer cannot talk us out of.

py-libp2p 0.8.1 encrypts a frame, which advances the Noise nonce, and then sends it. When the task is cancelled between
the two, or a send is cut, every later frame fails authentication and all streams of the connection die. This happens
to anyone who writes: our streams, the DHT, identify, and the window updates that *reading* sends. So the cure is here,
below all of them.
"""

from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.exceptions import RawConnError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import MAX_WINDOW_SIZE, PROTOCOL_ID, Yamux

WRITE_STALL_LIMIT_S = 15.0
"""A peer that takes no byte from its socket for this long while we send one frame is gone; the connection is closed."""

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
        if sum(map(len, self._siblings.values())) + len(data) > BUFFER_LIMIT_BYTES:
            # Of what may be raised here, this alone makes Yamux close the connection instead of reading on.
            raise trio.TooSlowError("the peer sent more than its windows allow")
        super().extend(data)


class _BoundedBuffers(dict[int, bytearray]):
    """The buffers of a connection: the empty ones that Yamux stores become bounded ones."""

    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        bounded = _BoundedBuffer(self)
        super().__setitem__(stream_id, bounded)
        bounded.extend(buffer)


class SafeYamux(Yamux):
    """Yamux whose frames are written whole or not at all, and whose peers cannot fill our memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream_buffers = _BoundedBuffers()
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
