import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import cbor
from kvnet.format.tensor import DType, LayerKind, StateShape, layer_slices, tile_size_bytes


def kind(**changes: object) -> LayerKind:
    fields: dict = {"cache": "kv", "heads": 8, "k_dim": 128, "v_dim": 128, "dtype": DType.BFLOAT16}
    return LayerKind(**(fields | changes))


def test_every_dtype_has_a_name_and_a_size() -> None:
    assert {dtype.value: dtype.size_bytes for dtype in DType} == {"float32": 4, "float16": 2, "bfloat16": 2}


def test_bytes_per_token_count_both_rows_of_every_head() -> None:
    assert kind().bytes_per_token == 8 * 256 * 2
    # 36 such layers are the 147,456 bytes a token of a known 8-billion-parameter model.
    assert kind().bytes_per_token * 36 == 147_456
    latent = kind(heads=1, k_dim=512, v_dim=64)
    assert latent.bytes_per_token == 1152
    assert tile_size_bytes(latent, 4, 256) == 1152 * 4 * 256


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 64), st.integers(1, 6), st.integers(1, 256))
def test_slices_fill_a_tile_without_gap_or_overlap(
    heads: int, k_dim: int, v_dim: int, layers: int, tokens: int
) -> None:
    shape = kind(heads=heads, k_dim=k_dim, v_dim=v_dim)
    at = 0
    slices = layer_slices(shape, layers, tokens)
    assert len(slices) == layers
    for (k_offset, k_size), (v_offset, v_size) in slices:
        assert (k_offset, k_size) == (at, heads * tokens * k_dim * 2)
        assert (v_offset, v_size) == (at + k_size, heads * tokens * v_dim * 2)
        at = v_offset + v_size
    assert at == tile_size_bytes(shape, layers, tokens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache": "paged"}, "layer kind"),
        ({"heads": 0}, "heads"),
        ({"heads": 1 << 40}, "heads"),
        ({"k_dim": 0}, "K dim"),
        ({"v_dim": 65_537}, "V dim"),
        ({"window": -1}, "window"),
        ({"window": (1 << 22) + 1}, "window"),
        ({"window": 16, "keep": 17}, "keep"),
        ({"states": (StateShape(DType.FLOAT32, (1,)),) * 9}, "states"),
    ],
)
def test_a_layer_kind_beyond_the_limits_is_refused(changes: dict, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        kind(**changes)


@pytest.mark.parametrize("shape", [(), (1,) * 7, (0,), (65_537,)])
def test_a_state_shape_beyond_the_limits_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MalformedError, match="state shape"):
        StateShape(DType.FLOAT32, shape)


def test_reserved_kinds_can_be_written_down_and_read_again() -> None:
    reserved = [
        kind(cache="rotating", window=1024, keep=4),
        kind(cache="chunked", window=8192),
        kind(cache="state", heads=0, k_dim=0, v_dim=0, states=(StateShape(DType.FLOAT32, (16, 64, 128)),)),
    ]
    for one in reserved:
        assert cbor.decode_as(LayerKind, cbor.encode_struct(one), max_bytes=512, what="kind") == one


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cache": "rotating", "window": 16}, "'rotating'"),
        ({"cache": "state"}, "'state'"),
        ({"cache": "chunked"}, "'chunked'"),
        ({"window": 16}, "16 tokens"),
        ({"states": (StateShape(DType.FLOAT32, (1,)),)}, "states"),
    ],
)
def test_reserved_kinds_are_not_moved_and_are_named(changes: dict, named: str) -> None:
    kind().require_full_attention()
    with pytest.raises(CompatibilityError, match=named):
        kind(**changes).require_full_attention()


def test_an_unknown_dtype_is_refused() -> None:
    data = cbor.encode({"dtype": "float8", "shape": [1]})
    with pytest.raises(MalformedError, match="enum"):
        cbor.decode_as(StateShape, data, max_bytes=512, what="state")
