"""Codec ``q8``: every K and V row in groups of equal length, each with a scale and a bias, 8 bits an element.

What is here is the definition: sizes, where everything lies, and an encoder and a decoder in plain numbers, one element
after the other. An engine does the same on arrays (``kvnet.engine.tiles``) and must come to the same bytes.

Every operation is one of IEEE 754 binary32, rounded to nearest even, and no result depends on subnormal numbers, which
some processors flush to zero: the same tile gives the same stored bytes everywhere.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format.hashes import BytesLike
from kvnet.format.tensor import DType, LayerKind, layer_slices, tile_size_bytes

GROUP_SIZES: Final = (64, 32, 16, 8)
"""Elements that share a scale and a bias: the first of these that divides the row. 64 costs 6 % on top of the codes;
below 8 there would be more scales than codes are worth."""

MAX_CODE: Final = 255
"""Codes are one byte."""

MIN_SPREAD: Final = 2.0**-118
"""A group whose values lie closer together has scale 0: its scale could not be a normal bfloat16 number."""

LARGEST: Final = {
    DType.FLOAT32: struct.unpack(">f", bytes.fromhex("7f7fffff"))[0],
    DType.FLOAT16: 65504.0,
    DType.BFLOAT16: struct.unpack(">f", bytes.fromhex("7f7f0000"))[0],
}
"""The largest finite value of each dtype: a decoded value beyond it becomes it."""

_PARAMETER_BYTES: Final = 4
"""Scale and bias of a group: two bfloat16 numbers."""


def group_size(dim: int) -> int:
    """Elements of a group in rows of ``dim`` elements; 0 when such rows cannot be stored."""
    return next((size for size in GROUP_SIZES if dim > 0 and dim % size == 0), 0)


def refusal_of(kinds: Iterable[LayerKind]) -> str:
    """Why K/V of these layer kinds cannot be stored, in words; empty when it can."""
    for kind in kinds:
        for name, dim in (("K", kind.k_dim), ("V", kind.v_dim)):
            if not group_size(dim):
                return f"q8 stores rows in groups of {', '.join(map(str, GROUP_SIZES))}; none divides {name} dim {dim}"
    return ""


def bytes_per_token(kind: LayerKind) -> int:
    """Stored bytes of one token in one layer.

    Raises:
        MalformedError: rows that cannot be stored.
    """
    refusal = refusal_of([kind])
    if refusal:
        raise MalformedError(refusal)
    return kind.heads * sum(dim + dim // group_size(dim) * _PARAMETER_BYTES for dim in (kind.k_dim, kind.v_dim))


@dataclass(frozen=True, slots=True)
class Part:
    """K or V of one layer in a tile. Offsets are in bytes; values are counted row by row, as they lie.

    Attributes:
        group: elements of a group.
        n_values: elements.
        raw: where its values lie in the tile.
        codes: where its codes lie in the stored tile, one byte each.
        scales: where its scales lie there, bfloat16 little-endian, one a group.
        biases: where its biases lie there, alike.
    """

    group: int
    n_values: int
    raw: slice
    codes: slice
    scales: slice
    biases: slice


def parts_of(kind: LayerKind, n_layers: int, n_tokens: int) -> tuple[Part, ...]:
    """K and V of each layer of a tile, in order.

    Raises:
        MalformedError: rows that cannot be stored.
    """
    bytes_per_token(kind)
    parts: list[Part] = []
    start = 0
    for pair in layer_slices(kind, n_layers, n_tokens):
        for (offset, size), dim in zip(pair, (kind.k_dim, kind.v_dim), strict=True):
            n_values, group = size // kind.dtype.size_bytes, group_size(dim)
            scales = start + n_values
            biases = scales + 2 * (n_values // group)
            end = biases + 2 * (n_values // group)
            parts.append(
                Part(
                    group,
                    n_values,
                    slice(offset, offset + size),
                    slice(start, scales),
                    slice(scales, biases),
                    slice(biases, end),
                )
            )
            start = end
    return tuple(parts)


def check_stored(kind: LayerKind, n_layers: int, n_tokens: int, stored: BytesLike) -> None:
    """Checks everything about a stored tile that can be wrong: any code is right.

    Raises:
        MalformedError: another size, or a scale or a bias that no encoder writes.
    """
    expected = bytes_per_token(kind) * n_layers * n_tokens
    if len(stored) != expected:
        raise MalformedError(f"q8 tile: expected {expected} bytes, found {len(stored)}")
    data = bytes(stored)
    for part in parts_of(kind, n_layers, n_tokens):
        if not all(is_scale(bits) for bits in _halves(data[part.scales])):
            raise MalformedError("q8 tile: expected scales of 0 or above, normal and finite")
        if not all(is_bias(bits) for bits in _halves(data[part.biases])):
            raise MalformedError("q8 tile: expected biases that are 0, or normal and finite")


def is_bias(bits: int) -> bool:
    """Whether a bfloat16 number is +0, or normal and finite."""
    return bits == 0 or 0 < bits & 0x7F80 < 0x7F80


def is_scale(bits: int) -> bool:
    """Whether it is so and not negative."""
    return bits < 0x8000 and is_bias(bits)


def encode_tile(kind: LayerKind, n_layers: int, n_tokens: int, raw: BytesLike) -> bytes:
    """The stored bytes of a tile; the reference, slow.

    Raises:
        MalformedError: rows that cannot be stored.
        ValueError: a tile of another size.
        CompatibilityError: values that are not finite, or too large to be stored.
    """
    expected = tile_size_bytes(kind, n_layers, n_tokens)
    if len(raw) != expected:
        raise ValueError(f"expected a tile of {expected} bytes, found {len(raw)}")
    data, out = bytes(raw), bytearray()
    for part in parts_of(kind, n_layers, n_tokens):
        values = _values(kind.dtype, data[part.raw])
        groups = [_encode_group(values[at : at + part.group]) for at in range(0, part.n_values, part.group)]
        out += b"".join(codes for codes, _, _ in groups)
        out += struct.pack(f"<{len(groups)}H", *(scale for _, scale, _ in groups))
        out += struct.pack(f"<{len(groups)}H", *(bias for _, _, bias in groups))
    return bytes(out)


def decode_tile(kind: LayerKind, n_layers: int, n_tokens: int, stored: BytesLike) -> bytes:
    """The tile again, as near as 8 bits come; the reference, slow.

    Raises:
        MalformedError: another size, or a scale or a bias that no encoder writes.
    """
    check_stored(kind, n_layers, n_tokens, stored)
    data, out = bytes(stored), bytearray()
    for part in parts_of(kind, n_layers, n_tokens):
        codes = data[part.codes]
        scales, biases = _halves(data[part.scales]), _halves(data[part.biases])
        values = [
            _decoded(code, _widened(scales[n // part.group]), _widened(biases[n // part.group]))
            for n, code in enumerate(codes)
        ]
        out += _bytes(kind.dtype, values)
    return bytes(out)


# --- one group --------------------------------------------------------------------------------------------------------


def _encode_group(values: Sequence[float]) -> tuple[bytes, int, int]:
    """Codes, and the bits of scale and bias.

    Both are rounded outwards before codes are computed from them, so that the group's values stay within their reach.
    """
    if not all(math.isfinite(value) for value in values):
        raise CompatibilityError("q8 stores finite values; found one that is not")
    bias_bits = _rounded_down(min(values))
    bias = _widened(bias_bits)
    spread = _single(max(values) - bias)
    if not math.isfinite(spread):
        raise CompatibilityError("q8 stores values that lie less than the largest float32 apart; found others")
    if spread < MIN_SPREAD:
        return bytes(len(values)), 0, bias_bits
    scale_bits = (_bits(_single(spread / MAX_CODE)) + 0xFFFF) >> 16
    scale = _widened(scale_bits)
    codes = (round(_single(_single(value - bias) / scale)) for value in values)
    return bytes(min(MAX_CODE, max(0, code)) for code in codes), scale_bits, bias_bits


def _decoded(code: int, scale: float, bias: float) -> float:
    return _single(_single(code * scale) + bias)


def _rounded_down(value: float) -> int:
    """Bits of the largest bfloat16 number that is not above a value; of +0 where that would be subnormal."""
    bits = _bits(value)
    bits = (bits + 0xFFFF if bits >> 31 else bits) >> 16
    return bits if bits & 0x7F80 else 0


# --- numbers ----------------------------------------------------------------------------------------------------------


def _single(value: float) -> float:
    """Rounded to binary32; infinite beyond it.

    A sum, product or quotient of two binary32 numbers, computed in binary64 and then rounded so, is what binary32
    itself would give.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _widened(half: int) -> float:
    """The value of a bfloat16 number."""
    return float(struct.unpack("<f", struct.pack("<I", half << 16))[0])


def _halves(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 2}H", data)


def _values(dtype: DType, data: bytes) -> tuple[float, ...]:
    if dtype is DType.BFLOAT16:
        return tuple(_widened(half) for half in _halves(data))
    letter = "f" if dtype is DType.FLOAT32 else "e"
    return struct.unpack(f"<{len(data) // dtype.size_bytes}{letter}", data)


def _bytes(dtype: DType, values: Sequence[float]) -> bytes:
    largest = LARGEST[dtype]
    bounded = [min(largest, max(-largest, value)) for value in values]
    if dtype is DType.BFLOAT16:
        return struct.pack(f"<{len(bounded)}H", *(_nearest(value) for value in bounded))
    letter = "f" if dtype is DType.FLOAT32 else "e"
    return struct.pack(f"<{len(bounded)}{letter}", *bounded)


def _nearest(value: float) -> int:
    """Bits of the nearest bfloat16 number, ties to even."""
    bits = _bits(value)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
