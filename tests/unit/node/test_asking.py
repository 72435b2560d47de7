import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvnet.errors import EngineError
from kvnet_node.asking import ask, decided


class Scripted(HTTPServer):
    """Answers every request with what it is told to, and remembers the last one."""

    status = 200
    events: tuple[Any, ...] = ()
    body: Any = None
    headers: Any = None


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        self.server.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.headers = dict(self.headers)
        self.send_response(self.server.status)
        self.send_header("x-kvnet-source", "disk")
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the library
        """Nothing to say."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def url(server: Scripted) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64}}}


@pytest.mark.loopback
def test_text_usage_and_source_of_a_stream_are_read(server: Scripted) -> None:
    server.events = (piece("Good"), piece(" day"), {"choices": [{"delta": {}}]}, USAGE, "[DONE]")
    told = ask(url(server), {"model": "m", "messages": []}, {"x-kvnet-reuse": "off"})
    assert (told.text, told.prompt_tokens, told.reused_tokens, told.source) == ("Good day", 70, 64, "disk")
    assert told.ttft_s > 0
    assert server.body["stream"] is True
    assert server.body["temperature"] == 0
    assert server.headers["x-kvnet-reuse"] == "off"


@pytest.mark.loopback
def test_an_answer_without_text_counts_until_its_end(server: Scripted) -> None:
    server.events = (USAGE, "[DONE]")
    told = ask(url(server), {})
    assert told.text == ""
    assert told.ttft_s > 0


@pytest.mark.loopback
@pytest.mark.parametrize(("status", "events"), [(404, ({"error": {}},)), (200, (piece("x"), "[DONE]"))])
def test_a_refusal_and_an_answer_without_usage_are_errors(
    server: Scripted, status: int, events: tuple[Any, ...]
) -> None:
    server.status, server.events = status, events
    with pytest.raises(EngineError, match="expected an answer"):
        ask(url(server), {})


def test_answers_kept_or_not_worth_it_are_counted_and_nothing_else() -> None:
    assert decided({"kept": 2, "kept_bytes": 900, "keep_not_worth": 1, "requests": 7}) == 3
