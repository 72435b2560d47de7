"""What the rest of kvnet may expect from a network, whichever one it is.

Two implementations exist: `kvnet.network.memory` (simulated, runs under a mock clock) and `kvnet.network.libp2p`.
One contract suite runs on both.

Rules every implementation keeps:

- An exception in a stream handler resets that stream and is logged; it reaches nobody else.
- Every call may be cancelled at any moment. A cancelled `send_all` or `receive_exactly` costs at most its own stream.
- A peer that ends in the middle of something is an error here, never a short result.
- Errors are `NetworkError` or a subclass.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import trio

from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

STREAM_WINDOW_BYTES = 16 * 1024 * 1024
"""How many bytes a caller may have asked for on one stream and not yet received.

An implementation buffers at least this much for a reader that is busy elsewhere. A stream whose peer sends more than
twice this ahead of its reader is reset: either the peer sends what nobody asked for or the reader has stopped."""

CHUNKS_IDLE_TIMEOUT_S = 15.0
"""Silence on a chunk stream, while a reader waits, after which the peer's connection is dropped."""


class StreamKind(Enum):
    """The protocols peers speak; the value is the protocol id on the wire."""

    CONTROL = "/kvnet/control/1.0.0"
    CHUNKS = "/kvnet/chunks/1.0.0"

    @property
    def default_idle_timeout_s(self) -> float | None:
        """Seconds of silence allowed while a reader waits; None for control streams, which are idle by nature."""
        return CHUNKS_IDLE_TIMEOUT_S if self is StreamKind.CHUNKS else None


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A connected peer and the addresses it can be reached at, as multiaddr text ending in ``/p2p/<id>``."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProviderHint:
    """Somebody says this peer has something. A hint, never authority: it may be wrong, old or unreachable."""

    peer: PeerId
    addresses: tuple[str, ...]


class ByteStream(Protocol):
    """A two-way stream of bytes to one peer, for one reader and one writer."""

    idle_timeout_s: float | None
    """Seconds without a byte from the peer, while a reader waits, until the whole connection is dropped.

    Set by whoever opened the stream (see `Network.open_stream`) or by the handler; None waits for ever."""

    @property
    def peer(self) -> PeerId:
        """The peer at the other end, as proved in the handshake."""

    @property
    def kind(self) -> StreamKind:
        """Which protocol the stream speaks."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; writes of 256 KiB to 1 MiB are the fastest.

        When it is cancelled part of the data may be on its way, so the stream is reset.

        Raises:
            NetworkError: the stream is closed or reset, or the peer stopped reading.
        """

    async def receive_exactly(self, n_bytes: int) -> bytes:
        """Receive exactly `n_bytes`.

        A killed sender looks like a clean end, so every message starts with its length and is read with this.

        Raises:
            NetworkError: the stream ended or was reset before `n_bytes` arrived, or our reader was too slow.
            PeerUnreachableError: the peer was silent for `idle_timeout_s`; its connection is dropped.
        """

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive between 1 and `max_bytes` bytes, or ``b""`` when the peer has ended its side.

        Raises:
            NetworkError: as for `receive_exactly`.
        """

    async def aclose(self) -> None:
        """End our side after everything sent; nothing more is read. Does not raise, may be called again."""

    async def reset(self) -> None:
        """Give the stream up at once in both directions; wakes a waiting reader. Does not raise."""


StreamHandler = Callable[[PeerId, ByteStream], Awaitable[None]]
"""Called in a task of its own for each stream a peer opens; the stream is closed when it returns."""

ProvideReport = Callable[[bytes, int], None]
"""Called with the key and the number of DHT servers that took the record, or did not say; 0: try again later."""


class Network(Protocol):
    """One node's view of the network."""

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""

    def addresses(self) -> list[str]:
        """Where we can be reached: multiaddr text ending in ``/p2p/<id>``; empty before `run` has started."""

    def listening(self) -> list[str]:
        """Where we take connections: multiaddr text, ``0.0.0.0`` and ``::`` as they are; empty before `run` has."""

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Be on the network until cancelled; `task_status.started` is called when `addresses` is true.

        Raises:
            PortInUseError: a port that was asked for is taken.
        """

    def set_handler(self, kind: StreamKind, handler: StreamHandler) -> None:
        """Say what to do with streams of `kind` that peers open; without a handler they are refused."""

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """Connect to one multiaddr ending in ``/p2p/<id>``; at once when already connected.

        Raises:
            UsageError: `address` is not such a multiaddr.
            PeerUnreachableError: nobody answers there, or somebody else does.
        """

    async def connect_hint(self, hint: ProviderHint, *, timeout_s: float = 5.0) -> PeerId:
        """Connect to a peer at whichever of its addresses answers first.

        Addresses that failed lately are skipped, for a while that grows with each failure.

        Raises:
            PeerUnreachableError: none of the addresses answers, or all of them failed lately.
        """

    async def disconnect(self, peer: PeerId) -> None:
        """Drop every connection to `peer`."""

    async def probe(self, peer: PeerId, *, timeout_s: float = 3.0) -> None:
        """Drop those connections to `peer` that do not answer in time.

        For when a cable, an address or a night's sleep may have ended them without a word: by themselves they would be
        noticed after the best part of a minute.
        """

    async def open_stream(self, peer: PeerId, kind: StreamKind, *, timeout_s: float = 10.0) -> ByteStream:
        """Open a stream to a connected peer, with `kind`'s default idle timeout.

        Raises:
            PeerUnreachableError: not connected, or no answer.
            PeerRefusedError: the peer does not speak this protocol, or has too many streams of ours.
        """

    def connected(self) -> list[PeerInfo]:
        """The peers connected now, in either direction. Their addresses are as they say themselves."""

    def seen_at(self, peer: PeerId) -> list[str]:
        """The IP addresses at the other ends of the connections with a peer; empty where there is no such thing."""

    async def provide(self, key32: bytes, *, report: ProvideReport | None = None) -> None:
        """Tell the DHT that we have what `key32` (32 bytes) names; returns at once, the work goes on behind.

        Pacing is the caller's: a DHT server keeps at most 10 records per sender in 10 s and drops the rest. Servers
        that drop a record are not counted in the report; but only a lookup from elsewhere proves that one is stored.

        Raises:
            NetworkError: too many records are already waiting to be sent, or the network does not run.
            ValueError: the key is not 32 bytes.
        """

    async def find_providers(self, key32: bytes, *, limit: int = 20, timeout_s: float = 10.0) -> list[ProviderHint]:
        """Ask the DHT, past any cache, who has what `key32` names: each peer once, never ourselves.

        Connected peers come first, peers whose addresses all failed lately last. What was found within `timeout_s`
        is returned; an empty list is a normal answer.

        Raises:
            ValueError: the key is not 32 bytes.
        """

    async def is_announced(self, key32: bytes, *, timeout_s: float = 10.0) -> bool | None:
        """Whether DHT servers, asked past any cache, name us as a provider of `key32`; None when nobody answers."""

    def routing_peers(self) -> int:
        """How many peers the DHT's routing table holds; 0 means records and lookups reach nobody."""
