"""Tiles to stored bytes and back, in every codec, on arrays; for the process an engine runs in.

The lossless codecs work on bytes and are ``kvnet.format.codecs``. The lossy one is defined, number by number, in
``kvnet.format.q8``; here is the same on whole tiles, and a test holds the two to the same bytes. It is numpy and not a
GPU's own arithmetic, because a fused multiply-add would round otherwise.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import q8
from kvnet.format.chunks import ChunkSpec
from kvnet.format.codecs import Codec, decode_chunk, encode_chunk
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.hashes import BytesLike
from kvnet.format.tensor import DType, LayerKind

_Floats = NDArray[np.float32]

_SLICE_VALUES = 1 << 15
"""Values worked on at once: 128 KiB of float32 stays in a core's cache from the first operation to the last."""


def encode_tile(codec: Codec, layers: LayerLayout, spec: ChunkSpec, raw: bytes) -> bytes:
    """The stored bytes of a tile.

    Args:
        codec: how.
        layers: the model's layer layout.
        spec: the tile, of the plan.
        raw: its K and V as they are laid out, ``spec.raw_size_bytes`` bytes.

    Raises:
        CompatibilityError: values that the codec cannot store.
        MalformedError: rows that the codec cannot store.
    """
    kind = layers.kind_of(spec.first_layer)
    if codec is not Codec.Q8:
        return encode_chunk(codec, raw, kind.dtype.size_bytes)
    stored = np.empty(q8.bytes_per_token(kind) * spec.n_layers * spec.n_tokens, np.uint8)
    tile = np.frombuffer(raw, np.uint8)
    for part in q8.parts_of(kind, spec.n_layers, spec.n_tokens):
        _encode_part(kind.dtype, part, tile[part.raw], stored)
    return stored.tobytes()


def decode_tile(codec: Codec, layers: LayerLayout, spec: ChunkSpec, stored: BytesLike) -> bytes:
    """The tile again: exactly ``spec.raw_size_bytes`` bytes.

    Args:
        codec: how it is stored.
        layers: the model's layer layout.
        spec: the tile, of the plan.
        stored: its bytes, whose hash was checked.

    Raises:
        MalformedError: bytes that no encoder makes of such a tile.
    """
    kind = layers.kind_of(spec.first_layer)
    if codec is not Codec.Q8:
        return decode_chunk(codec, stored, kind.dtype.size_bytes, spec.raw_size_bytes)
    expected = q8.bytes_per_token(kind) * spec.n_layers * spec.n_tokens
    if len(stored) != expected:
        raise MalformedError(f"q8 tile: expected {expected} bytes, found {len(stored)}")
    data = np.frombuffer(stored, np.uint8)
    tile = np.empty(spec.raw_size_bytes, np.uint8)
    for part in q8.parts_of(kind, spec.n_layers, spec.n_tokens):
        _decode_part(kind, part, data, tile[part.raw])
    return tile.tobytes()


# --- encoding ---------------------------------------------------------------------------------------------------------


def _encode_part(dtype: DType, part: q8.Part, raw: NDArray[np.uint8], stored: NDArray[np.uint8]) -> None:
    codes = stored[part.codes].reshape(-1, part.group)
    scales, biases = (stored[where].view("<u2") for where in (part.scales, part.biases))
    rows = raw.view(_carrier(dtype)).reshape(-1, part.group)
    step = max(1, _SLICE_VALUES // part.group)
    for first in range(0, len(rows), step):
        at = slice(first, first + step)
        # Infinities are found below and refused, so that they need no warning here.
        with np.errstate(over="ignore", invalid="ignore"):
            scales[at], biases[at] = _encode_groups(_as_float32(dtype, rows[at]), codes[at])


def _encode_groups(values: _Floats, codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Fills in the codes; the bits of scales and biases."""
    least, most = values.min(axis=1), values.max(axis=1)
    if not np.isfinite(least).all() or not np.isfinite(most).all():
        raise CompatibilityError("q8 stores finite values; found one that is not")
    bits = least.view(np.uint32)
    biases = (np.where(bits >> 31, bits + np.uint32(0xFFFF), bits) >> 16).astype(np.uint16)
    biases[(biases & 0x7F80) == 0] = 0
    bias = _widened(biases)
    spread = most - bias
    if not np.isfinite(spread).all():
        raise CompatibilityError("q8 stores values that lie less than the largest float32 apart; found others")
    quotient: _Floats = spread / np.float32(q8.MAX_CODE)
    scales = ((quotient.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    flat = spread < np.float32(q8.MIN_SPREAD)
    scales[flat] = 0
    scale = _widened(scales)
    # A flat group's values are its bias: dividing the little that is left by infinity gives its codes, 0.
    scale[flat] = np.inf
    work = values - bias[:, None]
    work /= scale[:, None]
    np.rint(work, out=work)
    np.clip(work, 0, q8.MAX_CODE, out=work)
    codes[:] = work
    return scales, biases


def _as_float32(dtype: DType, rows: NDArray[Any]) -> _Floats:
    if dtype is DType.BFLOAT16:
        return _widened(rows)
    return rows.astype(np.float32)


# --- decoding ---------------------------------------------------------------------------------------------------------


def _decode_part(kind: LayerKind, part: q8.Part, stored: NDArray[np.uint8], raw: NDArray[np.uint8]) -> None:
    scales, biases = (stored[where].view("<u2") for where in (part.scales, part.biases))
    _check_parameters(scales, biases)
    scale, bias = _widened(scales), _widened(biases)
    with np.errstate(over="ignore"):
        top = np.float32(q8.MAX_CODE) * scale + bias
    largest = np.float32(q8.LARGEST[kind.dtype])
    # What an encoder writes stays in range but for a rounding at the very end of it.
    bounded = bool((top <= largest).all() and (bias >= -largest).all())
    codes = stored[part.codes].reshape(-1, part.group)
    out = raw.view(_carrier(kind.dtype)).reshape(-1, part.group)
    step = max(1, _SLICE_VALUES // part.group)
    for first in range(0, len(codes), step):
        at = slice(first, first + step)
        work = codes[at].astype(np.float32)
        with np.errstate(over="ignore"):
            work *= scale[at, None]
            work += bias[at, None]
        if not bounded:
            np.clip(work, -largest, largest, out=work)
        out[at] = _nearest_bfloat16(work) if kind.dtype is DType.BFLOAT16 else work


def _check_parameters(scales: NDArray[np.uint16], biases: NDArray[np.uint16]) -> None:
    exponents = scales & 0x7F80
    if (scales >> 15).any() or ((exponents == 0) & (scales != 0)).any() or (exponents == 0x7F80).any():
        raise MalformedError("q8 tile: expected scales of 0 or above, normal and finite")
    exponents = biases & 0x7F80
    if ((exponents == 0) & (biases != 0)).any() or (exponents == 0x7F80).any():
        raise MalformedError("q8 tile: expected biases that are 0, or normal and finite")


def _nearest_bfloat16(values: _Floats) -> NDArray[np.uint32]:
    """Bits of the nearest bfloat16 numbers, ties to even, in the lower halves."""
    bits = values.view(np.uint32)
    odd: NDArray[np.uint32] = (bits >> np.uint32(16)) & np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    return odd


# --- numbers ----------------------------------------------------------------------------------------------------------


def _widened(halves: NDArray[np.uint16]) -> _Floats:
    """The values of bfloat16 numbers."""
    bits = halves.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _carrier(dtype: DType) -> Any:
    """The numpy dtype that carries a dtype's bytes, little-endian; bfloat16 as 16-bit integers."""
    return {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<u2"}[dtype]
