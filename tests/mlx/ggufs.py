"""Writes small GGUF files from scratch, after the GGUF specification, so that the importer is checked by other code."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
_GROUP = 32
_ALIGNMENT = 32
_STRING, _ARRAY, _INT32 = 8, 9, 5


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    assert isinstance(value, list)
    if all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_text(item) for item in value)
    return struct.pack("<IIQ", _ARRAY, _INT32, len(value)) + struct.pack(f"<{len(value)}i", *value)


def _groups(array: Array) -> Array:
    return array.reshape(-1, _GROUP)


def _nibbles(codes: Any) -> Any:
    # The first half of a group lies in the low nibbles, the second in the high ones.
    return codes[:, :16] | (codes[:, 16:] << 4)


def _f32(array: Array) -> tuple[bytes, Array]:
    return array.tobytes(), array


def _f16(array: Array) -> tuple[bytes, Array]:
    half = array.astype(np.float16)
    return half.tobytes(), half.astype(np.float32)


def _q8_0(array: Array) -> tuple[bytes, Array]:
    groups = _groups(array)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(groups / np.maximum(scale.astype(np.float32), 1e-8)).clip(-128, 127).astype(np.int8)
    data = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True))
    return data, (scale.astype(np.float32) * codes).reshape(array.shape)


def _q4_0(array: Array) -> tuple[bytes, Array]:
    groups = _groups(array)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 7).astype(np.float16)
    codes = (np.round(groups / np.maximum(scale.astype(np.float32), 1e-8)) + 8).clip(0, 15).astype(np.uint8)
    data = b"".join(s.tobytes() + c.tobytes() for s, c in zip(scale, _nibbles(codes), strict=True))
    return data, (scale.astype(np.float32) * (codes.astype(np.float32) - 8)).reshape(array.shape)


def _q4_1(array: Array) -> tuple[bytes, Array]:
    groups = _groups(array)
    low = groups.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((groups.max(axis=1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    codes = np.round((groups - low.astype(np.float32)) / np.maximum(scale.astype(np.float32), 1e-8))
    codes = codes.clip(0, 15).astype(np.uint8)
    rows = zip(scale, low, _nibbles(codes), strict=True)
    data = b"".join(s.tobytes() + m.tobytes() + c.tobytes() for s, m, c in rows)
    decoded: Array = (scale.astype(np.float32) * codes + low.astype(np.float32)).astype(np.float32)
    return data, decoded.reshape(array.shape)


FORMATS: dict[str, tuple[int, Callable[[Array], tuple[bytes, Array]]]] = {
    "F32": (0, _f32), "F16": (1, _f16), "Q4_0": (2, _q4_0), "Q4_1": (3, _q4_1), "Q8_0": (8, _q8_0),
}  # fmt: skip


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Array], formats: Mapping[str, str]
) -> dict[str, Array]:
    """Write a GGUF file (version 3); returns what each tensor reads back as. ``formats`` defaults to F32."""
    infos, blocks, stored = b"", b"", {}
    for name, array in tensors.items():
        number, pack = FORMATS[formats.get(name, "F32")]
        data, stored[name] = pack(np.ascontiguousarray(array))
        dimensions = array.shape[::-1]
        infos += _text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, number, len(blocks))
        blocks += data + bytes(-len(data) % _ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items()) + infos
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + blocks)
    return stored
