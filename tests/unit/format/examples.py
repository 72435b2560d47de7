"""Values that several tests of the format start from."""

from typing import Any

import pytest

from kvnet.format.chunks import ChunkEntry, ChunkPlan
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.manifest import Manifest
from kvnet.format.tensor import DType, LayerKind
from scripts import regenerate_vectors as golden

ROUNDS = pytest.mark.parametrize(
    "rounds",
    [pytest.param(10_000, id="ten thousand"), pytest.param(1_000_000, id="a million", marks=pytest.mark.nightly)],
)
"""Hostile inputs given to a decoder."""

PLAIN = LayerKind(cache="kv", heads=3, k_dim=64, v_dim=64, dtype=DType.FLOAT32)
PRODUCER = Producer("mlx-lm", "1", "chip", "system", 2048)


def layout(*kinds: LayerKind, order: bytes | None = None) -> LayerLayout:
    """A layout of the given kinds, one layer each unless ``order`` says otherwise."""
    used = kinds or (PLAIN,)
    return LayerLayout(kinds=used, order=bytes(range(len(used))) if order is None else order)


def fingerprint(**changes: Any) -> Fingerprint:
    """A fingerprint with some fields changed."""
    fields: dict[str, Any] = {
        "weights": bytes(32),
        "config": bytes(32),
        "adapters": (),
        "architecture": "llama",
        "layers": layout(),
    }
    return Fingerprint(**(fields | changes))


def entries() -> list[ChunkEntry]:
    """The chunk list of the golden example."""
    return golden.example_entries(golden.example_chunks(golden.example_plan()))


def plan() -> ChunkPlan:
    """The plan of the golden example: 261 tokens in two blocks, two groups, one token and one context chunk."""
    return golden.example_plan()


def manifest(**changes: Any) -> Manifest:
    """The golden example's manifest with some fields changed."""
    sound = golden.manifest(plan(), entries())
    return Manifest(**({name: getattr(sound, name) for name in sound.__struct_fields__} | changes))
