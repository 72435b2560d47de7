"""How chunk bytes get here: the interface of the data plane, and the one that uses the control transport's streams."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvnet.errors import NetworkError
from kvnet.exchange.frames import receive_frame
from kvnet.format.hashes import BytesLike
from kvnet.network.arrivals import BytesArrived, ChunkArrived, ChunkEvent
from kvnet.network.interface import ByteStream, Network, StreamKind
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import ChunkHeader, GetChunks, decode_chunk_answer

READ_SIZE_BYTES = 256 * 1024


class ChunkChannel(Protocol):
    """Chunks from one peer. Requests may be sent while earlier ones are being answered, in that order.

    Attributes:
        path: what carries them, in one word: "bulk" or "stream".
        window_bytes: what may be asked for and on its way; 0: whoever asks decides.
    """

    path: str
    window_bytes: int

    async def request(self, request: GetChunks, lengths: Mapping[int, int]) -> None:
        """Ask for chunks.

        Args:
            request: what to ask.
            lengths: the length of each chunk in it; a channel may allocate and read nothing else.

        Raises:
            NetworkError: the channel broke.
        """
        ...

    async def next_events(self) -> Sequence[ChunkEvent]:
        """What happens next, and all that has happened by then: at least one event.

        A channel that reports a header of a chunk reports it alone, and reads no further until it is called again.

        Raises:
            NetworkError: the channel broke or ended.
            ProtocolViolationError: the peer sent something else.
        """
        ...

    def finished(self, data: BytesLike) -> None:
        """The bytes of a `ChunkArrived` are not needed any more; to be called once for each."""
        ...

    async def aclose(self) -> None:
        """Give the channel up; does not raise."""
        ...


class ChunkTransport(Protocol):
    """Opens chunk channels."""

    async def open(self, peer: PeerId) -> ChunkChannel:
        """A channel to a connected peer.

        Raises:
            NetworkError: it cannot be opened.
        """
        ...


class _StreamChannel:
    path = "stream"
    window_bytes = 0

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._header: ChunkHeader | None = None
        self._buffer = bytearray()
        self._filled = 0

    async def request(self, request: GetChunks, lengths: Mapping[int, int]) -> None:  # noqa: ARG002 - not needed here
        await self._stream.send_all(encode_frame(encode_message(request)))

    async def next_events(self) -> Sequence[ChunkEvent]:
        return (await self._next_event(),)

    async def _next_event(self) -> ChunkEvent:
        if self._header is None:
            return await self._next_answer()
        if not self._filled:
            # Whoever asked has seen the header, and goes on only with one that has the right length.
            self._buffer = bytearray(self._header.length_bytes)
        if self._filled == len(self._buffer):
            arrived = ChunkArrived(self._header.index, bytes(self._buffer))
            self._header, self._buffer, self._filled = None, bytearray(), 0
            return arrived
        piece = await self._stream.receive_some(min(READ_SIZE_BYTES, len(self._buffer) - self._filled))
        if not piece:
            raise NetworkError("expected more bytes of a chunk, found the end of the stream")
        self._buffer[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        return BytesArrived(len(piece))

    async def _next_answer(self) -> ChunkEvent:
        frame = await receive_frame(self._stream)
        if frame is None:
            raise NetworkError("expected more chunks, found the end of the stream")
        answer = decode_chunk_answer(frame)
        if isinstance(answer, ChunkHeader):
            self._header = answer
        return answer

    def finished(self, data: BytesLike) -> None:
        pass

    async def aclose(self) -> None:
        await self._stream.reset()


class StreamTransport:
    """Chunks over a stream of their own on the peers' connection: slower than a data plane, and always there.

    Args:
        network: whose connections to use.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    async def open(self, peer: PeerId) -> ChunkChannel:
        """A channel to a connected peer."""
        return _StreamChannel(await self._network.open_stream(peer, StreamKind.CHUNKS))
