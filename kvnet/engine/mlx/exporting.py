"""Live caches into stored tiles, written from the prefill loop as soon as their block is complete."""

import errno
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from kvnet.engine.kv_state import ExportRequest, WrittenChunk
from kvnet.engine.mlx.caches import all_finite, numpy_dtype, rows_of
from kvnet.engine.tiles import encode_tile
from kvnet.errors import EngineError, StoreError, StoreFullError
from kvnet.format.chunks import ChunkPlan, ChunkSpec, layer_groups
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.hashes import blake3_hash
from kvnet.format.sample import parts_of


class TileWriter:
    """Writes the tiles of one export into the pack, block by block, at consecutive offsets.

    Args:
        request: what to export and where to.
        layers: the model's layer layout.
    """

    def __init__(self, request: ExportRequest, layers: LayerLayout) -> None:
        self._request = request
        self._layers = layers
        self._plan = ChunkPlan(
            n_tokens=len(request.tokens),
            layers=layers,
            groups=layer_groups(layers),
            context_size_bytes=request.context_size_bytes,
        )
        self._next_block = request.first_block
        self._offset = request.pack_offset
        self._handle = -1
        self.written: list[WrittenChunk] = []

    def __enter__(self) -> "TileWriter":
        with _translated():
            self._handle = os.open(self._request.pack_path, os.O_WRONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole prefix."""
        return len(self._request.tokens)

    @property
    def n_blocks(self) -> int:
        """Blocks of the whole prefix, the short one included."""
        return -(-self.n_tokens // 256)

    def write_next(self, caches: Sequence[Any], n_done: int) -> bool:
        """Writes the next block if its last token is among the first ``n_done``; whether it did.

        The caches are evaluated and may hold more tokens; nothing of those is written.

        Raises:
            EngineError: the model computed values that are not finite.
            StoreError: the pack cannot be written.
        """
        if self._next_block >= self.n_blocks:
            return False
        tiles = [self._plan[index] for index in self._plan.tiles_of_block(self._next_block)]
        if tiles[0].first_token + tiles[0].n_tokens > n_done:
            return False
        for spec in tiles:
            self._write(spec, caches)
        self._next_block += 1
        return True

    def _write(self, spec: ChunkSpec, caches: Sequence[Any]) -> None:
        raw = self._raw(spec, caches)
        stored = encode_tile(self._request.codec, self._layers, spec, raw)
        self.written.append(WrittenChunk(spec.index, self._offset, len(stored), blake3_hash(stored)))
        with _translated():
            done = 0
            while done < len(stored):
                done += os.pwrite(self._handle, memoryview(stored)[done:], self._offset + done)
        self._offset += len(stored)

    def _raw(self, spec: ChunkSpec, caches: Sequence[Any]) -> bytes:
        kind = self._layers.kinds[self._layers.order[spec.first_layer]]
        tile = np.empty(spec.raw_size_bytes // kind.dtype.size_bytes, numpy_dtype(kind))
        position = 0
        for cache in caches[spec.first_layer : spec.first_layer + spec.n_layers]:
            for rows in rows_of(cache, spec.first_token, spec.n_tokens):
                tile[position : position + rows.size].reshape(rows.shape)[:] = rows
                position += rows.size
        if position != tile.size:
            raise EngineError(f"tile {spec.index}: expected {tile.size} values, the caches hold {position}")
        if not all_finite(kind, tile):
            raise EngineError("the model computed K/V that is not finite; nothing is exported")
        return tile.tobytes()


def sampled_rows(layers: LayerLayout, caches: Sequence[Any]) -> bytes:
    """The K/V of a sample, from evaluated caches that hold its tokens.

    Raises:
        EngineError: the model computed values that are not finite.
    """
    rows: list[bytes] = []
    for part in parts_of(layers):
        kind = layers.kind_of(part.layer)
        found = rows_of(caches[part.layer], part.position, 1)[int(part.values)]
        values = np.ascontiguousarray(found, dtype=numpy_dtype(kind))
        if not all_finite(kind, values):
            raise EngineError("the model computed K/V that is not finite; it has no sample")
        rows.append(values.tobytes())
    return b"".join(rows)


class _translated:  # noqa: N801 - a context manager used as a phrase
    """Operating system errors of the pack as store errors."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreFullError(f"could not write the pack: {error.strerror}", hint="kvnet gc") from error
        raise StoreError(f"could not write the pack: {error.strerror}") from error
