import json
import math
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import q8
from kvnet.format.codecs import Codec, require_storable, stored_size_range
from kvnet.format.tensor import DType, LayerKind, tile_size_bytes

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "q8.json").read_text())
LARGEST_FLOAT32 = q8.LARGEST[DType.FLOAT32]


def kind(k_dim: int = 8, v_dim: int = 8, dtype: DType = DType.FLOAT32, heads: int = 1) -> LayerKind:
    return LayerKind(cache="kv", heads=heads, k_dim=k_dim, v_dim=v_dim, dtype=dtype)


def packed(*values: float) -> bytes:
    """A float32 tile of one layer with one head."""
    return struct.pack(f"<{len(values)}f", *values)


def stored(codes: bytes, scale: int, bias: int) -> bytes:
    """A stored tile of one token with one group in K and one, all zero, in V."""
    return codes + struct.pack("<HH", scale, bias) + bytes(12)


def decoded_floats(tile: LayerKind, n_tokens: int, data: bytes) -> tuple[float, ...]:
    raw = q8.decode_tile(tile, 1, n_tokens, data)
    if tile.dtype is DType.BFLOAT16:
        halves = struct.unpack(f"<{len(raw) // 2}H", raw)
        return tuple(struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves)
    return struct.unpack(f"<{len(raw) // tile.dtype.size_bytes}{'f' if tile.dtype is DType.FLOAT32 else 'e'}", raw)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_every_machine_writes_and_reads_the_same_bytes(case: dict) -> None:
    tile = kind(case["k_dim"], case["v_dim"], DType(case["dtype"]))
    assert q8.encode_tile(tile, 1, case["n_tokens"], bytes.fromhex(case["raw"])).hex() == case["stored"]
    assert q8.decode_tile(tile, 1, case["n_tokens"], bytes.fromhex(case["stored"])).hex() == case["decoded"]


@pytest.mark.parametrize(
    ("dim", "group"), [(64, 64), (128, 64), (192, 64), (96, 32), (80, 16), (72, 8), (8, 8), (12, 0), (100, 0), (0, 0)]
)
def test_rows_are_cut_into_the_largest_groups_that_divide_them(dim: int, group: int) -> None:
    assert q8.group_size(dim) == group


def test_rows_of_64_take_17_bytes_for_16_elements() -> None:
    tile = kind(64, 128, heads=3)
    assert q8.bytes_per_token(tile) == 3 * (64 + 128) * 17 // 16
    assert stored_size_range(Codec.Q8, tile, 2, 5) == (q8.bytes_per_token(tile) * 10,) * 2


def test_rows_that_no_group_divides_are_refused_by_name() -> None:
    odd = kind(64, 100)
    assert "V dim 100" in q8.refusal_of([kind(64, 64), odd])
    assert "K dim 12" in q8.refusal_of([kind(12, 64)])
    with pytest.raises(CompatibilityError, match="V dim 100") as refusal:
        require_storable(Codec.Q8, [odd])
    assert "raw" in refusal.value.hint
    require_storable(Codec.RAW, [odd])
    require_storable(Codec.Q8, [kind(96, 80)])
    for broken in (
        lambda: q8.bytes_per_token(odd),
        lambda: q8.encode_tile(odd, 1, 1, bytes(tile_size_bytes(odd, 1, 1))),
        lambda: stored_size_range(Codec.Q8, odd, 1, 1),
    ):
        with pytest.raises(MalformedError, match="V dim 100"):
            broken()


@given(
    st.sampled_from(list(DType)),
    st.lists(st.floats(-1000, 1000, width=16), min_size=16, max_size=16),
    st.sampled_from([2.0**-10, 1.0, 32.0]),
)
def test_no_value_moves_further_than_half_a_step(dtype: DType, values: list[float], factor: float) -> None:
    tile = kind(dtype=dtype)
    exact = [value * factor for value in values]
    if dtype is DType.BFLOAT16:
        raw = b"".join(struct.pack("<f", value)[2:] for value in exact)
        exact = [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, len(raw), 2)]
    else:
        raw = struct.pack(f"<16{'f' if dtype is DType.FLOAT32 else 'e'}", *exact)
        exact = list(struct.unpack(f"<16{'f' if dtype is DType.FLOAT32 else 'e'}", raw))
    again = decoded_floats(tile, 1, q8.encode_tile(tile, 1, 1, raw))
    # Half a step, with scale and bias rounded outwards to 8 bits, and the rounding of the dtype itself.
    epsilon = {DType.FLOAT32: 2.0**-22, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}[dtype]
    for first in (0, 8):
        group = exact[first : first + 8]
        reach = max(group) - min(group) + abs(min(group)) / 128
        for before, after in zip(group, again[first : first + 8], strict=True):
            assert abs(after - before) <= reach / 255 / 2 * (1 + 1 / 64) + epsilon * abs(before) + 2.0**-24


def test_equal_values_that_bfloat16_holds_come_back_exactly() -> None:
    data = q8.encode_tile(kind(), 1, 1, packed(*[1.5] * 8, *[-2.0] * 8))
    assert decoded_floats(kind(), 1, data) == (*[1.5] * 8, *[-2.0] * 8)


def test_zero_has_one_spelling() -> None:
    assert q8.encode_tile(kind(), 1, 1, packed(*[-0.0] * 16)) == bytes(24)
    tiny = 2.0**-140
    assert q8.encode_tile(kind(), 1, 1, packed(*[-tiny, tiny] * 8)) == bytes(24)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_not_written(value: float) -> None:
    with pytest.raises(CompatibilityError, match="finite"):
        q8.encode_tile(kind(), 1, 1, packed(value, *[0.0] * 15))


def test_values_just_far_enough_apart_for_a_normal_scale_have_one() -> None:
    bits = struct.unpack("<I", struct.pack("<f", q8.MIN_SPREAD))[0]
    (nearer,) = struct.unpack("<f", struct.pack("<I", bits - 1))
    for spread, scale, code in ((q8.MIN_SPREAD, 0x0081, 254), (nearer, 0, 0)):
        data = q8.encode_tile(kind(), 1, 1, packed(*[0.0, spread] * 4, *[0.0] * 8))
        assert data[:8] == bytes([0, code] * 4)
        assert struct.unpack_from("<HH", data, 8) == (scale, 0)


def test_values_too_far_apart_are_not_written() -> None:
    for pair in ((-LARGEST_FLOAT32, 0.0), (-3e38, 3e38)):
        with pytest.raises(CompatibilityError, match="apart"):
            q8.encode_tile(kind(), 1, 1, packed(*pair * 8))


def test_a_tile_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        q8.encode_tile(kind(), 1, 1, bytes(60))
    for size in (0, 23, 25):
        with pytest.raises(MalformedError, match="24 bytes"):
            q8.decode_tile(kind(), 1, 1, bytes(size))


@pytest.mark.parametrize("scale", [0x8000, 0xBF80, 0x7F80, 0x7FC0, 0xFF80, 0x0001, 0x007F])
def test_a_scale_that_no_encoder_writes_is_refused(scale: int) -> None:
    with pytest.raises(MalformedError, match="scales"):
        q8.decode_tile(kind(), 1, 1, stored(bytes(8), scale, 0))


@pytest.mark.parametrize("bias", [0x8000, 0x7F80, 0x7FC0, 0xFF80, 0x0001, 0x807F])
def test_a_bias_that_no_encoder_writes_is_refused(bias: int) -> None:
    with pytest.raises(MalformedError, match="biases"):
        q8.decode_tile(kind(), 1, 1, stored(bytes(8), 0, bias))


@pytest.mark.parametrize("dtype", list(DType))
def test_what_is_beyond_the_dtype_becomes_its_largest_value(dtype: DType) -> None:
    largest = q8.LARGEST[dtype]
    tile = kind(dtype=dtype)
    # The largest scale and the largest bias of bfloat16: no encoder writes both, and every reader must survive them.
    values = decoded_floats(tile, 1, stored(bytes([0, 1, 255, 255, 255, 255, 255, 255]), 0x7F7F, 0x7F7F))
    assert values[1:8] == (largest,) * 7
    assert (
        decoded_floats(tile, 1, stored(bytes(8), 0, 0xFF7F))[0]
        == -q8.LARGEST[DType.BFLOAT16 if dtype is DType.FLOAT32 else dtype]
    )


@pytest.mark.parametrize("number", range(4))
def test_k_and_v_of_every_layer_are_checked(number: int) -> None:
    tile = kind()
    parts = q8.parts_of(tile, 2, 3)
    good = q8.encode_tile(tile, 2, 3, bytes(tile_size_bytes(tile, 2, 3)))
    q8.check_stored(tile, 2, 3, good)
    for where, what in ((parts[number].scales, "scales"), (parts[number].biases, "biases")):
        last = where.stop - 1
        with pytest.raises(MalformedError, match=what):
            q8.check_stored(tile, 2, 3, good[:last] + b"\x80" + good[last + 1 :])


def test_damaged_tiles_are_refused_or_decode_to_finite_values_of_the_right_number() -> None:
    rng = random.Random(11)
    tile = kind(16, 24, DType.FLOAT16)
    good = q8.encode_tile(tile, 1, 3, bytes(tile_size_bytes(tile, 1, 3)))
    for _ in range(300):
        data = bytearray(good)
        for _change in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            values = decoded_floats(tile, 3, bytes(data))
        except MalformedError:
            continue
        assert len(values) == 3 * 40
        assert all(map(math.isfinite, values))
