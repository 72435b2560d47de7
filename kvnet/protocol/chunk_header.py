"""The frame of a chunk's header without the detour over a message: one stands before each chunk, so it costs twice.

Who sends makes it; who receives compares what came with the one that must come next, and decodes only what differs.
"""

from typing import Final

from kvnet.protocol.framing import LENGTH_SIZE_BYTES
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import ChunkHeader

_BEFORE_INDEX, _BEFORE_LENGTH, _ = encode_message(ChunkHeader(index=0, length_bytes=0)).split(b"\0")
_SMALL: Final = 24
"""Below, a CBOR head holds the number itself."""


def chunk_header_frame(index: int, length_bytes: int) -> bytes:
    """What ``encode_frame(encode_message(ChunkHeader(...)))`` gives; both below 2**32."""
    body = _BEFORE_INDEX + _unsigned(index) + _BEFORE_LENGTH + _unsigned(length_bytes)
    return len(body).to_bytes(LENGTH_SIZE_BYTES, "big") + body


def _unsigned(number: int) -> bytes:
    """RFC 8949, section 3.1, major type 0, in the shortest form."""
    if number < _SMALL:
        return number.to_bytes(1, "big")
    if number < 1 << 8:
        return b"\x18" + number.to_bytes(1, "big")
    if number < 1 << 16:
        return b"\x19" + number.to_bytes(2, "big")
    return b"\x1a" + number.to_bytes(4, "big")
