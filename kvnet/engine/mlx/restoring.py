"""Stored tiles into live caches: hash the bytes held, check them, then build arrays from those same bytes."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnet.engine.kv_state import ChunkRef, RestorePlan
from kvnet.engine.mlx.caches import CacheBuilder, all_finite, cache_builders, evaluate, memory_is_shared, numpy_dtype
from kvnet.engine.tiles import decode_tile
from kvnet.errors import CompatibilityError, EngineError, IntegrityError
from kvnet.format.chunks import ChunkKind, ChunkSpec
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.hashes import blake3_hash, blake3_hash_of
from kvnet.format.manifest import Manifest, decode_manifest

N_THREADS = min(4, os.cpu_count() or 1)
"""Threads that read, hash and copy tiles. Hashing alone is slower in one thread than what a disk gives."""

MAX_PLACES = 512
"""Most places that one call reads to; systems take 1,024."""

BetweenTiles = Callable[[], None]
"""Called between tiles; may raise to stop."""


def restore(plan: RestorePlan, fingerprint: Fingerprint, *, capacity_tokens: int, between: BetweenTiles) -> list[Any]:
    """Caches that hold the first ``plan.n_tokens`` tokens, private to the caller, with room for ``capacity_tokens``.

    Raises:
        CompatibilityError: another fingerprint, more tokens than there are, a tile missing, or values not finite.
        IntegrityError: a tile's bytes do not match their hash.
        EngineError: a tile cannot be read.
    """
    manifest = decode_manifest(plan.manifest)
    _check(manifest, plan.n_tokens, fingerprint)
    layers = manifest.fingerprint.layers
    builders = cache_builders(layers, plan.n_tokens, capacity_tokens, in_place=memory_is_shared())
    held = {chunk.index: chunk for chunk in plan.chunks}
    tiles: list[tuple[ChunkSpec, ChunkRef]] = []
    for spec in _needed_tiles(manifest, plan.n_tokens):
        chunk = held.get(spec.index)
        if chunk is None:
            raise CompatibilityError(f"restore needs tile {spec.index}; the plan does not say where it lies")
        tiles.append((spec, chunk))
    between()
    with _Files([chunk for _, chunk in tiles]) as files, ThreadPoolExecutor(N_THREADS, "restore") as threads:
        put = [threads.submit(_restore_tile, files, manifest, spec, chunk, builders) for spec, chunk in tiles]
        cleared = [threads.submit(builder.clear_rest) for builder in builders]
        try:
            for done in (*put, *cleared):
                done.result()
                between()
        except BaseException:
            # What runs ends before its memory does; the rest is not begun.
            threads.shutdown(cancel_futures=True)
            raise
    caches = [builder.finish() for builder in builders]
    evaluate(caches)
    return caches


def _check(manifest: Manifest, n_tokens: int, fingerprint: Fingerprint) -> None:
    if manifest.fingerprint.hash != fingerprint.hash:
        raise CompatibilityError("the artifact's fingerprint is not that of the loaded model")
    if not 0 < n_tokens <= manifest.n_tokens:
        raise CompatibilityError(f"expected to reuse 1 to {manifest.n_tokens} tokens, found {n_tokens}")


def _needed_tiles(manifest: Manifest, n_tokens: int) -> list[ChunkSpec]:
    plan = manifest.plan()
    return [spec for spec in (plan[index] for index in plan.needed_for(n_tokens)) if spec.kind == ChunkKind.TILE]


class _Files:
    """The files of one restore, each opened once.

    Args:
        chunks: what will be read.
    """

    def __init__(self, chunks: Sequence[ChunkRef]) -> None:
        self._open: dict[Path, int] = {}
        self._size_bytes = max((chunk.length_bytes for chunk in chunks), default=0)
        self._buffers = threading.local()
        try:
            for chunk in chunks:
                if chunk.path not in self._open:
                    self._open[chunk.path] = os.open(chunk.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise EngineError(f"could not read chunk {chunk.index}: {error.strerror}") from error

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes them."""
        for handle in self._open.values():
            os.close(handle)

    def read_into(self, chunk: ChunkRef, places: Sequence[memoryview]) -> None:
        """A chunk's stored bytes into memory that takes them one place after the other, equal to their hash.

        When it raises, what is in that memory is to be thrown away.
        """
        n_read = self._read(chunk, places)
        if n_read != chunk.length_bytes or blake3_hash_of(places) != chunk.hash:
            raise _damaged(chunk, n_read)

    def read(self, chunk: ChunkRef) -> memoryview:
        """A chunk's stored bytes, equal to their hash; valid until the calling thread reads the next one.

        Memory that a thread has used before needs no fresh pages, and may still be in its core's cache.
        """
        buffer: bytearray | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = bytearray(self._size_bytes)
        stored = memoryview(buffer)[: chunk.length_bytes]
        n_read = self._read(chunk, [stored])
        if n_read != chunk.length_bytes or blake3_hash(stored) != chunk.hash:
            raise _damaged(chunk, n_read)
        return stored.toreadonly()

    def _read(self, chunk: ChunkRef, places: Sequence[memoryview]) -> int:
        try:
            return os.preadv(self._open[chunk.path], places, chunk.offset)
        except OSError as error:
            raise EngineError(f"could not read chunk {chunk.index}: {error.strerror}") from error


def _damaged(chunk: ChunkRef, n_read: int) -> IntegrityError:
    return IntegrityError(f"chunk {chunk.index} does not match its hash: {n_read} of {chunk.length_bytes} bytes read")


def _restore_tile(
    files: _Files, manifest: Manifest, spec: ChunkSpec, chunk: ChunkRef, builders: list[CacheBuilder]
) -> None:
    """One tile to its place, in a thread that shares no rows with others. Nothing here is MLX's: only numpy."""
    places = _places(manifest, spec, chunk, builders)
    if places is None:
        _put(manifest, spec, files.read(chunk), builders)
        return
    files.read_into(chunk, [place.data.cast("B") for place in places])
    kind = manifest.fingerprint.layers.kind_of(spec.first_layer)
    if not all(all_finite(kind, place) for place in places):
        raise _not_finite(spec)


def _places(
    manifest: Manifest, spec: ChunkSpec, chunk: ChunkRef, builders: list[CacheBuilder]
) -> list[NDArray[Any]] | None:
    """Where a tile that is stored as it is can be read to at once; ``None`` when it has to be unpacked or cut first."""
    if manifest.codec is not Codec.RAW or chunk.length_bytes != spec.raw_size_bytes:
        return None
    places: list[NDArray[Any]] = []
    for builder in builders[spec.first_layer : spec.first_layer + spec.n_layers]:
        of_layer = builder.places(spec.first_token, spec.n_tokens)
        if of_layer is None:
            return None
        places += of_layer
    return places if len(places) <= MAX_PLACES else None


def _put(manifest: Manifest, spec: ChunkSpec, stored: memoryview, builders: list[CacheBuilder]) -> None:
    layers = manifest.fingerprint.layers
    kind = layers.kinds[layers.order[spec.first_layer]]
    raw = decode_tile(manifest.codec, layers, spec, stored)
    if len(raw) != spec.raw_size_bytes:
        raise CompatibilityError(f"tile {spec.index}: expected {spec.raw_size_bytes} bytes, found {len(raw)}")
    values = np.frombuffer(raw, numpy_dtype(kind))
    if not all_finite(kind, values):
        raise _not_finite(spec)
    k_size, v_size = (kind.heads * spec.n_tokens * dim for dim in (kind.k_dim, kind.v_dim))
    for number in range(spec.n_layers):
        start = number * (k_size + v_size)
        keys = values[start : start + k_size].reshape(kind.heads, spec.n_tokens, kind.k_dim)
        rest = values[start + k_size : start + k_size + v_size].reshape(kind.heads, spec.n_tokens, kind.v_dim)
        builders[spec.first_layer + number].put(spec.first_token, keys, rest)


def _not_finite(spec: ChunkSpec) -> CompatibilityError:
    return CompatibilityError(f"tile {spec.index} holds values that are not finite")
