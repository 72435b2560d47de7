"""Whatever JSON a log holds, reading it ends in numbers that add up."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.audit.run import audit
from tests.unit.node.audit.test_logs import CODEX as CODEX_SESSION
from tests.unit.node.audit.test_logs import SESSION

NAMES = (
    *("type", "uuid", "parentUuid", "sessionId", "message", "role", "content", "usage", "id", "requestId", "payload"),
    *("response_item", "event_msg", "token_count", "info", "last_token_usage", "input_tokens", "cached_input_tokens"),
    *("messages", "system", "tools", "request", "response", "body", "prompt", "input", "timestamp", "model", "tokens"),
    *("cache_read_input_tokens", "cached", "prompt_tokens", "prompt_tokens_details", "isCompactSummary", "text"),
    *("user", "assistant", "gemini", "summary", "leafUuid", "startTime", "name", "metadata", "compacted"),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=24,
)
LINES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(("role", "content", "name", "id")), VALUES, max_size=3), max_size=3)
BODIES = st.builds(lambda messages, rest: {**rest, "messages": messages}, MESSAGES, LINES)
CODEX = st.builds(
    lambda kind, payload: {"type": kind, "payload": payload},
    st.sampled_from(("session_meta", "response_item", "event_msg", "turn_context", "compacted")), LINES,
)  # fmt: skip
CLAUDE = st.builds(
    lambda kind, uuid, parent, message: {
        "type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message,
    },
    st.sampled_from(("user", "assistant", "system")), st.sampled_from("abc"), st.sampled_from("abc") | st.none(), LINES,
)  # fmt: skip
LOGS = st.one_of(*(st.lists(each, max_size=6) for each in (LINES, BODIES, CODEX, CLAUDE)))


@given(LOGS, st.sampled_from((".jsonl", ".json")))
def test_any_log_ends_in_numbers_that_add_up(lines: list[dict[str, Any]], suffix: str) -> None:
    check(lines, suffix)


@pytest.mark.parametrize("kind", [[], {}, 7, None, True])
@pytest.mark.parametrize("name", ["type", "role", "id", "model", "content", "payload", "message"])
def test_a_field_of_another_type_ends_nothing(kind: object, name: str) -> None:
    body = {"messages": [{"role": "user", name: kind}]}
    for lines in (SESSION, CODEX_SESSION, [body]):
        check([line | {name: kind} for line in lines], ".jsonl")
    message = {"type": "gemini", "tokens": {"input": 3}, name: kind}
    check([{"sessionId": "s", "startTime": "t", "messages": [message]}], ".json")


def check(lines: list[dict[str, Any]], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"log{suffix}")
        text = json.dumps(lines) if suffix == ".json" else "\n".join(map(json.dumps, lines))
        path.write_text(text, encoding="utf-8")
        result = audit([path])
    total = result.total
    assert 0 <= total.cached <= total.repeated <= total.sent
    assert 0 <= total.avoidable == sum(tally.avoidable for _, _, tally in result.sessions)
    assert total.behind_changes <= total.sent
    assert total.requests >= total.estimated >= 0


@given(st.binary(max_size=400))
def test_any_bytes_are_counted_as_broken_lines_at_worst(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.jsonl")
        path.write_bytes(data)
        assert audit([path]).total.sent >= 0
