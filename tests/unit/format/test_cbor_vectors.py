"""The deterministic-CBOR cases of others, judged by our narrower profile."""

import json
import re
from pathlib import Path

import pytest

from kvnet.errors import MalformedError
from kvnet.format import cbor

FOLDER = Path(__file__).parents[2] / "vectors" / "third_party" / "cbor"
DASL = json.loads((FOLDER / "dasl_cbor_fixtures.json").read_text())["cases"]
IPLD = json.loads((FOLDER / "ipld_dag_cbor_fixtures.json").read_text())["cases"]

CARRIED = {
    "max safe JS integer, 2^53-1",
    "2^53+1, unrepresentable in JS",
    "map with string key",
    "map keys in correct order",
    "one item map",
    "small unsigned integer",
    "empty byte string",
    "empty string",
    "empty array",
    "commonly escaped characters",
}
NOT_CARRIED = {
    "valid CID with short tag": "a tag",
    "Big DASL CID": "a tag",
    "float reduction": "a float",
    "64-bit floats only": "a float",
    "short NaN": "a float",
    "zero float64": "a float",
    "zero float16": "a float",
    "64-bit subnormal number": "a float",
    "largest CBOR integer, 2^64-1": "a number of 2^63 or more",
    "smallest CBOR integer, -(2^64)": "a negative integer",
    "min safe JS integer, -(2^53-1)": "a negative integer",
    "-(2^53+1), unrepresentable in JS": "a negative integer",
    "smallest unsigned bigint": "a tag",
    "highest negative bigint": "a tag",
    "map with equal int and float keys": "a map key that is not text",
    "too small for int reduction, <-(2^63)": "a float",
    "small negative integer": "a negative integer",
    "simple value 'null'": "null",
    "complex UTF-8 string": "text that is not in normal form C",
    "text not in Unicode Normalization Form C": "text that is not in normal form C",
}


def decode(hex_data: str) -> object:
    return cbor.decode(bytes.fromhex(hex_data), max_bytes=1 << 16, what="vector")


def cases(kind: str) -> list[dict[str, str]]:
    return [case for case in DASL if case["type"] == kind]


def test_the_vectors_are_all_here() -> None:
    assert [len(cases(kind)) for kind in ("invalid_in", "roundtrip", "invalid_out")] == [66, 30, 9]
    assert {case["name"] for case in cases("roundtrip")} == CARRIED | set(NOT_CARRIED)


@pytest.mark.parametrize("case", cases("invalid_in"), ids=lambda case: case["name"])
def test_every_invalid_input_is_refused(case: dict[str, str]) -> None:
    with pytest.raises(MalformedError):
        decode(case["data"])


@pytest.mark.parametrize("case", cases("invalid_out"), ids=lambda case: case["name"])
def test_what_must_not_be_written_is_not_read_either(case: dict[str, str]) -> None:
    with pytest.raises(MalformedError):
        decode(case["data"])


@pytest.mark.parametrize("case", cases("roundtrip"), ids=lambda case: case["name"])
def test_round_trips_are_carried_or_refused_for_the_written_reason(case: dict[str, str]) -> None:
    if case["name"] in CARRIED:
        assert cbor.encode(decode(case["data"])).hex() == case["data"]
        return
    with pytest.raises(MalformedError, match=re.escape(f"found {NOT_CARRIED[case['name']]}")):
        decode(case["data"])


def test_dag_cbor_blocks_are_carried_whole_or_refused_for_a_type_of_theirs() -> None:
    refused: dict[str, int] = {}
    carried = 0
    for case in IPLD:
        try:
            value = decode(case["hex"])
        except MalformedError as error:
            reason = str(error).split("found ")[1].split(" at byte")[0]
            refused[reason] = refused.get(reason, 0) + 1
        else:
            carried += 1
            assert cbor.encode(value).hex() == case["hex"]
    assert carried == 47
    assert refused == {
        "a tag": 36,
        "a float": 19,
        "a negative integer": 16,
        "null": 8,
        "a number of 2^63 or more": 2,
    }
