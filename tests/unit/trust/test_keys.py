"""Publisher keys: one written rule for signatures, and text that a slip of the finger does not survive."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import UsageError
from kvnet.trust.keys import (
    FIELD_PRIME,
    GROUP_ORDER,
    SMALL_ORDER_Y,
    PublisherKey,
    is_public_key,
    parse_publisher_text,
    publisher_text,
    verify_signature,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "third_party" / "ed25519"
KEY = PublisherKey(bytes(range(32)))
MESSAGE = b"who said so"


def wycheproof_cases() -> list[Any]:
    groups = json.loads((VECTORS / "wycheproof_ed25519_test.json").read_text())["testGroups"]
    return [
        pytest.param(group["publicKey"]["pk"], case, id=f"{case['tcId']}-{case['result']}")
        for group in groups
        for case in group["tests"]
    ]


@pytest.mark.parametrize(("public", "case"), wycheproof_cases())
def test_wycheproof_verdicts_are_met(public: str, case: dict[str, Any]) -> None:
    valid = verify_signature(bytes.fromhex(public), bytes.fromhex(case["msg"]), bytes.fromhex(case["sig"]))
    assert valid == (case["result"] == "valid")


def test_all_wycheproof_cases_are_there() -> None:
    assert len(wycheproof_cases()) == 151


# The written rule, case by case. Only case 3 is valid: A and R have a part of small order, and none is small itself.
SPECCHECK_VERDICTS = {
    0: "small-order A and R",
    1: "small-order A",
    2: "small-order R",
    3: "valid",
    4: "holds only with the cofactor",
    5: "holds only with the cofactor, k reduced first",
    6: "S not below L",
    7: "S far above L",
    8: "non-canonical R",
    9: "non-canonical R, k of the reduced R",
    10: "non-canonical A",
    11: "non-canonical A, k of the reduced A",
}


@pytest.mark.parametrize("number", SPECCHECK_VERDICTS)
def test_speccheck_cases_follow_the_written_rule(number: int) -> None:
    case = json.loads((VECTORS / "ed25519_speccheck_cases.json").read_text())[number]
    parts = [bytes.fromhex(case[name]) for name in ("pub_key", "message", "signature")]
    assert verify_signature(*parts) == (SPECCHECK_VERDICTS[number] == "valid")


def doubled(point: tuple[int, int]) -> tuple[int, int]:
    """Twice a point of edwards25519, by the addition law of RFC 8032, section 5.1.4."""
    d = -121665 * pow(121666, -1, FIELD_PRIME) % FIELD_PRIME
    x, y = point
    product = d * x * x * y * y % FIELD_PRIME
    return (
        2 * x * y * pow(1 + product, -1, FIELD_PRIME) % FIELD_PRIME,
        (y * y + x * x) * pow(1 - product, -1, FIELD_PRIME) % FIELD_PRIME,
    )


def x_of(y: int) -> int:
    """One x of the curve point with this y (RFC 8032, section 5.1.3)."""
    d = -121665 * pow(121666, -1, FIELD_PRIME) % FIELD_PRIME
    square = (y * y - 1) * pow(d * y * y + 1, -1, FIELD_PRIME) % FIELD_PRIME
    x = pow(square, (FIELD_PRIME + 3) // 8, FIELD_PRIME)
    if x * x % FIELD_PRIME != square:
        x = x * pow(2, (FIELD_PRIME - 1) // 4, FIELD_PRIME) % FIELD_PRIME
    assert x * x % FIELD_PRIME == square
    return x


@pytest.mark.parametrize("y", sorted(SMALL_ORDER_Y))
def test_the_refused_points_are_those_whose_order_divides_8(y: int) -> None:
    point = (x_of(y), y)
    for _ in range(3):
        point = doubled(point)
    assert point == (0, 1)


def test_the_eight_points_of_small_order_are_complete() -> None:
    # y = 1 and -1 have one x each, the other three two: 1 + 1 + 2 * 3 = 8, as many as the cofactor.
    assert sum(1 if x_of(y) == 0 else 2 for y in SMALL_ORDER_Y) == 8


@pytest.mark.parametrize("sign", [0, 1 << 255])
@pytest.mark.parametrize("y", [*sorted(SMALL_ORDER_Y), FIELD_PRIME, FIELD_PRIME + 1, 2**255 - 1])
def test_no_public_key_is_of_small_order_or_not_canonical(y: int, sign: int) -> None:
    encoded = (y | sign).to_bytes(32, "little")
    assert not is_public_key(encoded)
    assert not verify_signature(encoded, MESSAGE, KEY.sign(MESSAGE))
    assert not verify_signature(KEY.public, MESSAGE, encoded + KEY.sign(MESSAGE)[32:])


def test_signature_is_valid_for_its_message_and_key_only() -> None:
    signature = KEY.sign(MESSAGE)
    assert verify_signature(KEY.public, MESSAGE, signature)
    assert not verify_signature(KEY.public, MESSAGE + b"!", signature)
    assert not verify_signature(PublisherKey(b"\1" * 32).public, MESSAGE, signature)


def test_adding_the_group_order_to_s_does_not_make_another_valid_signature() -> None:
    signature = KEY.sign(MESSAGE)
    s = int.from_bytes(signature[32:], "little")
    assert not verify_signature(KEY.public, MESSAGE, signature[:32] + (s + GROUP_ORDER).to_bytes(32, "little"))


def test_key_that_is_no_point_of_the_curve_verifies_nothing() -> None:
    # y = 2 has no x on the curve.
    assert not verify_signature((2).to_bytes(32, "little"), MESSAGE, KEY.sign(MESSAGE))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_key_of_another_length_verifies_nothing(length: int) -> None:
    assert not verify_signature((KEY.public * 2)[:length], MESSAGE, KEY.sign(MESSAGE))


@pytest.mark.parametrize("length", [0, 32, 63, 65, 128])
def test_signature_of_another_length_is_not_valid(length: int) -> None:
    assert not verify_signature(KEY.public, MESSAGE, (KEY.sign(MESSAGE) * 2)[:length])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match=f"found {length}"):
        PublisherKey(bytes(length))


def test_key_from_a_seed_is_that_of_rfc_8032() -> None:
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = PublisherKey(seed)
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")


def test_printing_a_key_shows_only_its_public_half() -> None:
    seed = bytes(range(100, 132))
    shown = repr(PublisherKey(seed))
    assert publisher_text(PublisherKey(seed).public) in shown
    assert seed.hex() not in shown


@given(st.binary(min_size=32, max_size=32).map(lambda seed: PublisherKey(seed).public))
def test_publisher_text_reads_back(public: bytes) -> None:
    text = publisher_text(public)
    assert text.startswith("kvpub1")
    assert len(text) == 62
    assert parse_publisher_text(text) == public
    assert parse_publisher_text(f"  {text.upper()}\n") == public


@given(st.integers(6, 61), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_character_is_noticed(position: int, character: str) -> None:
    text = publisher_text(KEY.public)
    changed = text[:position] + character + text[position + 1 :]
    if changed != text:
        with pytest.raises(UsageError):
            parse_publisher_text(changed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "beginning kvpub1"),
        ("kvpub2" + "a" * 56, "beginning kvpub1"),
        ("12D3KooW" + "a" * 200, "beginning kvpub1"),
        ("kvpub1" + "a" * 55, "found 55"),
        ("kvpub1" + "a" * 57, "found 57"),
        ("kvpub1" + "1" * 56, "only the letters"),
        ("kvpub1" + "é" * 56, "only the letters"),
        (publisher_text(KEY.public)[:-1] + "a", "wrong character"),
        (publisher_text((1).to_bytes(32, "little")), "cannot be one"),
    ],
)
def test_text_that_is_no_publisher_id_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_publisher_text(text)


def test_publisher_text_of_another_length_is_refused() -> None:
    with pytest.raises(UsageError, match="found 31"):
        publisher_text(bytes(31))


@given(st.text(max_size=80))
def test_any_text_is_a_publisher_id_or_a_usage_error(text: str) -> None:
    for candidate in (text, "kvpub1" + text):
        try:
            parse_publisher_text(candidate)
        except UsageError:
            continue
        raise AssertionError("random text has no fitting checksum")
