"""The streams of a simulated network: bytes under way over a link, as long as it takes them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.interface import STREAM_WINDOW_BYTES, ByteStream, StreamKind
from kvnet.network.memory_links import Links
from kvnet.network.news import News
from kvnet.network.receiving import receive_in_parts
from kvnet.protocol.ids import PeerId

SLOW_READER_LIMIT_S = 5.0
"""How long a sender waits for a reader that takes nothing; the value of the real multiplexer (Yamux in py-libp2p)."""

_SEGMENT_BYTES = 64 * 1024


@dataclass(slots=True)
class Wire:
    """The shared capacity of one direction: when it is free again."""

    free_at_s: float = 0.0


@dataclass(slots=True)
class Pipe:
    """One direction of one stream: what was sent and when it arrives.

    Attributes:
        links: what joins the nodes.
        source: the node that sends.
        target: the node that receives.
        wire: what this direction shares with other streams of the two nodes.
        name: of the stream, for `Links.watch`.
        in_flight: when each segment arrives, on trio's clock, and its bytes.
        in_flight_bytes: bytes of them together.
        ended_at_s: when the end arrives; None as long as the sender may go on.
        broken: why the stream was given up; None while it is whole.
        changed: any of this has.
    """

    links: Links
    source: PeerId
    target: PeerId
    wire: Wire
    name: str
    in_flight: deque[tuple[float, bytes]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    ended_at_s: float | None = None
    broken: str | None = None
    changed: News = field(default_factory=News)

    def end(self) -> None:
        """Send nothing more: the end arrives behind what is under way."""
        if self.ended_at_s is None:
            self.ended_at_s = max(trio.current_time(), self.wire.free_at_s) + self._latency_s()
            self.changed.tell()

    def break_off(self, reason: str) -> None:
        """Lose what is under way; both ends see an error."""
        if self.broken is None:
            self.broken = reason
            self.in_flight.clear()
            self.in_flight_bytes = 0
            self.changed.tell()

    def _latency_s(self) -> float:
        return self.links.of(self.source, self.target).latency_s

    async def send(self, segment: bytes) -> None:
        """Put a segment under way; returns when the link has taken it.

        Raises:
            NetworkError: the stream was broken off or ended.
        """
        await self._wait_for_room()
        self.links.watch(self.name, self.source, self.target, segment)
        rate = self.links.of(self.source, self.target).rate_bytes_per_s
        now_s = trio.current_time()
        leaves_at_s = now_s if rate is None else max(now_s, self.wire.free_at_s) + len(segment) / rate
        self.wire.free_at_s = leaves_at_s
        self.in_flight.append((leaves_at_s + self._latency_s(), segment))
        self.in_flight_bytes += len(segment)
        self.changed.tell()
        await trio.sleep(leaves_at_s - now_s)

    async def _wait_for_room(self) -> None:
        while self.broken is None and self.in_flight_bytes >= 2 * STREAM_WINDOW_BYTES:
            before = self.in_flight_bytes
            with trio.move_on_after(SLOW_READER_LIMIT_S):
                await self.changed.wait()
            if self.in_flight_bytes >= before and self.links.passes(self.source, self.target):
                self.break_off(f"expected the reader to take something within {SLOW_READER_LIMIT_S:g} s, it did not")
        if self.broken is not None:
            raise NetworkError(f"the stream was reset: {self.broken}")
        if self.ended_at_s is not None:
            raise NetworkError("the stream is closed for sending")

    async def receive(self, max_bytes: int) -> bytes:
        """Between 1 and `max_bytes` bytes, or ``b""`` at the end.

        Raises:
            NetworkError: the stream was broken off.
        """
        while True:
            await self.links.wait_until_passes(self.source, self.target)
            if self.broken is not None:
                raise NetworkError(f"the stream was reset: {self.broken}")
            arrives_at_s = self.in_flight[0][0] if self.in_flight else self.ended_at_s
            if arrives_at_s is None:
                await self.changed.wait()
            elif arrives_at_s > trio.current_time():
                with trio.move_on_at(arrives_at_s):
                    await self.changed.wait()
            elif self.in_flight:
                return self._take(max_bytes)
            else:
                return b""

    def _take(self, max_bytes: int) -> bytes:
        due_s, segment = self.in_flight.popleft()
        if len(segment) > max_bytes:
            self.in_flight.appendleft((due_s, segment[max_bytes:]))
            segment = segment[:max_bytes]
        self.in_flight_bytes -= len(segment)
        self.changed.tell()
        return segment


class StreamOwner(Protocol):
    """The node at one end of a stream."""

    async def disconnect(self, peer: PeerId) -> None:
        """Give the connection with a peer up."""

    def forget_stream(self, stream: "MemoryStream") -> None:
        """A stream is over."""


class MemoryStream(ByteStream):
    """One end of a simulated stream.

    Args:
        owner: the node that this end belongs to.
        peer: the node at the other end.
        kind: which protocol the stream speaks.
        outgoing: what this end sends into.
        incoming: what it receives from.
    """

    def __init__(self, owner: StreamOwner, peer: PeerId, kind: StreamKind, outgoing: Pipe, incoming: Pipe) -> None:
        self.idle_timeout_s = kind.default_idle_timeout_s
        self._owner = owner
        self._peer = peer
        self._kind = kind
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    @property
    def peer(self) -> PeerId:
        """The other node."""
        return self._peer

    @property
    def kind(self) -> StreamKind:
        """Which protocol the stream speaks."""
        return self._kind

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `ByteStream.send_all`."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _SEGMENT_BYTES):
                await self._outgoing.send(bytes(view[start : start + _SEGMENT_BYTES]))
        except trio.Cancelled:
            self.break_off("sending was cancelled")
            raise

    async def receive_exactly(self, n_bytes: int) -> bytes:
        """See `ByteStream.receive_exactly`."""
        return await receive_in_parts(self, n_bytes)

    async def receive_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.receive_some`."""
        if self._closed:
            raise NetworkError("the stream is closed")
        limit_s = self.idle_timeout_s
        part = b""
        with trio.move_on_after(float("inf") if limit_s is None else limit_s) as scope:
            part = await self._incoming.receive(max_bytes)
        if scope.cancelled_caught:
            await self._owner.disconnect(self._peer)
            raise PeerUnreachableError(f"expected something from the peer within {limit_s:g} s, found silence")
        return part

    async def aclose(self) -> None:
        """See `ByteStream.aclose`."""
        self._closed = True
        self._outgoing.end()
        self._owner.forget_stream(self)
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `ByteStream.reset`."""
        self.break_off("given up by one side")
        await trio.lowlevel.checkpoint()

    def break_off(self, reason: str) -> None:
        """End the stream at both sides, with an error."""
        self._closed = True
        self._outgoing.break_off(reason)
        self._incoming.break_off(reason)
        self._owner.forget_stream(self)

    def end_with_process(self) -> None:
        """What the other side sees of a killed process: a clean end, and nobody who reads."""
        self._closed = True
        self._outgoing.end()
        self._incoming.break_off("the peer is gone")
        self._owner.forget_stream(self)
