import json
from pathlib import Path

import msgspec
import pytest

from kvnet.errors import UsageError
from kvnet_node.commands.generation import explain, read_chat, render_add
from kvnet_node.operations.requests import AddResult, GenerateResult, Source

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def answer(*sources: Source, reasons: tuple[str, ...] = ()) -> GenerateResult:
    return GenerateResult(
        text="t",
        prompt_tokens=12_950,
        reused_tokens=sum(source.tokens for source in sources),
        sources=list(sources),
        ttft_s=1.1,
        prefill_s=0.2,
        decode_s=2.0,
        finish_reason="stop",
        policy="trusted",
        verdict="EXACT",
        reasons=list(reasons),
    )


def test_an_answer_says_what_came_from_where() -> None:
    lines = explain(answer(Source("peer", 12_288, 1_800_000_000, 0.9, peer="12D3KooX", signer="kvpub1abc")))
    assert lines[0] == "12,288 of 12,950 tokens from peer 12D3KooX in 0.900 s (1.80 GB), signed by kvpub1abc"
    known = Source("peer", 12_288, 1_800_000_000, 0.9, "12D3KooX", "kvpub1abc", peer_name="studio", signer_name="mini")
    assert "tokens from studio in 0.900 s (1.80 GB), signed by mini" in explain(answer(known))[0]
    assert "policy trusted" in lines[-1]
    assert "EXACT" in lines[-1]
    member = Source("peer", 12_288, 1_800_000_000, 0.9, peer="12D3KooX", peer_name="studio")
    assert explain(answer(member))[0] == "12,288 of 12,950 tokens from studio in 0.900 s (1.80 GB)"


def test_an_answer_without_reuse_says_why() -> None:
    lines = explain(answer(reasons=("artifact x: not_trusted\x1b",)))
    assert lines[:2] == ["nothing of 12,950 tokens was reused", "artifact x: not_trusted\\x1b"]
    assert "EXACT" not in lines[-1]


@pytest.mark.parametrize("value", [MESSAGES, {"messages": MESSAGES, "model": "x"}])
def test_a_chat_file_is_an_array_or_an_object_with_messages(tmp_path: Path, value: object) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    assert read_chat(file) == MESSAGES


@pytest.mark.parametrize("content", ["", "[]", "{}", '"text"', "[1]", '[{"content": "x"}]', '{"messages": []}', "[["])
def test_other_chat_files_are_usage_errors(tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="--chat expects"):
        read_chat(file)


def test_an_answer_says_what_reuse_saved_when_that_is_known() -> None:
    source = Source("disk", 12_288, 1_800_000_000, 0.9)
    assert "saved" not in explain(answer(source))[-1]
    assert "reuse saved about 7.0 s" in explain(msgspec.structs.replace(answer(source), saved_s=7.0))[-1]
    assert "took about 0.500 s longer" in explain(msgspec.structs.replace(answer(source), saved_s=-0.5))[-1]


def test_an_answer_says_when_it_waited_for_the_engine() -> None:
    source = Source("disk", 12_288, 1_800_000_000, 0.9)
    assert "waited" not in explain(answer(source))[-1]
    words = explain(msgspec.structs.replace(answer(source), saved_s=1.0, waited_s=2.9))[-1]
    assert "(prefill 0.200 s; reuse saved about 1.0 s; waited about 2.9 s for the engine)" in words


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("EXACT", "bit-exact numerics (EXACT)"), ("TOLERANT", "other rounding possible (TOLERANT)")],
)
def test_the_verdict_is_in_words(verdict: str, words: str) -> None:
    result = msgspec.structs.replace(answer(Source("disk", 1, 1, 0.9)), verdict=verdict)
    assert explain(result)[-1].endswith(words)


def test_an_answer_that_was_cut_names_the_flag() -> None:
    result = msgspec.structs.replace(answer(), finish_reason="length", max_tokens=64)
    assert "cut at --max-tokens 64 after" in explain(result)[-1]


@pytest.mark.parametrize(("known", "words"), [(True, "about 0.000 s of prefill"), (False, "prefill time unknown")])
def test_a_dry_run_tells_an_unknown_time_from_none(known: bool, words: str) -> None:
    plan = AddResult("", "x", 0, 300, 1_000, 1_000, 0, 300, 0.0, 1, dry_run=True, prefill_known=known)
    assert words in render_add(plan)
    assert "of 1 file," in render_add(plan)
