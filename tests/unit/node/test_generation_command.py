import json
from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet_node.commands.generation import explain, read_chat
from kvnet_node.operations.requests import GenerateResult, Source

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
    assert "policy trusted" in lines[-1]
    assert "EXACT" in lines[-1]


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
