"""Shapes and sizes of K/V: dtypes, layer kinds, and where each layer's K and V lie in a tile. No arrays here."""

from enum import Enum
from typing import Final

import msgspec

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format.limits import (
    MAX_DIM,
    MAX_HEADS,
    MAX_STATE_RANK,
    MAX_STATES,
    MAX_WINDOW_TOKENS,
)


class DType(Enum):
    """Element types K/V can have; the value is the name used on disk. Little-endian everywhere."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


CACHE_KINDS: Final = ("kv", "rotating", "state", "chunked")
"""What a layer may keep: all K/V, a sliding window of it, recurrent state, or K/V of the current attention chunk.
Version 1 names all four and moves only the first."""


class StateShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a recurrent layer's state.

    Attributes:
        dtype: its element type.
        shape: its sides, batch excluded.

    Raises:
        MalformedError: too many sides, or one beyond the limits.
    """

    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= MAX_STATE_RANK:
            raise MalformedError(f"state shape: expected 1 to {MAX_STATE_RANK} sides, found {len(self.shape)}")
        for side in self.shape:
            _require("state shape side", side, 1, MAX_DIM)


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one layer keeps for every token.

    Attributes:
        cache: one of :data:`CACHE_KINDS`.
        heads: K/V heads (1 for multi-head latent attention).
        k_dim: elements of one K row.
        v_dim: elements of one V row; may differ from ``k_dim``.
        dtype: element type, as computed.
        window: tokens a sliding window keeps; 0 for all.
        keep: first tokens it never drops.
        states: arrays of recurrent state; empty for attention.

    Raises:
        MalformedError: no such kind of cache, or a number beyond the limits.
    """

    cache: str
    heads: int
    k_dim: int
    v_dim: int
    dtype: DType
    window: int = 0
    keep: int = 0
    states: tuple[StateShape, ...] = ()

    def __post_init__(self) -> None:
        if self.cache not in CACHE_KINDS:
            raise MalformedError(f"layer kind: expected one of {', '.join(CACHE_KINDS)}, found {self.cache[:32]!r}")
        least = 0 if self.cache == "state" else 1
        _require("K/V heads", self.heads, least, MAX_HEADS)
        _require("K dim", self.k_dim, least, MAX_DIM)
        _require("V dim", self.v_dim, least, MAX_DIM)
        _require("window", self.window, 0, MAX_WINDOW_TOKENS)
        _require("keep", self.keep, 0, self.window)
        if len(self.states) > MAX_STATES:
            raise MalformedError(f"layer kind: expected at most {MAX_STATES} states, found {len(self.states)}")

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token in one layer."""
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.size_bytes

    def require_full_attention(self) -> None:
        """Version 1 moves only layers that keep K/V of every token.

        Raises:
            CompatibilityError: any other kind; names it.
        """
        if self.cache != "kv":
            raise CompatibilityError(f"layers that keep {self.cache!r} caches cannot be moved by this build; only 'kv'")
        if self.window or self.keep or self.states:
            raise CompatibilityError(
                f"'kv' layers with a window ({self.window} tokens), kept tokens or states cannot be moved by this build"
            )


def tile_size_bytes(kind: LayerKind, n_layers: int, n_tokens: int) -> int:
    """Bytes of a tile of ``n_layers`` layers and ``n_tokens`` tokens, before the codec."""
    return kind.bytes_per_token * n_layers * n_tokens


def layer_slices(kind: LayerKind, n_layers: int, n_tokens: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Where K and V of each layer lie in a tile: ``((k_offset, k_size), (v_offset, v_size))`` in bytes, per layer.

    Each is row-contiguous with shape (heads, tokens, dim).
    """
    row = kind.heads * n_tokens * kind.dtype.size_bytes
    k_size, v_size = row * kind.k_dim, row * kind.v_dim
    starts = range(0, n_layers * (k_size + v_size), k_size + v_size)
    return tuple(((start, k_size), (start + k_size, v_size)) for start in starts)


def _require(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise MalformedError(f"{what}: expected {least} to {most}, found {value}")
