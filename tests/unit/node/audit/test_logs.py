"""Logs as agents write them: what is read of them, and what is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvnet.errors import UsageError
from kvnet_node.audit import run
from kvnet_node.audit.causes import Cause
from kvnet_node.audit.run import Audited, audit, known_places, log_files


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def audited(*paths: Path, **options: Any) -> Audited:
    return audit(log_files(paths), **options)


# --- Claude Code ---


def said(uuid: str, parent: str | None, text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {
        "type": "user", "uuid": uuid, "parentUuid": parent, "sessionId": "s1", "version": "2.1", "cwd": "/p",
        "message": message, **more,
    }  # fmt: skip


def answered(uuid: str, parent: str, number: int, fresh: int, read: int, **more: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 4, "cache_creation_input_tokens": fresh - 4, "cache_read_input_tokens": read,
        "output_tokens": 9,
    }  # fmt: skip
    message = {
        "id": f"msg_{number}", "role": "assistant", "model": "big", "usage": usage,
        "content": [{"type": "text", "text": f"answer {number}"}],
    }  # fmt: skip
    return {
        "type": "assistant", "uuid": uuid, "parentUuid": parent, "sessionId": "s1", "requestId": f"req_{number}",
        "version": "2.1", "cwd": "/p", "message": message, **more,
    }  # fmt: skip


SESSION = [
    {"type": "summary", "summary": "x", "leafUuid": "y"},
    said("u1", None, "read the file"),
    answered("a1", "u1", 1, 15_000, 0),
    answered("a1b", "a1", 1, 15_000, 0),
    {"type": "progress", "uuid": "p1", "parentUuid": "a1b", "sessionId": "s1"},
    said("u2", "p1", "tool result"),
    answered("a2", "u2", 2, 500, 15_000),
    said("u3", "a2", "go on"),
    answered("a3", "u3", 3, 15_900, 0),
]


def test_a_session_of_claude_code_is_read_with_its_usage(tmp_path: Path) -> None:
    result = audited(write(tmp_path / "projects" / "-p" / "s1.jsonl", *SESSION))
    total = result.total
    assert (total.requests, total.sent, total.estimated) == (3, 15_000 + 15_500 + 15_900, 0)
    assert (total.repeated, total.cached, total.avoidable) == (15_000 + 15_500, 15_000, 15_500)
    assert list(total.causes) == [Cause.NOT_CACHED]
    assert [(agent, name) for agent, name, _ in result.sessions] == [("claude-code", "s1")]


def test_an_answer_over_several_lines_and_a_resumed_session_count_once(tmp_path: Path) -> None:
    write(tmp_path / "s1.jsonl", *SESSION)
    write(tmp_path / "s2.jsonl", *[{**line, "sessionId": "s2"} for line in SESSION])
    assert audited(tmp_path).total.requests == 3


def test_a_rewound_conversation_repeats_what_stands_before_the_branch(tmp_path: Path) -> None:
    long = "word " * 4000
    lines = [
        said("u1", None, "begin"),
        answered("a1", "u1", 1, 15_000, 0),
        said("u2", "a1", long),
        answered("a2", "u2", 2, 5000, 15_000),
        said("u3", "a1", "another way"),
        answered("a3", "u3", 3, 100, 15_000),
    ]
    total = audited(write(tmp_path / "s.jsonl", *lines)).total
    assert 30_000 <= total.repeated <= 30_010  # the first answer was in the second prompt
    assert total.causes == {}


def test_a_compacted_history_is_named(tmp_path: Path) -> None:
    lines = [
        *SESSION[:7],
        {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None, "sessionId": "s1"},
        said("u4", "b", "This is a summary. " * 500, isCompactSummary=True),
        said("u5", "u4", "go on"),
        answered("a4", "u5", 4, 4000, 11_000),
    ]
    total = audited(write(tmp_path / "s.jsonl", *lines)).total
    assert total.causes[Cause.COMPACTED].tokens == 4000


def test_subagents_have_conversations_of_their_own(tmp_path: Path) -> None:
    side = [
        said("x1", None, "search", isSidechain=True, agentId="7"),
        answered("y1", "x1", 11, 9000, 0, isSidechain=True, agentId="7"),
    ]
    result = audited(write(tmp_path / "s.jsonl", *SESSION, *side))
    assert {name for _, name, _ in result.sessions} == {"s1", "s1/7"}
    assert result.total.repeated == 30_500


# --- Codex ---


def item(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T10:00:00Z", "type": "response_item", "payload": {"type": kind, **payload}}


def token_count(total: int, last: int, cached: int) -> dict[str, Any]:
    info = {
        "total_token_usage": {"input_tokens": total},
        "last_token_usage": {"input_tokens": last, "cached_input_tokens": cached, "output_tokens": 5},
    }
    payload = {"type": "token_count", "info": info}
    return {"timestamp": "2026-01-01T10:00:01Z", "type": "event_msg", "payload": payload}


CODEX = [
    {"type": "session_meta", "payload": {"id": "c1", "cwd": "/p", "cli_version": "1"}},
    {"type": "turn_context", "payload": {"model": "g"}},
    {"type": "event_msg", "payload": {"type": "token_count", "info": None}},
    item("message", role="user", content=[{"type": "input_text", "text": "list files"}]),
    item("reasoning", summary=[], encrypted_content="zzz"),
    item("function_call", name="shell", arguments="{}", call_id="1"),
    token_count(10_000, 10_000, 0),
    token_count(10_000, 10_000, 0),
    item("function_call_output", call_id="1", output="a b c"),
    item("message", role="assistant", content=[{"type": "output_text", "text": "three"}]),
    token_count(20_400, 10_400, 9_984),
]


def test_a_session_of_codex_is_read_with_its_usage(tmp_path: Path) -> None:
    result = audited(write(tmp_path / "rollout-x.jsonl", *CODEX))
    total = result.total
    assert [(agent, name) for agent, name, _ in result.sessions] == [("codex", "c1")]
    assert (total.requests, total.sent, total.cached) == (2, 20_400, 9_984)
    assert (total.repeated, total.avoidable, total.causes) == (10_000, 16, {})


def test_a_compacted_session_of_codex_begins_anew(tmp_path: Path) -> None:
    more = [
        {"type": "compacted", "payload": {"message": "summary"}},
        item("message", role="user", content=[{"type": "input_text", "text": "summary " * 900}]),
        token_count(29_400, 9_000, 7_000),
    ]
    total = audited(write(tmp_path / "rollout-x.jsonl", *CODEX, *more)).total
    assert total.causes[Cause.COMPACTED].tokens == 2_000


# --- Gemini CLI ---


def test_a_session_of_gemini_cli_is_read_with_its_usage(tmp_path: Path) -> None:
    def answer(number: int, tokens: int, cached: int) -> dict[str, Any]:
        usage = {"input": tokens, "output": 3, "cached": cached, "total": tokens + 3}
        return {"id": str(number), "type": "gemini", "content": f"a{number}", "tokens": usage, "model": "g"}

    messages = [
        {"id": "u", "type": "user", "content": "q1"}, answer(1, 8000, 0), {"id": "v", "type": "user", "content": "q2"},
        answer(2, 8100, 7900),
    ]  # fmt: skip
    session = {"sessionId": "g1", "projectHash": "h", "startTime": "2026-01-01T10:00:00Z", "messages": messages}
    path = tmp_path / "session-1.json"
    path.write_text(json.dumps(session), encoding="utf-8")
    total = audited(path).total
    assert (total.requests, total.sent, total.repeated, total.cached, total.avoidable) == (2, 16_100, 8000, 7900, 100)


# --- Requests ---


def body(*texts: str, system: str = "Be kind. " * 300) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in texts)]
    return {"model": "m", "messages": messages}


@pytest.mark.parametrize(
    ("usage", "cached", "without"),
    [
        ({"prompt_tokens": 900, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 640}}, 1280, 0),
        ({"prompt_tokens": 900, "completion_tokens": 1}, 0, 2),
        ({"input_tokens": 60, "cache_creation_input_tokens": 200, "cache_read_input_tokens": 640}, 1280, 0),
        ({"input_tokens": 900, "input_tokens_details": {"cached_tokens": 640}}, 1280, 0),
    ],
)
def test_usage_of_every_api_is_understood(tmp_path: Path, usage: Any, cached: int, without: int) -> None:
    lines = [{"request": body("a"), "response": {"usage": usage}}] * 2
    total = audited(write(tmp_path / "log.jsonl", *lines)).total
    assert (total.sent, total.cached, total.without_cache_usage) == (1800, cached, without)
    assert total.repeated >= 900


@pytest.mark.parametrize(
    "wrap",
    [
        lambda each: each,
        lambda each: {"body": each},
        lambda each: {"request": {"body": json.dumps(each)}, "response": {}},
        lambda each: {"request": json.dumps(each)},
        lambda each: {"timestamp": 1.0, "request": {"json": each}, "response": [{"usage": None}]},
    ],
)
def test_requests_are_found_however_they_are_wrapped(tmp_path: Path, wrap: Any) -> None:
    total = audited(write(tmp_path / "log.jsonl", wrap(body("a")), wrap(body("a", "b")))).total
    assert (total.requests, total.estimated) == (2, 2)
    assert total.repeated > 600


def test_usage_of_a_streamed_answer_is_found(tmp_path: Path) -> None:
    events = [{"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 70}}}, {}]
    total = audited(write(tmp_path / "log.jsonl", {"request": body("a"), "response": events})).total
    assert (total.sent, total.cached) == (75, 70)


def test_a_text_completion_and_a_responses_body_are_prompts_too(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * 4000}, {"prompt": "p" * 4000}, {"input": "p" * 80, "instructions": "q" * 400}]
    assert audited(write(tmp_path / "log.jsonl", *lines)).total.repeated == 1000


# --- Whatever else a folder holds ---


def test_broken_lines_are_counted_and_named_and_end_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", body("a"), "{broken", "", "[1, 2]", '{"no": "request"}', "\x00\x01", body("a"))
    result = audited(path)
    assert result.total.requests == 2
    assert result.malformed[0].count == 4
    assert [line for line, _ in result.malformed[0].named] == [2, 4, 5, 6]


def test_reasons_hold_none_of_the_text(tmp_path: Path) -> None:
    result = audited(write(tmp_path / "log.jsonl", '{"secret words', '"secret words"', '{"secret": "words"}'))
    assert result.malformed[0].count == 3
    assert "secret" not in str(result.malformed)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet_node.audit.lines.MAX_LINE_BYTES", 4000)
    result = audited(write(tmp_path / "log.jsonl", body("a"), body("b" * 9000), body("a")))
    assert (result.total.requests, result.malformed[0].named) == (2, [(2, "longer than 4,000 bytes")])


def test_a_file_that_cannot_be_read_is_named_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "log.jsonl", body("a"))
    gone = write(tmp_path / "gone.jsonl", body("a"))
    files = log_files([tmp_path])
    gone.unlink()
    result = audit(files)
    assert (result.total.requests, [path for path, _ in result.unreadable]) == (1, [gone])


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", body("a"), body("b"))
    seen: list[tuple[int, int]] = []
    audited(path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_the_known_places_are_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / ".claude" / "projects").mkdir(parents=True)
    (tmp_path / "elsewhere" / "sessions").mkdir(parents=True)
    places = known_places(tmp_path, {"CODEX_HOME": str(tmp_path / "elsewhere")})
    assert places == [tmp_path / ".claude" / "projects", tmp_path / "elsewhere" / "sessions"]


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found nothing at"):
        log_files([tmp_path / "missing"])


def test_older_files_are_read_first(tmp_path: Path) -> None:
    import os

    for name, age in (("a.jsonl", 10), ("b.jsonl", 20)):
        os.utime(write(tmp_path / name, body(name)), (1000 - age, 1000 - age))
    assert [file.name for file in run.log_files([tmp_path])] == ["b.jsonl", "a.jsonl"]
