"""The quick form of a chunk's header is the message, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.format import limits
from kvnet.protocol.chunk_header import chunk_header_frame
from kvnet.protocol.framing import LENGTH_SIZE_BYTES, encode_frame
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import ChunkHeader, decode_chunk_answer

EDGES = [0, 1, 23, 24, 255, 256, 65535, 65536, limits.MAX_CHUNKS - 1]


@pytest.mark.parametrize("index", EDGES)
@pytest.mark.parametrize("length_bytes", [1, 23, 24, 255, 256, 65535, 65536, limits.MAX_CHUNK_BYTES])
def test_frame_is_that_of_the_message(index: int, length_bytes: int) -> None:
    message = ChunkHeader(index=index, length_bytes=length_bytes)
    frame = chunk_header_frame(index, length_bytes)
    assert frame == encode_frame(encode_message(message))
    assert decode_chunk_answer(frame[LENGTH_SIZE_BYTES:]) == message


@given(st.integers(0, limits.MAX_CHUNKS - 1), st.integers(1, limits.MAX_CHUNK_BYTES))
def test_any_frame_is_that_of_the_message(index: int, length_bytes: int) -> None:
    message = ChunkHeader(index=index, length_bytes=length_bytes)
    assert chunk_header_frame(index, length_bytes) == encode_frame(encode_message(message))
