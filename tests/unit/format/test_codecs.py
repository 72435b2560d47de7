import json
import random
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import MalformedError
from kvnet.format.codecs import Codec, decode_chunk, encode_chunk, max_stored_bytes
from tests.unit.format.examples import ROUNDS

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "codecs.json").read_text())
ZSTD = Codec.SHUFFLE_ZSTD1
LOSSLESS = [codec for codec in Codec if codec.lossless]


@given(st.binary(max_size=4096), st.sampled_from([1, 2, 4]), st.sampled_from(LOSSLESS))
def test_every_tile_comes_back_bit_for_bit_and_within_its_bound(data: bytes, itemsize: int, codec: Codec) -> None:
    raw = data[: len(data) // itemsize * itemsize]
    stored = encode_chunk(codec, raw, itemsize)
    assert len(stored) <= max_stored_bytes(codec, len(raw))
    assert decode_chunk(codec, stored, itemsize, len(raw)) == raw
    assert decode_chunk(codec, memoryview(stored), itemsize, len(raw)) == raw


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_frames_of_other_levels_and_versions_decode_alike(case: dict) -> None:
    raw = bytes.fromhex(case["raw"])
    assert decode_chunk(ZSTD, bytes.fromhex(case["stored"]), case["itemsize"], len(raw)) == raw


def test_bytes_of_equal_significance_are_stored_together() -> None:
    stored = encode_chunk(ZSTD, bytes(range(8)), 4)
    shuffled = zstandard.ZstdDecompressor().decompress(stored)
    assert shuffled == bytes((0, 4, 1, 5, 2, 6, 3, 7))


def test_only_q8_is_lossy() -> None:
    assert set(Codec) - set(LOSSLESS) == {Codec.Q8}


def test_a_lossy_codec_is_not_applied_to_bytes_alone() -> None:
    with pytest.raises(ValueError, match="lossless"):
        encode_chunk(Codec.Q8, bytes(64), 4)
    with pytest.raises(ValueError, match="lossless"):
        decode_chunk(Codec.Q8, bytes(64), 4, 64)


def test_lengths_that_hold_no_whole_elements_are_refused() -> None:
    for itemsize in (0, 4):
        with pytest.raises(ValueError, match="multiple"):
            encode_chunk(ZSTD, b"abcde", itemsize)
        with pytest.raises(MalformedError, match="multiple"):
            decode_chunk(ZSTD, b"abcde", itemsize, 5)


def compressed(data: bytes, *, write_content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=write_content_size).compress(data)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"", "zstd"),
        (b"not a frame at all", "zstd"),
        (compressed(bytes(64))[:-1], "zstd"),
        (compressed(bytes(64)) + b"\0", "zstd"),
        (compressed(bytes(64)) + compressed(bytes(64)), "zstd"),
        (compressed(bytes(63)), "declares 63"),
        (compressed(bytes(1 << 20)), "declares 1048576"),
        (compressed(bytes(64), write_content_size=False), "declares"),
        (bytes(2000), "at most"),
    ],
)
def test_a_frame_that_is_not_exactly_the_tile_is_refused(stored: bytes, reason: str) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedError, match=reason):
        decode_chunk(ZSTD, stored, 4, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    honest = bytearray(compressed(bytes(64)))
    # Byte 5 of this frame is its one-byte content size.
    assert honest[5] == 64
    for lie in (63, 65, 128):
        honest[5] = lie
        with pytest.raises(MalformedError):
            decode_chunk(ZSTD, bytes(honest), 1, lie)


def test_a_frame_that_wants_a_dictionary_is_refused() -> None:
    named = bytearray(compressed(bytes(64)))
    named[4] |= 1
    named.insert(5, 7)
    with pytest.raises(MalformedError, match="dictionary"):
        decode_chunk(ZSTD, bytes(named), 1, 64)


@pytest.mark.parametrize("stored", [b"", bytes(63), bytes(65)])
def test_a_raw_chunk_of_another_size_is_refused(stored: bytes) -> None:
    with pytest.raises(MalformedError, match="64 bytes"):
        decode_chunk(Codec.RAW, stored, 4, 64)


@ROUNDS
def test_damaged_frames_are_refused_or_decode_to_the_right_size(rounds: int) -> None:
    rng = random.Random(7)
    frame = encode_chunk(ZSTD, bytes(rng.randrange(8) for _ in range(512)), 2)
    tracemalloc.start()
    for _ in range(rounds):
        data = bytearray(frame)
        for _change in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert len(decode_chunk(ZSTD, bytes(data[: rng.randrange(len(data) + 1)]), 2, 512)) == 512
        except MalformedError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
