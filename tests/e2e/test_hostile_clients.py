"""The HTTP endpoint of a running node under clients that mean harm, or are broken: each leaves the next one served."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet, files_of
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

TINY = "tiny"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvnet]:
    """A running node with one random model."""
    folder = tmp_path_factory.mktemp("node")
    runner = Kvnet(folder / "data")
    write_model(folder / "data" / "models" / TINY, {**LLAMA, "max_position_embeddings": 2048})
    runner.start("--model", TINY)
    yield runner
    runner.end()


@pytest.fixture(scope="module")
def url(node: Kvnet) -> str:
    """The endpoint, as the status says."""
    (found,) = node.json("node", "status")["endpoint"]
    assert isinstance(found, str)
    return found


@pytest.fixture(autouse=True)
def _the_next_request_is_answered(url: str) -> Iterator[None]:
    yield
    assert ask(url).status_code == 200


def asked(**more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hello there"}]
    return {"model": TINY, "messages": said, "max_tokens": 4, "temperature": 0, **more}


def ask(url: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=asked(**more), timeout=TIMEOUT_S)


def answered(url: str, request: bytes) -> bytes:
    """All that comes back until the node closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
        client.sendall(request)
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nConnection: close", b"HTTP/1.0"], ids=["close", "HTTP/1.0"])
def test_a_connection_that_is_not_to_be_kept_is_closed_with_the_answer(url: str, head: bytes, *, stream: bool) -> None:
    body = json.dumps(asked(stream=stream)).encode()
    length = f"Content-Length: {len(body)}".encode()
    said = answered(
        url, b"POST /v1/chat/completions " + head + b"\r\nHost: localhost\r\n" + length + b"\r\n\r\n" + body
    )
    assert said.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in said if stream else said.endswith(b"}")


def test_a_parameter_at_fault_does_not_spoil_later_answers(url: str) -> None:
    for fault in ({"top_k": True}, {"top_logprobs": True, "logprobs": True}, {"logit_bias": {"5": None}}):
        assert ask(url, temperature=1, **fault).status_code == 400
        assert ask(url, temperature=1).status_code == 200


def test_a_model_name_that_no_path_can_have_is_not_found(url: str) -> None:
    for name in ("a" * 1_000_000, "~nobody-by-this-name", "tiny\0", "../" * 2000):
        failed = ask(url, model=name)
        assert (failed.status_code, failed.json()["error"]["code"]) == (404, "model_not_found")
        assert len(failed.content) < 2000


def test_a_prompt_longer_than_any_window_is_a_400_in_each_clients_form(url: str) -> None:
    text = "a" * 4_300_000
    openai = ask(url, messages=[{"role": "user", "content": text}])
    assert (openai.status_code, openai.json()["error"]["code"]) == (400, "context_length_exceeded")
    anthropic = ask(url, "/v1/messages", messages=[{"role": "user", "content": text}])
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (400, "invalid_request_error")


def test_nothing_that_a_private_request_says_is_kept_told_or_counted(node: Kvnet, url: str) -> None:
    word = "Xylophonezebra"
    said = [{"role": "system", "content": f"{word} is secret. " * 60}, {"role": "user", "content": word}]
    counted = node.json("node", "status")["counters"]
    for model in (f"{TINY}#private", f"{TINY}#x#private"):
        for messages in (said, [{"role": "user", "content": [{"type": word}]}], [*said, {"role": 5}]):
            answer = ask(url, model=model, messages=messages)
            assert answer.status_code == (200 if messages is said and "#x" not in model else answer.status_code)
            told = node("explain"), node("explain", "--json")
            assert not any(word in ran.stdout + ran.stderr for ran in told)
            assert not any(word in json.dumps(node.asked(verb)) for verb in ("status", "list"))
    after = node.json("node", "status")["counters"]
    for name in ("prompt_tokens", "generated_tokens", "reused_ram_tokens", "reused_disk_tokens"):
        assert after.get(name, 0) == counted.get(name, 0)
    kept = files_of(node.data_dir)
    assert kept
    assert not any(word.encode() in content for content in kept.values())
