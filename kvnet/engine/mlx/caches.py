"""Live mlx-lm caches seen as K/V rows: layout, rows out, rows in.

Only ``KVCache`` is read and built here; the test is on the exact class, never on its family, because relatives keep
their rows differently (a rotating cache in a ring, a chunked one with its front cut off). A cache's buffer is never
handed out: it is padded to 256 rows and keeps rows of trimmed tokens. Rows stop at the offset.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache
from numpy.typing import NDArray

from kvnet.engine.mlx.unfilled import unfilled
from kvnet.errors import CompatibilityError
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.tensor import DType, LayerKind

HEADROOM_TOKENS = 256
"""Free rows after restored ones: without them the first new token copies the whole cache (202 ms against 4.6 ms on
208 MB)."""

_DTYPES: dict[Any, tuple[DType, Any]] = {
    mx.float32: (DType.FLOAT32, np.float32),
    mx.float16: (DType.FLOAT16, np.float16),
    # numpy has no bfloat16: its bits travel as 16-bit integers.
    mx.bfloat16: (DType.BFLOAT16, np.uint16),
}

_REASONS = {
    "RotatingKVCache": "a sliding window, kept in a ring",
    "ArraysCache": "recurrent or convolution state, which cannot be cut at a token",
    "MambaCache": "recurrent state, which cannot be cut at a token",
    "ChunkedKVCache": "chunked attention, whose front is dropped",
    "CacheList": "several caches in one layer",
    "QuantizedKVCache": "quantised K/V",
}

Rows = NDArray[Any]
"""K or V of one layer: (heads, tokens, dim), numpy, bfloat16 as uint16."""


def refusal_of(caches: Sequence[Any]) -> str:
    """Why these caches cannot be exported or restored, naming layer and class; empty when they can."""
    for layer, cache in enumerate(caches):
        if type(cache) is not KVCache:
            name = type(cache).__name__
            reason = _REASONS.get(name, "a cache class this build does not know")
            return f"layer {layer} of {len(caches)} keeps its state in {name} ({reason}); only KVCache can be shared"
    return "" if caches else "the model has no attention layers"


def layout_of(caches: Sequence[Any]) -> LayerLayout:
    """The layer layout of caches that have seen at least one token.

    Raises:
        CompatibilityError: a layer's class or dtype cannot be shared.
    """
    if refusal := refusal_of(caches):
        raise CompatibilityError(refusal)
    kinds: list[LayerKind] = []
    order = bytearray()
    for layer, cache in enumerate(caches):
        kind = _kind_of(layer, cache)
        if kind not in kinds:
            kinds.append(kind)
        order.append(kinds.index(kind))
    return LayerLayout(kinds=tuple(kinds), order=bytes(order))


def _kind_of(layer: int, cache: Any) -> LayerKind:
    if cache.keys.dtype != cache.values.dtype or cache.keys.dtype not in _DTYPES:
        raise CompatibilityError(
            f"layer {layer}: expected K and V in one of float32, float16, bfloat16; "
            f"found {cache.keys.dtype} and {cache.values.dtype}"
        )
    batch, heads, _, k_dim = cache.keys.shape
    if batch != 1 or cache.values.shape[:2] != (1, heads):
        raise CompatibilityError(
            f"layer {layer}: expected K and V of one sequence with the same heads; "
            f"found shapes {cache.keys.shape} and {cache.values.shape}"
        )
    dtype, _ = _DTYPES[cache.keys.dtype]
    return LayerKind(cache="kv", heads=heads, k_dim=k_dim, v_dim=cache.values.shape[3], dtype=dtype)


def rows_of(cache: Any, first_token: int, n_tokens: int) -> tuple[Rows, Rows]:
    """K and V rows ``first_token`` up to ``first_token + n_tokens`` of an evaluated cache, without a copy.

    Each is (heads, tokens, dim), in the cache's own dtype, bfloat16 as uint16; the caches are of a batch of one. The
    views alias MLX's memory: read them and let them go before the model runs again.

    Raises:
        CompatibilityError: the rows reach beyond what the cache holds.
    """
    end = first_token + n_tokens
    if not 0 <= first_token < end <= cache.offset:
        raise CompatibilityError(f"expected rows within {cache.offset} tokens, found {first_token} to {end}")
    return tuple(_view(array)[0, :, first_token:end, :] for array in (cache.keys, cache.values))  # type: ignore[return-value]


def _view(array: mx.array) -> NDArray[Any]:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    exporter: Any = array  # arrays fulfil the buffer protocol; the stubs do not say so
    return np.asarray(memoryview(exporter))


@functools.cache
def memory_is_shared() -> bool:
    """Whether a write through a numpy view reaches MLX's own memory on this device; tried once on a few bytes."""
    array = mx.zeros((2, 8), dtype=mx.float32)
    mx.eval(array)
    _view(array)[1, :] = 1.0
    return bool(mx.sum(array).item() == 8.0)


def rows_for(n_tokens: int, capacity_tokens: int) -> int:
    """Rows of a buffer for ``n_tokens`` that has room for ``capacity_tokens``, rounded up to the allocator's 256.

    Some are free after ``n_tokens`` in any case. No more than that: every row costs memory that is written to clear it.
    """
    return (max(n_tokens + HEADROOM_TOKENS, capacity_tokens) + 255) // 256 * 256


def copy_rows(cache: Any, n_tokens: int, capacity_tokens: int) -> KVCache:
    """A private, evaluated copy of the first ``n_tokens`` tokens, with room for ``capacity_tokens``.

    Raises:
        CompatibilityError: no tokens, or more than the cache holds.
    """
    if not 0 < n_tokens <= cache.offset:
        raise CompatibilityError(f"expected 1 to {cache.offset} tokens to copy, found {n_tokens}")
    rows = rows_for(n_tokens, capacity_tokens)
    copied: Any = KVCache()
    copied.keys = _resized(cache.keys, n_tokens, rows)
    copied.values = _resized(cache.values, n_tokens, rows)
    copied.offset = n_tokens
    return copied


def with_room(cache: Any, capacity_tokens: int) -> None:
    """Makes sure that an evaluated cache can hold ``capacity_tokens`` without another copy.

    Keys and values one after the other, so that no more than one of the two is there twice.
    """
    if cache.keys.shape[2] >= capacity_tokens:
        return
    rows = rows_for(cache.offset, capacity_tokens)
    cache.keys = _resized(cache.keys, cache.offset, rows)
    cache.values = _resized(cache.values, cache.offset, rows)


def _resized(array: Any, n_tokens: int, rows: int) -> mx.array:
    batch, heads, _, dim = array.shape
    shape = (batch, heads, rows, dim)
    if memory_is_shared():
        [new] = unfilled([(shape, array.dtype)])
        view = _view(new)
        view[:, :, :n_tokens, :] = _view(array)[:, :, :n_tokens, :]
        view[:, :, n_tokens:, :] = 0
    else:
        new = mx.zeros(shape, dtype=array.dtype)
        new[:, :, :n_tokens, :] = array[:, :, :n_tokens, :]
        mx.eval(new)
    return new


def cache_builders(layers: LayerLayout, n_tokens: int, capacity_tokens: int, *, in_place: bool) -> list["CacheBuilder"]:
    """A builder for each layer; see there.

    Args:
        layers: the model's layer layout.
        n_tokens: rows that will be put.
        capacity_tokens: tokens to make room for.
        in_place: fill MLX's own memory, which saves a copy of every layer.
    """
    kinds = [layers.kinds[kind] for kind in layers.order]
    if not in_place:
        return [CacheBuilder(kind, n_tokens, capacity_tokens) for kind in kinds]
    wanted = [(shape, _mlx_dtype(kind)) for kind in kinds for shape in _shapes(kind, n_tokens, capacity_tokens)]
    arrays = unfilled(wanted)
    return [
        CacheBuilder(kind, n_tokens, capacity_tokens, arrays[2 * layer : 2 * layer + 2])
        for layer, kind in enumerate(kinds)
    ]


def _shapes(kind: LayerKind, n_tokens: int, capacity_tokens: int) -> list[tuple[int, ...]]:
    """Of K and of V."""
    rows = rows_for(n_tokens, capacity_tokens)
    return [(1, kind.heads, rows, dim) for dim in (kind.k_dim, kind.v_dim)]


def _mlx_dtype(kind: LayerKind) -> Any:
    return next(ours for ours, (theirs, _) in _DTYPES.items() if theirs == kind.dtype)


class CacheBuilder:
    """Builds one layer's ``KVCache`` from rows put in place, with room to grow.

    Args:
        kind: shape and dtype of the layer.
        n_tokens: rows that will be put; becomes the cache's offset.
        capacity_tokens: rows to make room for beyond them, rounded up to the allocator's 256.
        arrays: K and V of MLX's own, evaluated and not written yet, to fill; without, a copy is made of every layer.

    ``put`` and ``clear_rest`` may run in several threads, each with other rows.
    """

    def __init__(
        self, kind: LayerKind, n_tokens: int, capacity_tokens: int, arrays: Sequence[mx.array] | None = None
    ) -> None:
        self._n_tokens = n_tokens
        self._dtype = _mlx_dtype(kind)
        if arrays is not None:
            self._arrays = list(arrays)
            # Dropped in finish(), before MLX reads what was written.
            self._views = [_view(array) for array in self._arrays]
        else:
            self._arrays = []
            self._views = [np.empty(shape, numpy_dtype(kind)) for shape in _shapes(kind, n_tokens, capacity_tokens)]

    def put(self, first_token: int, keys: Rows, values: Rows) -> None:
        """Copies rows to their place; rows from ``n_tokens`` on are left out."""
        count = min(keys.shape[1], self._n_tokens - first_token)
        for view, rows in zip(self._views, (keys, values), strict=True):
            view[0, :, first_token : first_token + count, :] = rows[:, :count, :]

    def places(self, first_token: int, n_tokens: int) -> list[Rows] | None:
        """Where a tile's rows go, in the order in which they are stored: of K, then V, those of each head together.

        Each is C-contiguous, (tokens, dim), and may be written instead of a ``put``. ``None`` when some of the rows are
        left out, or MLX's memory is not what is filled.
        """
        end = first_token + n_tokens
        if not self._arrays or end > self._n_tokens:
            return None
        return [head[first_token:end] for view in self._views for head in view[0]]

    def clear_rest(self) -> None:
        """Fills the rows after those that are put with zeros: what lay in that memory before is nobody's K/V."""
        for view in self._views:
            view[:, :, self._n_tokens :, :] = 0

    def finish(self) -> KVCache:
        """The cache, evaluated, its position set explicitly."""
        if not self._arrays:
            self._arrays = [self._copied(view) for view in self._views]
        self._views.clear()
        built = KVCache()
        built.keys, built.values = self._arrays
        # Never left to a setter's side effect: a position of 0 would give later tokens the wrong rotation.
        built.offset = self._n_tokens
        return built

    def _copied(self, view: Rows) -> mx.array:
        array = mx.array(view)
        return array.view(self._dtype) if self._dtype == mx.bfloat16 else array


def numpy_dtype(kind: LayerKind) -> Any:
    """The numpy dtype that carries a kind's bytes, little-endian."""
    carried = next(numpy for theirs, numpy in _DTYPES.values() if theirs == kind.dtype)
    return np.dtype(carried).newbyteorder("<")


# Infinity and NaN have every exponent bit set, so that their magnitude, read as an integer, is at least this.
_INFINITY = {DType.FLOAT32: 0x7F800000, DType.BFLOAT16: 0x7F80, DType.FLOAT16: 0x7C00}


def all_finite(kind: LayerKind, values: NDArray[Any]) -> bool:
    """Whether no value is infinite or NaN."""
    # On bits: numpy does not know bfloat16, and widens float16 value by value. Two maxima need no memory for results:
    # of signed integers the largest is positive if any is, of unsigned ones it has the sign bit if any has.
    size, infinity = values.dtype.itemsize, _INFINITY[kind.dtype]
    positive, negative = values.view(f"<i{size}").max(initial=0), values.view(f"<u{size}").max(initial=0)
    return bool(positive < infinity and negative < infinity | 1 << (8 * size - 1))


def evaluate(caches: Sequence[Any]) -> None:
    """Evaluates every array of the caches, so that they may be read or cross to another thread."""
    mx.eval([cache.state for cache in caches])


def as_batch(caches: Sequence[Any]) -> list[Any]:
    """A batch of one over the caches' own arrays; the caches are given up.

    mlx-lm's ``merge`` would copy every row, which doubles memory exactly for the longest prompts.
    """
    batch: list[Any] = []
    for cache in caches:
        if type(cache) is not KVCache or cache.keys is None:
            batch.append(cache.merge([cache]))
            continue
        joined = BatchKVCache([0])
        joined.keys, joined.values = cache.keys, cache.values
        joined.offset = mx.array([cache.offset])
        joined._idx = cache.offset  # the class has no constructor that takes rows
        cache.keys = cache.values = None
        batch.append(joined)
    return batch


def unbatched(batch: Sequence[Any]) -> list[Any]:
    """Single-sequence caches over the own arrays of a batch of one, evaluated; the batch is given up.

    The reverse of ``as_batch``: ``extract`` would copy every row, which doubles memory for the longest conversation.
    """
    caches: list[Any] = []
    for joined in batch:
        if not _is_one_sequence(joined):
            caches.append(joined.extract(0))
            continue
        cache: Any = KVCache()
        cache.keys, cache.values, cache.offset = joined.keys, joined.values, joined._idx
        joined.keys = joined.values = None
        caches.append(cache)
    evaluate(caches)
    return caches


def _is_one_sequence(joined: Any) -> bool:
    return type(joined) is BatchKVCache and not joined.empty() and joined.left_padding.tolist() == [0]
