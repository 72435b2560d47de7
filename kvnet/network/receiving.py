"""Receiving a whole from parts, for streams that give what has arrived."""

from kvnet.errors import NetworkError
from kvnet.network.interface import ByteStream


async def receive_in_parts(stream: ByteStream, n_bytes: int) -> bytes:
    """Exactly `n_bytes`, from as many `ByteStream.receive_some` as it takes.

    Raises:
        NetworkError: the stream ended before, or failed.
    """
    received = bytearray()
    while len(received) < n_bytes:
        part = await stream.receive_some(n_bytes - len(received))
        if not part:
            raise NetworkError(f"expected {n_bytes} bytes, the stream ended after {len(received)}")
        received += part
    return bytes(received)
