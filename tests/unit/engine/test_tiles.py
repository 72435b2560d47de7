import json
from pathlib import Path

import numpy as np
import pytest

from kvnet.engine.tiles import decode_tile, encode_tile
from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import q8
from kvnet.format.chunks import ChunkPlan, ChunkSpec, layer_groups
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.tensor import DType, LayerKind

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "q8.json").read_text())
N_TOKENS = 5


def layers_of(k_dim: int, v_dim: int, dtype: DType, heads: int = 2, n_layers: int = 2) -> LayerLayout:
    return LayerLayout((LayerKind("kv", heads, k_dim, v_dim, dtype),), bytes(n_layers))


def tile_of(layers: LayerLayout, n_tokens: int = N_TOKENS) -> ChunkSpec:
    plan = ChunkPlan(n_tokens, layers, layer_groups(layers))
    return plan[plan.first_tile]


def normal_tile(layers: LayerLayout, scale: float, shift: float) -> bytes:
    """Values around ``shift``, as K/V has them."""
    dtype = layers.kinds[0].dtype
    count = tile_of(layers).raw_size_bytes // dtype.size_bytes
    values = (np.random.default_rng(3).standard_normal(count) * scale + shift).astype("<f4")
    if dtype is DType.FLOAT16:
        return np.clip(values, -65504, 65504).astype("<f2").tobytes()
    return values.tobytes() if dtype is DType.FLOAT32 else (values.view("<u4") >> 16).astype("<u2").tobytes()


def any_bits(layers: LayerLayout) -> bytes:
    """Every exponent but the two highest, subnormal numbers and both zeros included."""
    dtype = layers.kinds[0].dtype
    count = tile_of(layers).raw_size_bytes // dtype.size_bytes
    bits = np.random.default_rng(4).integers(0, 1 << (8 * dtype.size_bytes), count, np.uint64)
    if dtype is DType.FLOAT16:
        bits[(bits & 0x7C00) == 0x7C00] = 0x7BFF
    else:
        width = 8 * dtype.size_bytes
        exponents = (bits >> (width - 9)) & 0xFF
        bits[exponents > 0xFC] = 1 << (width - 1) | 1
    return bits.astype(f"<u{dtype.size_bytes}").tobytes()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (8, 16), (80, 96), (128, 40)])
def test_arrays_come_to_the_bytes_that_the_reference_comes_to(k_dim: int, v_dim: int, dtype: DType) -> None:
    layers = layers_of(k_dim, v_dim, dtype)
    spec, kind = tile_of(layers), layers.kinds[0]
    for raw in (any_bits(layers), *(normal_tile(layers, scale, 5) for scale in (1e-40, 1e-3, 1.0, 3e4))):
        stored = encode_tile(Codec.Q8, layers, spec, raw)
        assert stored == q8.encode_tile(kind, 2, N_TOKENS, raw)
        assert decode_tile(Codec.Q8, layers, spec, stored) == q8.decode_tile(kind, 2, N_TOKENS, stored)


def group_values(layers: LayerLayout, n_tokens: int, *values: float) -> bytes:
    """A float32 tile whose elements are these again and again."""
    count = tile_of(layers, n_tokens).raw_size_bytes // 4
    return np.resize(np.array(values, "<f4"), count).tobytes()


SMALLEST, NORMAL = 2.0**-149, 2.0**-126
NEARER = float(np.nextafter(np.float32(q8.MIN_SPREAD), np.float32(0)))


@pytest.mark.parametrize(
    "values",
    [
        # All of a group on one side of zero, so that its bias would be subnormal.
        (5 * SMALLEST, NORMAL / 2),
        (-5 * SMALLEST, -NORMAL / 2),
        (NORMAL / 2, 1.0),
        (-NORMAL / 2, 1.0),
        (-0.0, 0.0),
        (-0.0, NORMAL),
        # Around the least spread that has a scale.
        (0.0, q8.MIN_SPREAD),
        (0.0, NEARER),
        (-q8.MIN_SPREAD, 0.0),
        (-NEARER, 0.0),
        (q8.LARGEST[DType.FLOAT32], 0.0),
    ],
)
def test_tiny_and_huge_groups_come_to_the_bytes_of_the_reference_too(values: tuple[float, ...]) -> None:
    layers = layers_of(8, 8, DType.FLOAT32, heads=1)
    raw = group_values(layers, N_TOKENS, *values)
    stored = encode_tile(Codec.Q8, layers, tile_of(layers), raw)
    assert stored == q8.encode_tile(layers.kinds[0], 2, N_TOKENS, raw)
    assert decode_tile(Codec.Q8, layers, tile_of(layers), stored) == q8.decode_tile(
        layers.kinds[0], 2, N_TOKENS, stored
    )


def test_a_tile_longer_than_what_is_worked_on_at_once_comes_to_the_bytes_of_the_reference_too() -> None:
    layers = layers_of(96, 64, DType.FLOAT32, heads=3, n_layers=1)
    spec, kind = tile_of(layers, 250), layers.kinds[0]
    values = np.random.default_rng(5).standard_normal(spec.raw_size_bytes // 4).astype("<f4")
    # The last group of K is the farthest from all others, as is the last of V.
    values[3 * 250 * 96 - 32 : 3 * 250 * 96] *= 1e6
    values[-64:] *= 1e6
    stored = encode_tile(Codec.Q8, layers, spec, values.tobytes())
    assert stored == q8.encode_tile(kind, 1, 250, values.tobytes())
    assert decode_tile(Codec.Q8, layers, spec, stored) == q8.decode_tile(kind, 1, 250, stored)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_arrays_come_to_the_vectors(case: dict) -> None:
    layers = layers_of(case["k_dim"], case["v_dim"], DType(case["dtype"]), heads=1, n_layers=1)
    spec = tile_of(layers, case["n_tokens"])
    assert encode_tile(Codec.Q8, layers, spec, bytes.fromhex(case["raw"])).hex() == case["stored"]
    assert decode_tile(Codec.Q8, layers, spec, bytes.fromhex(case["stored"])).hex() == case["decoded"]


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.SHUFFLE_ZSTD1])
def test_lossless_codecs_give_the_tile_back(codec: Codec) -> None:
    layers = layers_of(8, 8, DType.BFLOAT16)
    raw = normal_tile(layers, 1.0, 0.0)
    assert decode_tile(codec, layers, tile_of(layers), encode_tile(codec, layers, tile_of(layers), raw)) == raw


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_not_stored(value: float) -> None:
    layers = layers_of(8, 8, DType.FLOAT32)
    values = np.frombuffer(normal_tile(layers, 1.0, 0.0), "<f4").copy()
    values[77] = value
    with pytest.raises(CompatibilityError, match="finite"):
        encode_tile(Codec.Q8, layers, tile_of(layers), values.tobytes())


def test_values_too_far_apart_are_not_stored() -> None:
    layers = layers_of(8, 8, DType.FLOAT32)
    values = np.zeros(tile_of(layers).raw_size_bytes // 4, "<f4")
    values[:2] = 3e38, -3e38
    with pytest.raises(CompatibilityError, match="apart"):
        encode_tile(Codec.Q8, layers, tile_of(layers), values.tobytes())


@pytest.mark.parametrize("dtype", list(DType))
def test_stored_bytes_that_no_encoder_makes_are_refused_or_stay_finite_as_in_the_reference(dtype: DType) -> None:
    layers = layers_of(8, 8, dtype, heads=1, n_layers=1)
    spec, kind = tile_of(layers, 1), layers.kinds[0]
    for scale in (0, 1, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0xBF80):
        for bias in (0, 1, 0x3F80, 0x7F7F, 0xFF7F, 0x7F80, 0x8000):
            stored = (bytes([0, 1, 2, 3, 4, 5, 254, 255]) + bytes([*scale.to_bytes(2, "little")]) + bytes(2)) * 2
            stored = stored[:10] + bias.to_bytes(2, "little") + stored[12:22] + bias.to_bytes(2, "little")
            try:
                expected = q8.decode_tile(kind, 1, 1, stored)
            except MalformedError as refused:
                with pytest.raises(MalformedError, match=str(refused)):
                    decode_tile(Codec.Q8, layers, spec, stored)
                continue
            assert decode_tile(Codec.Q8, layers, spec, stored) == expected


@pytest.mark.parametrize("number", range(4))
def test_scales_and_biases_are_checked_to_the_last_group_of_k_and_v_of_every_layer(number: int) -> None:
    layers = layers_of(8, 8, DType.FLOAT32)
    spec = tile_of(layers)
    part = q8.parts_of(layers.kinds[0], spec.n_layers, spec.n_tokens)[number]
    good = encode_tile(Codec.Q8, layers, spec, normal_tile(layers, 1.0, 0.0))
    for where, what in ((part.scales, "scales"), (part.biases, "biases")):
        last = where.stop - 2
        for bits in (0x7FC0, 0xFF80, 0x8000, 0x0001):  # not a number, -infinity, -0, subnormal
            with pytest.raises(MalformedError, match=what):
                decode_tile(Codec.Q8, layers, spec, good[:last] + bits.to_bytes(2, "little") + good[last + 2 :])


def test_a_stored_tile_of_another_size_is_refused() -> None:
    layers = layers_of(8, 8, DType.FLOAT32, heads=1, n_layers=1)
    with pytest.raises(MalformedError, match="24 bytes"):
        decode_tile(Codec.Q8, layers, tile_of(layers, 1), bytes(23))
