"""Stored tiles into live caches: hash the bytes held, check them, then build arrays from those same bytes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvnet.engine.interface import ChunkRef, RestorePlan
from kvnet.engine.mlx.caches import CacheBuilder, all_finite, evaluate, memory_is_shared, numpy_dtype
from kvnet.engine.tiles import decode_tile
from kvnet.errors import CompatibilityError, EngineError, IntegrityError
from kvnet.format.chunks import ChunkKind, ChunkSpec
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.hashes import blake3_hash
from kvnet.format.manifest import Manifest, decode_manifest

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
    builders = [
        CacheBuilder(layers.kinds[kind], plan.n_tokens, capacity_tokens, in_place=memory_is_shared())
        for kind in layers.order
    ]
    held = {chunk.index: chunk for chunk in plan.chunks}
    with _Files() as files:
        for spec in _needed_tiles(manifest, plan.n_tokens):
            between()
            chunk = held.get(spec.index)
            if chunk is None:
                raise CompatibilityError(f"restore needs tile {spec.index}; the plan does not say where it lies")
            _put(manifest, spec, files.read(chunk), builders)
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
    """Open files of one restore, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    def read(self, chunk: ChunkRef) -> bytes:
        """A chunk's stored bytes, equal to their hash."""
        try:
            if chunk.path not in self._open:
                self._open[chunk.path] = os.open(chunk.path, os.O_RDONLY | os.O_CLOEXEC)
            stored = os.pread(self._open[chunk.path], chunk.length_bytes, chunk.offset)
        except OSError as error:
            raise EngineError(f"could not read chunk {chunk.index}: {error.strerror}") from error
        if len(stored) != chunk.length_bytes or blake3_hash(stored) != chunk.hash:
            raise IntegrityError(
                f"chunk {chunk.index} does not match its hash: {len(stored)} of {chunk.length_bytes} bytes read"
            )
        return stored


def _put(manifest: Manifest, spec: ChunkSpec, stored: bytes, builders: list[CacheBuilder]) -> None:
    layers = manifest.fingerprint.layers
    kind = layers.kinds[layers.order[spec.first_layer]]
    raw = decode_tile(manifest.codec, layers, spec, stored)
    if len(raw) != spec.raw_size_bytes:
        raise CompatibilityError(f"tile {spec.index}: expected {spec.raw_size_bytes} bytes, found {len(raw)}")
    values = np.frombuffer(raw, numpy_dtype(kind))
    if not all_finite(kind, values):
        raise CompatibilityError(f"tile {spec.index} holds values that are not finite")
    k_size, v_size = (kind.heads * spec.n_tokens * dim for dim in (kind.k_dim, kind.v_dim))
    for number in range(spec.n_layers):
        start = number * (k_size + v_size)
        keys = values[start : start + k_size].reshape(kind.heads, spec.n_tokens, kind.k_dim)
        rest = values[start + k_size : start + k_size + v_size].reshape(kind.heads, spec.n_tokens, kind.v_dim)
        builders[spec.first_layer + number].put(spec.first_token, keys, rest)
