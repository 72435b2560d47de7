"""Frames: a length as u32 big-endian, then that many bytes of one strict-CBOR message.

A killed sender looks like a clean end of the stream, so nothing is ever ended by the end of the stream: the length
comes first, and it is checked before a byte is kept for it.
"""

from kvnet.errors import ProtocolViolationError

LENGTH_SIZE_BYTES = 4
"""A u32."""
MAX_FRAME_BYTES = 256 * 1024
"""The longest body. The largest message, a lookup of 4,096 keys, takes about 140 KiB."""


def encode_frame(body: bytes) -> bytes:
    """A whole frame.

    Raises:
        ProtocolViolationError: the body is empty or exceeds the limit; nothing of it may be sent.
    """
    _check_length(len(body))
    return len(body).to_bytes(LENGTH_SIZE_BYTES, "big") + body


def frame_length(header: bytes) -> int:
    """The length of the body that follows, for readers that read exactly as much as they are told.

    Args:
        header: the first 4 bytes of a frame.

    Raises:
        ProtocolViolationError: not 4 bytes, or a length of 0 or above the limit.
    """
    if len(header) != LENGTH_SIZE_BYTES:
        raise ProtocolViolationError(f"expected a frame header of {LENGTH_SIZE_BYTES} bytes, found {len(header)}")
    length = int.from_bytes(header, "big")
    _check_length(length)
    return length


class FrameReader:
    """Cuts a byte stream into frame bodies. Keeps at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Add received bytes; return the bodies that are complete now.

        Raises:
            ProtocolViolationError: a declared length of 0 or above the limit, found before its bytes are kept.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_SIZE_BYTES:
            body_start = start + LENGTH_SIZE_BYTES
            body_end = body_start + frame_length(bytes(self._buffer[start:body_start]))
            if len(self._buffer) < body_end:
                break
            bodies.append(bytes(self._buffer[body_start:body_end]))
            start = body_end
        del self._buffer[:start]
        return bodies

    def end(self) -> None:
        """The stream has ended.

        Raises:
            ProtocolViolationError: it ended inside a frame.
        """
        if self._buffer:
            raise ProtocolViolationError(f"expected whole frames, the stream ended {len(self._buffer)} bytes into one")


def _check_length(length: int) -> None:
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolViolationError(f"expected a frame of 1 to {MAX_FRAME_BYTES:,} bytes, found {length:,}")
