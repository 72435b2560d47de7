"""Reads safetensors headers and hashes tensors where they lie, without MLX.

File layout (https://huggingface.co/docs/safetensors): u64 little-endian header length, header as JSON
(name -> dtype, shape, data_offsets relative to the end of the header), tensor bytes.
"""

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvnet.errors import EngineError

MAX_HEADER_BYTES = 100_000_000
"""The format's own maximum."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor's place in a file; ``start`` and ``end`` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One tensor's identity: name, dtype (as safetensors writes it), shape, BLAKE3 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: bytes


def read_header(path: Path) -> list[TensorSlice]:
    """The tensors of one file, in the order of their names.

    Raises:
        EngineError: the file is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise EngineError(
                    f"{path.name}: expected a safetensors header of at most {size_bytes - 8} bytes, "
                    f"found a length of {length}"
                )
            header = json.loads(file.read(length))
        return sorted(_slices(header, 8 + length, size_bytes, path), key=lambda tensor: tensor.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path.name}: not a safetensors file ({error})") from error


def _slices(header: dict[str, dict[str, Any]], base: int, size_bytes: int, path: Path) -> Iterator[TensorSlice]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= size_bytes - base:
            raise EngineError(f"{path.name}: tensor {name!r} reaches beyond the end of the file")
        shape = tuple(int(extent) for extent in entry["shape"])
        yield TensorSlice(name, str(entry["dtype"]), shape, base + start, base + end)


def hash_tensors(path: Path) -> list[TensorDigest]:
    """Every tensor of a file with the BLAKE3 of its bytes, read through a memory map.

    Raises:
        EngineError: the file is not a safetensors file.
    """
    tensors = read_header(path)
    with path.open("rb") as file:
        if not tensors or os.fstat(file.fileno()).st_size == 0:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            return [_digest(tensor, view) for tensor in tensors]


def _digest(tensor: TensorSlice, view: memoryview) -> TensorDigest:
    with view[tensor.start : tensor.end] as data:
        digest = blake3(data, max_threads=blake3.AUTO).digest()
    return TensorDigest(tensor.name, tensor.dtype, tensor.shape, digest)
