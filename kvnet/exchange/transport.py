"""How chunk bytes get here: the interface of the data plane, and the one that uses the control transport's streams."""

from typing import Protocol

from kvnet.errors import NetworkError
from kvnet.exchange.frames import receive_frame
from kvnet.network.interface import ByteStream, Network, StreamKind
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import ChunkAnswer, GetChunks, decode_chunk_answer, encode_message


class ChunkChannel(Protocol):
    """Chunks from one peer. Requests may be sent while earlier ones are being answered, in that order."""

    async def request(self, request: GetChunks) -> None:
        """Ask for chunks.

        Raises:
            NetworkError: the channel broke.
        """
        ...

    async def next_answer(self) -> ChunkAnswer:
        """The header of the next chunk, or its refusal.

        Raises:
            NetworkError: the channel broke or ended.
            ProtocolViolationError: the peer sent something else.
        """
        ...

    async def receive_some(self, max_bytes: int) -> bytes:
        """Between 1 and ``max_bytes`` bytes of the announced chunk.

        Raises:
            NetworkError: the channel broke or ended.
        """
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
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def request(self, request: GetChunks) -> None:
        await self._stream.send_all(encode_frame(encode_message(request)))

    async def next_answer(self) -> ChunkAnswer:
        frame = await receive_frame(self._stream)
        if frame is None:
            raise NetworkError("expected more chunks, found the end of the stream")
        return decode_chunk_answer(frame)

    async def receive_some(self, max_bytes: int) -> bytes:
        data = await self._stream.receive_some(max_bytes)
        if not data:
            raise NetworkError("expected more bytes of a chunk, found the end of the stream")
        return data

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
