"""Whole frames on a byte stream: the chunk streams' side of `kvnet.protocol.framing`."""

from kvnet.network.interface import ByteStream
from kvnet.protocol.framing import LENGTH_SIZE_BYTES, frame_length


async def receive_frame(stream: ByteStream) -> bytes | None:
    """The body of the next frame, or ``None`` when the peer has ended its side between frames.

    Raises:
        NetworkError: the stream broke, or ended inside a frame.
        ProtocolViolationError: a length beyond the limit; nothing is allocated for it.
    """
    first = await stream.receive_some(1)
    if not first:
        return None
    header = first + await stream.receive_exactly(LENGTH_SIZE_BYTES - 1)
    return await stream.receive_exactly(frame_length(header))
