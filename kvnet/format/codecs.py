"""How a tile's bytes are stored. Token and context chunks are always stored as they are.

Chunk hashes are over stored bytes, so an artifact has one codec and another codec makes another artifact. Decoding is
pinned by golden vectors; the bytes an encoder makes may change with its zstd version. What the lossy codec does with
numbers is in ``kvnet.format.q8``.

Source of the zstd frame: RFC 8878.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final

import zstandard

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import q8
from kvnet.format.hashes import BytesLike
from kvnet.format.tensor import LayerKind, tile_size_bytes


class Codec(Enum):
    """The value is the name used on disk, on the wire and on the command line."""

    RAW = "raw"
    SHUFFLE_ZSTD1 = "shuffle+zstd-1"
    Q8 = "q8"

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the very bytes; a lossy codec is TOLERANT at best."""
        return self is not Codec.Q8


ZSTD_LEVEL: Final = 1
"""K/V is close to noise: higher levels cost time and gain nothing that was measured."""
_FRAME_SLACK_BYTES: Final = 1024
"""Above zstd's own bound for incompressible input (n + n/256 + 64)."""


def require_storable(codec: Codec, kinds: Iterable[LayerKind]) -> None:
    """Refuses a codec that cannot store K/V of these layer kinds.

    Raises:
        CompatibilityError: the codec is lossy and cannot divide a row into groups.
    """
    refusal = q8.refusal_of(kinds) if codec is Codec.Q8 else ""
    if refusal:
        raise CompatibilityError(refusal, hint=f"Use the codec {Codec.RAW.value} or {Codec.SHUFFLE_ZSTD1.value}.")


def stored_size_range(codec: Codec, kind: LayerKind, n_layers: int, n_tokens: int) -> tuple[int, int]:
    """The fewest and the most bytes a tile may be stored in.

    Raises:
        MalformedError: the codec cannot store such rows.
    """
    if codec is Codec.Q8:
        size = q8.bytes_per_token(kind) * n_layers * n_tokens
        return size, size
    raw_size_bytes = tile_size_bytes(kind, n_layers, n_tokens)
    return (raw_size_bytes if codec is Codec.RAW else 1), max_stored_bytes(codec, raw_size_bytes)


def max_stored_bytes(codec: Codec, raw_size_bytes: int) -> int:
    """The most bytes a chunk of this raw size may be stored in, for a lossless codec."""
    if codec is Codec.RAW:
        return raw_size_bytes
    return raw_size_bytes + (raw_size_bytes >> 8) + _FRAME_SLACK_BYTES


def encode_chunk(codec: Codec, raw: BytesLike, itemsize: int) -> bytes:
    """The stored bytes of a tile.

    Args:
        codec: how; a lossless one. ``kvnet.format.q8`` needs to know rows, not only bytes.
        raw: the tile.
        itemsize: bytes of one element; the raw length is a multiple of it.

    Raises:
        ValueError: a length that is no multiple of ``itemsize``, or a lossy codec.
    """
    _require_lossless(codec)
    data = bytes(raw)
    if codec is Codec.RAW:
        return data
    if itemsize < 1 or len(data) % itemsize:
        raise ValueError(f"expected a multiple of {itemsize} bytes, found {len(data)}")
    # Bytes of equal significance side by side: signs and exponents repeat, mantissas do not.
    shuffled = b"".join(data[lane::itemsize] for lane in range(itemsize))
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    return compressor.compress(shuffled)


def decode_chunk(codec: Codec, stored: BytesLike, itemsize: int, raw_size_bytes: int) -> bytes:
    """The tile again: exactly ``raw_size_bytes`` bytes, never more memory than that in proportion to the input.

    Raises:
        MalformedError: stored bytes that do not decode to exactly that size.
        ValueError: a lossy codec.
    """
    _require_lossless(codec)
    data = bytes(stored)
    if len(data) > max_stored_bytes(codec, raw_size_bytes):
        raise MalformedError(f"chunk: expected at most {raw_size_bytes} bytes to decode, found {len(data)}")
    if codec is Codec.RAW:
        if len(data) != raw_size_bytes:
            raise MalformedError(f"chunk: expected {raw_size_bytes} bytes, found {len(data)}")
        return data
    if itemsize < 1 or raw_size_bytes % itemsize:
        raise MalformedError(f"chunk: expected a multiple of {itemsize} bytes, found {raw_size_bytes}")
    shuffled = _expand(data, raw_size_bytes)
    per_lane = raw_size_bytes // itemsize
    raw = bytearray(raw_size_bytes)
    for lane in range(itemsize):
        raw[lane::itemsize] = shuffled[lane * per_lane : (lane + 1) * per_lane]
    return bytes(raw)


def _require_lossless(codec: Codec) -> None:
    if not codec.lossless:
        raise ValueError(f"expected a lossless codec, found {codec.value}")


def _expand(data: bytes, raw_size_bytes: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(data)
        # The declared size is checked before a byte is expanded: the layout alone says how much that may be.
        if frame.content_size != raw_size_bytes or frame.dict_id:
            raise MalformedError(
                f"chunk: expected a zstd frame of {raw_size_bytes} bytes without a dictionary, "
                f"found one that declares {frame.content_size}"
            )
        return zstandard.ZstdDecompressor().decompress(
            data, max_output_size=raw_size_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedError(f"chunk: not a zstd frame: {error}") from error
