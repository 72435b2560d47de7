import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import MalformedError, UsageError
from simulations.workload.traces import EXCERPTS, MAX_LINE_BYTES, TraceRequest, find, read

ANYTHING = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
TURN = {"t": 1.5, "in": 130, "out": 7, "hash_ids": [1, 2]}
SESSION = {"id": "a", "block_size": 64, "tool_tokens": 40, "system_tokens": 10, "requests": [TURN]}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_a_mooncake_request_is_read(tmp_path: Path) -> None:
    trace = read(write(tmp_path, GOOD))
    (request,) = trace.requests
    assert trace.block_tokens == 512
    assert request == (1, 1.0, "", 600, 5, 0, [1, 2], False)


def test_a_session_is_read_and_the_rest_of_a_prompt_has_no_id(tmp_path: Path) -> None:
    trace = read(write(tmp_path, SESSION))
    (request,) = trace.requests
    assert trace.block_tokens == 64
    assert request == (1, 1.5, "a", 130, 7, 50, [1, 2], True)


def test_runs_of_ids_are_read_as_ids(tmp_path: Path) -> None:
    turn = {"t": 0, "in": 64 * 5, "out": 1, "blocks": [[3, 2], [9, 3]]}
    (request,) = read(write(tmp_path, {**SESSION, "requests": [turn]})).requests
    assert request.ids == [3, 4, 9, 10, 11]


def test_requests_of_subagents_are_left_out(tmp_path: Path) -> None:
    session = {**SESSION, "requests": [{"t": 1, "type": "subagent", "requests": [TURN]}, {**TURN, "type": "n"}]}
    assert [request.arrival_s for request in read(write(tmp_path, session)).requests] == [1.5]


def test_a_gzipped_trace_reads_as_a_plain_one(tmp_path: Path) -> None:
    plain = EXCERPTS / "synthetic_excerpt.jsonl"
    zipped = tmp_path / "trace.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read(zipped).requests) == list(read(plain).requests)


def test_a_trace_from_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    plain = write(tmp_path, GOOD, GOOD)
    windows = tmp_path / "windows.jsonl"
    windows.write_text(plain.read_text(), encoding="utf-8-sig", newline="\r\n")
    assert list(read(windows).requests) == list(read(plain).requests)


def test_empty_lines_count_but_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=r"trace\.jsonl:3: "):
        list(read(write(tmp_path, GOOD, "", {**GOOD, "timestamp": -1})).requests)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "input data was truncated"),
        ("[]", "expected `object`, got `array`"),
        ({**GOOD, "hash_ids": [1]}, "hash_ids: expected 2 ids for 600 tokens, found 1"),
        ({**GOOD, "hash_ids": ["1", 2]}, "expected `int`, got `str` - at `hash_ids"),
        ({**GOOD, "hash_ids": [1, -2]}, "expected `int` >= 0 - at `hash_ids"),
        ({**GOOD, "input_length": 0}, "expected `int` >= 1 - at `input_length`"),
        ({**GOOD, "output_length": 1 << 40}, "expected `int` <= 67108864 - at `output_length`"),
        ({"timestamp": 1}, "missing required field `input_length`"),
        (json.dumps(GOOD).replace("{", '{"timestamp": 7, '), "timestamp: expected once, found it twice"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(MalformedError) as caught:
        list(read(write(tmp_path, GOOD, line)).requests)
    assert "trace.jsonl:2: " in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("session", "says"),
    [
        ({**SESSION, "block_size": 128}, "block_size: expected 64 as in the first line, found 128"),
        ({**SESSION, "requests": [{**TURN, "hash_ids": [1]}]}, "the request at t=1.5: expected 2 ids for 130 tokens"),
        ({**SESSION, "requests": [{**TURN, "hash_ids": None, "blocks": [[0, 1 << 20], [0, 1]]}]}, "blocks: expected"),
        ({**SESSION, "requests": [{**TURN, "blocks": [[0, 1 << 40]], "hash_ids": None}]}, "expected `int` <= 1048576"),
    ],
)
def test_a_session_that_does_not_fit_is_named(tmp_path: Path, session: Any, says: str) -> None:
    with pytest.raises(MalformedError) as caught:
        list(read(write(tmp_path, SESSION, session)).requests)
    assert "trace.jsonl:2: " in caught.value.message
    assert says in caught.value.message


def test_a_line_that_is_too_long_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + b" " * (MAX_LINE_BYTES + 1))
    with pytest.raises(MalformedError, match=r"trace\.jsonl:2: expected at most 16,777,216 bytes"):
        list(read(file).requests)


def test_what_is_no_trace_says_what_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match="found neither"):
        read(write(tmp_path, {"a": 1}))
    with pytest.raises(MalformedError, match="found no line"):
        read(write(tmp_path))
    damaged = tmp_path / "trace.gz"
    damaged.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(MalformedError, match=r"trace\.gz:1: expected text, plain or gzipped"):
        list(read(damaged).requests)


def test_an_excerpt_is_found_by_its_name_and_an_unknown_one_is_not() -> None:
    assert find("conversation_excerpt.jsonl") == EXCERPTS / "conversation_excerpt.jsonl"
    with pytest.raises(UsageError, match="found no file nowhere") as caught:
        find("nowhere")
    assert "conversation_excerpt.jsonl" in caught.value.hint


def outcome(file: Path) -> list[TraceRequest] | str:
    """The requests of a trace, or what the error says."""
    try:
        return list(read(file).requests)
    except MalformedError as error:
        return error.message


@given(st.binary(max_size=200), st.booleans())
def test_bytes_are_requests_or_a_line_that_is_named(tmp_path_factory: Any, junk: bytes, first: bool) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "trace.jsonl"
    good = json.dumps(GOOD).encode()
    file.write_bytes(b"\n".join([junk, good] if first else [good, junk]))
    found = outcome(file)
    assert found
    assert isinstance(found, list) or str(file) in found


@given(st.sampled_from(sorted(GOOD)), st.recursive(ANYTHING, lambda inner: st.lists(inner, max_size=3)))
def test_values_are_a_request_or_a_line_that_is_named(tmp_path_factory: Any, key: str, value: Any) -> None:
    found = outcome(write(tmp_path_factory.mktemp("fuzz"), {**GOOD, key: value}))
    if isinstance(found, str):
        assert ":1: " in found
    else:
        (request,) = found
        assert len(request.ids) == -(-request.n_input // 512) >= 1
