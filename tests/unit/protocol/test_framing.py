"""Frames: lengths first, and bounded before a byte is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import ProtocolViolationError
from kvnet.protocol.framing import MAX_FRAME_BYTES, FrameReader, encode_frame, frame_length


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=10), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_the_same_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, bodies))
    reader = FrameReader()
    received: list[bytes] = []
    position = turn = 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        received += reader.feed(stream[position : position + size])
        position += size
        turn += 1
    assert received == bodies
    reader.end()


def test_longest_frame_passes() -> None:
    body = b"x" * MAX_FRAME_BYTES
    assert FrameReader().feed(encode_frame(body)) == [body]


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFF_FFFF])
def test_length_out_of_bounds_is_refused_before_its_bytes_are_kept(length: int) -> None:
    header = length.to_bytes(4, "big")
    with pytest.raises(ProtocolViolationError, match="expected a frame of 1 to 262,144 bytes"):
        FrameReader().feed(header)
    with pytest.raises(ProtocolViolationError):
        frame_length(header)


@pytest.mark.parametrize("body", [b"", b"x" * (MAX_FRAME_BYTES + 1)])
def test_body_out_of_bounds_is_not_sent(body: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        encode_frame(body)


def test_exact_readers_learn_how_much_to_read() -> None:
    frame = encode_frame(b"abc")
    assert frame_length(frame[:4]) == 3


@pytest.mark.parametrize("header", [b"", b"\0\0\0", b"\0\0\0\1\1"])
def test_header_of_another_size_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolViolationError, match="4 bytes"):
        frame_length(header)


def test_end_inside_a_frame_is_not_taken_for_a_clean_end() -> None:
    reader = FrameReader()
    reader.feed(encode_frame(b"whole") + encode_frame(b"half")[:-1])
    with pytest.raises(ProtocolViolationError, match="the stream ended 7 bytes into one"):
        reader.end()
