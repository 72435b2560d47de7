import random
import time
import tracemalloc
import unicodedata
from typing import Any

import cbor2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import MalformedError
from kvnet.format import cbor
from tests.unit.format.examples import ROUNDS

MAX = 1 << 20


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: int
    name: str = ""
    tags: tuple[bytes, ...] = ()


class Loose(msgspec.Struct, frozen=True):
    x: int = 0


def decode(data: bytes, max_bytes: int = MAX) -> Any:
    return cbor.decode(data, max_bytes=max_bytes, what="test value")


TEXT = st.text(st.characters(codec="utf-8")).map(lambda text: unicodedata.normalize("NFC", text))
SCALARS = st.booleans() | st.integers(0, (1 << 63) - 1) | st.binary() | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(VALUES)
def test_every_value_of_the_profile_round_trips_in_one_encoding(value: Any) -> None:
    if depth(value) > 8:
        with pytest.raises(MalformedError, match="nesting"):
            cbor.encode(value)
        return
    data = cbor.encode(value)
    assert decode(data) == value
    assert data == cbor2.dumps(value, canonical=True)


@given(st.binary(max_size=64))
def test_whatever_is_read_encodes_to_the_bytes_it_was_read_from(data: bytes) -> None:
    try:
        value = decode(data)
    except MalformedError:
        return
    assert cbor.encode(value) == data


def test_text_is_compared_byte_by_byte_and_key_order_is_length_first() -> None:
    assert cbor.encode({"b": 1, "aa": 2, "": 3}) == bytes.fromhex("a3 60 03 61 62 01 62 61 61 02")
    assert cbor.encode({"ü": [True, False]}) == bytes.fromhex("a1 62 c3bc 82 f5 f4")


@pytest.mark.parametrize(
    ("hex_data", "found"),
    [
        ("", "an end"),
        ("19 01", "an end"),
        ("42 00", "fewer bytes"),
        ("82 00", "fewer items"),
        ("a1 00 00", "not text"),
        ("a1 60", "fewer items"),
        ("a1 61 61", "an end|fewer"),
        ("a2 61 61 00 00 00", "not text"),
        ("00 00", "bytes after"),
        ("a2 61 61 0a 61 61 19 27 0f", "a map key twice"),
        ("a2 61 62 00 61 61 00", "out of order"),
        ("bf ff", "indefinite"),
        ("9f ff", "indefinite"),
        ("5f ff", "indefinite"),
        ("1c", "indefinite or reserved"),
        ("19 00 0a", "more bytes than needed"),
        ("f9 49 00", "a float"),
        ("f6", "null"),
        ("f7", "undefined"),
        ("f8 ff", "a simple value"),
        ("ff", "a simple value"),
        ("20", "negative"),
        ("c2 41 0a", "a tag"),
        ("d9 d9 f7 00", "a tag"),
        ("1b 80 00 00 00 00 00 00 00", "2\\^63"),
        ("61 ff", "UTF-8"),
        ("63 ed a0 80", "UTF-8"),
        ("63 65 cc 81", "normal form C"),
    ],
)
def test_bytes_outside_the_profile_are_refused_with_the_reason(hex_data: str, found: str) -> None:
    with pytest.raises(MalformedError, match=found) as caught:
        decode(bytes.fromhex(hex_data))
    assert "test value" in str(caught.value)


def test_too_many_bytes_are_refused_unread() -> None:
    with pytest.raises(MalformedError, match="at most 4 bytes, found 5"):
        decode(b"\xff" * 5, max_bytes=4)


@pytest.mark.parametrize("unit", ["81", "a1 00", "a1 60", "c1", "9f", "82 00"])
def test_100000_levels_of_nesting_are_refused_at_a_bounded_cost(unit: str) -> None:
    data = bytes.fromhex(unit) * 100_000
    tracemalloc.start()
    with pytest.raises(MalformedError) as caught:
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Refused at the ninth level at the latest, whatever follows.
    assert int(str(caught.value).rpartition(" ")[2]) <= 9 * len(bytes.fromhex(unit))
    assert peak < 1 << 20


def test_eight_levels_are_read_and_nine_are_not() -> None:
    assert decode(b"\x81" * 8 + b"\x00") == [[[[[[[[0]]]]]]]]
    with pytest.raises(MalformedError, match="more than 8 levels"):
        decode(b"\x81" * 9 + b"\x00")
    with pytest.raises(MalformedError, match="at most 8 levels"):
        cbor.encode([[[[{"a": [[[[0]]]]}]]]])


@pytest.mark.parametrize("head", ["9b", "bb", "5b", "7b"])
def test_a_declared_length_is_believed_only_as_far_as_bytes_follow(head: str) -> None:
    for length in ((1 << 32), (1 << 62), (1 << 63) - 1, (1 << 64) - 1):
        tracemalloc.start()
        with pytest.raises(MalformedError):
            decode(bytes.fromhex(head) + length.to_bytes(8, "big") + bytes(100))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_long_runs_of_combining_marks_cost_no_more_than_their_length() -> None:
    # Marks that need reordering, and marks that might compose: both took quadratic time in other normalisers.
    for marks in ("\u0301\u0316", "\u0316\u0301", "\u0301"):
        times = []
        for count in (2_000, 128_000):
            data = cbor2.dumps("a" + marks * count)
            started = time.process_time()
            with pytest.raises(MalformedError, match="normal form C"):
                decode(data)
            times.append(time.process_time() - started)
        # 64 times the length: quadratic time would be 4,096 times as much.
        assert times[1] < 1000 * max(times[0], 1e-4)


@pytest.mark.parametrize(
    "value",
    [-1, 1 << 63, 1.5, None, "e\u0301", "\ud800", {1: 2}, {"e\u0301": 1}, bytearray(b"x"), {"a": {1}}, object()],
)
def test_values_outside_the_profile_cannot_be_written(value: object) -> None:
    with pytest.raises(MalformedError):
        cbor.encode(value)


def test_a_struct_round_trips_as_a_map_of_all_its_fields() -> None:
    point = Point(3, "p", (b"t",))
    data = cbor.encode_struct(point)
    assert decode(data) == {"x": 3, "name": "p", "tags": [b"t"]}
    assert cbor.decode_as(Point, data, max_bytes=MAX, what="point") == point
    assert cbor.decode_as(Point, memoryview(data), max_bytes=MAX, what="point") == point


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"x": True, "name": "", "tags": []}, "int"),
        ({"x": "1", "name": "", "tags": []}, "int"),
        ({"x": 1, "name": b"", "tags": []}, "str"),
        ({"x": 1, "name": "", "tags": [1]}, "bytes"),
        ({"x": 1, "name": "", "tags": [], "y": 1}, "unknown field"),
        ({"name": "", "tags": []}, "missing"),
        ({"x": 1}, "exactly the fields"),
        ([1], "object"),
    ],
)
def test_values_that_do_not_fit_the_schema_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        cbor.decode_as(Point, cbor.encode(value), max_bytes=MAX, what="point")


def test_an_unknown_field_is_refused_even_where_the_schema_does_not_forbid_it() -> None:
    with pytest.raises(MalformedError, match="exactly the fields"):
        cbor.decode_as(Loose, cbor.encode({"x": 1, "y": 2}), max_bytes=MAX, what="loose")


def test_a_size_limit_holds_for_typed_values_too() -> None:
    with pytest.raises(MalformedError, match="at most 2 bytes"):
        cbor.decode_as(Loose, cbor.encode({"x": 1}), max_bytes=2, what="loose")


@ROUNDS
def test_hostile_inputs_are_refused_or_read_within_bounds(rounds: int) -> None:
    rng = random.Random(20261129)
    seeds = [cbor.encode({"a": [1, 2, {"b": b"xyz", "c": "text"}], "n": 1 << 40}), cbor.encode([[True], {}])]
    tracemalloc.start()
    for _number in range(rounds):
        data = bytearray(rng.choice(seeds))
        for _change in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        if rng.random() < 0.2:
            data = bytearray(rng.randbytes(rng.randrange(64)))
        try:
            value = decode(bytes(data))
        except MalformedError:
            continue
        assert cbor.encode(value) == data
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
