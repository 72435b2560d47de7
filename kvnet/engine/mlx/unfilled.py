"""Memory for arrays that are about to be filled: MLX's own, evaluated, and written by nobody yet.

``mx.empty`` is ``mx.zeros`` in MLX 0.32: it writes all of the memory, in one thread, which makes the system find pages
for it, and the caller writes it again. A file is read into memory that MLX has not touched; here the file is one that
leaves that memory as it is.
"""

import json
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

LET_GO_S = 1.0
"""Longest wait, in seconds, for MLX's threads to let go of a file that they have read; it takes them microseconds."""

_reading = threading.Lock()
"""Held while a thread of MLX's may have such a file, and while MLX's free buffers are given back."""

_NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}


def unfilled(wanted: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
    """Evaluated arrays whose values are whatever was in their memory: write each before it is read.

    All that are needed at once should be asked for at once.

    Args:
        wanted: shape, with at least one element, and dtype of each: float32, float16 or bfloat16.
    """
    let_go = threading.Event()
    with _reading:
        try:
            arrays = _read(_header(wanted), let_go)
        except (RuntimeError, TypeError, ValueError):
            # A device that will have none of it gets the same memory more slowly; no answer is to fail for that.
            arrays = [mx.zeros(shape, dtype=dtype) for shape, dtype in wanted]
            mx.eval(arrays)
        else:
            # A thread of MLX's drops its reference a little after the arrays are there, and needs the interpreter for
            # that. One that still wants it when the process ends is unwound through C++ that allows no such thing: an
            # abort.
            let_go.wait(LET_GO_S)
    return arrays


def clear_cache() -> None:
    """Gives MLX's free buffers back; to be called in place of `mx.clear_cache`.

    On the CPU that waits for MLX's threads and keeps the interpreter from everybody meanwhile. A thread that wants it
    to let go of one of these files would never end: both, and with them the process, would wait for ever.
    """
    with _reading:
        mx.clear_cache()  # noqa: TID251 - nobody reads such a file now


def _read(header: tuple[bytes, int], let_go: threading.Event) -> list[mx.array]:
    """The arrays of a file that is nothing but a header; the event is set once nobody holds the file any more."""
    file: Any = _NothingToRead(*header)
    weakref.finalize(file, let_go.set).atexit = False
    loaded: Any = mx.load(file, format="safetensors")
    arrays = [loaded[str(number)] for number in range(len(loaded))]
    mx.eval(arrays)
    return arrays


def _header(wanted: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> tuple[bytes, int]:
    """The beginning of a safetensors file with arrays named 0, 1, 2 and so on, and its whole size in bytes."""
    tensors: dict[str, object] = {}
    end = 0
    for number, (shape, dtype) in enumerate(wanted):
        begin, end = end, end + math.prod(shape) * dtype.size
        tensors[str(number)] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(tensors).encode()
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + end


class _NothingToRead:
    """A file for MLX to read: its header is there, and what comes after it is left unread."""

    closed = False

    def __init__(self, header: bytes, size_bytes: int) -> None:
        self._header = header
        self._size_bytes = size_bytes
        self._place = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size_bytes)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, memory: Any) -> int:
        """Fills ``memory`` as far as the header goes, and says that the rest was read too."""
        into = memoryview(memory).cast("B")
        there = self._header[self._place : self._place + len(into)]
        into[: len(there)] = there
        self._place += len(into)
        return len(into)
