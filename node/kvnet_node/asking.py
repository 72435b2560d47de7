"""One streamed chat completion at a node's endpoint, timed as its client sees it: what benchmarks measure with."""

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvnet.errors import EngineError

TIMEOUT_S = 300.0
MAX_ERROR_BYTES = 500

_DECIDED = ("kept", "keep_not_worth", "keep_dropped", "keep_failed", "keep_no_live_state", "keep_not_allowed")
"""Counters of a running node that say what became of the K/V of an answer."""

_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Told:
    """An answer.

    Attributes:
        text: what was generated.
        prompt_tokens, reused_tokens: as its usage says.
        source: "none", "ram", "disk" or "peer".
        ttft_s: seconds from sending the request to the first event with text.
    """

    text: str
    prompt_tokens: int
    reused_tokens: int
    source: str
    ttft_s: float


def ask(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Told:
    """Send one chat completion and read its stream to the end. Blocking.

    Args:
        url: of the endpoint, before ``/v1``.
        body: model, messages and whatever else; streaming, usage and greedy decoding are added.
        headers: more request headers.

    Raises:
        EngineError: the node refused it, or its answer has no usage.
    """
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    whole = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    begun = time.perf_counter()
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            msgspec.json.encode(whole),
            {"Content-Type": "application/json", **(headers or {})},
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            found = response.read(MAX_ERROR_BYTES).decode("utf-8", "replace")
            raise EngineError(f"expected an answer of {url}, found {response.status}: {found}")
        return _read(response, begun)
    except http.client.HTTPException as error:
        raise EngineError(f"expected an answer of {url}, found {type(error).__name__}") from error
    finally:
        connection.close()


def decided(counters: Mapping[str, int]) -> int:
    """Of how many answers a node has kept the K/V or decided not to, by the counters of its status."""
    return sum(counters.get(name, 0) for name in _DECIDED)


def _read(response: http.client.HTTPResponse, begun: float) -> Told:
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    text = ""
    for event in _events(response):
        for choice in event.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
        if text and not ttft_s:
            ttft_s = time.perf_counter() - begun
        usage = event.get("usage") or usage
    if not usage:
        raise EngineError("expected an answer with usage, found none")
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    # An answer without any text has been waited for to its end.
    waited_s = ttft_s or time.perf_counter() - begun
    return Told(text, usage["prompt_tokens"], reused, response.headers.get("x-kvnet-source", ""), waited_s)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(_DATA) and not line.startswith(_DATA + _DONE):
            yield msgspec.json.decode(line[len(_DATA) :])
