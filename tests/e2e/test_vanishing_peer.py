"""A peer that freezes or dies in the middle of a fetch that a client's request waits for."""

import concurrent.futures
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

TINY = "tiny"
TRIES = 5
"""For so small a model peers have a quarter of a second to answer. Who misses it on a busy machine computes, and is
asked about other rules then."""
SLOW_BYTES_S = 100_000
"""What the provider may send a second: the K/V of the rules takes it several seconds."""


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    text: str
    reused_tokens: int


def rules(volume: int) -> str:
    """Much to read, and different from the beginning on for each volume."""
    each = (f"Rule {number}: of {number * 7919 % 1000} things do not forget one.\n" for number in range(60))
    return f"Volume {volume}.\n{''.join(each)}"


def ask(kvnet: Kvnet, url: str, volume: int) -> Answer:
    """One question over the rules, through the endpoint, without randomness."""
    body: dict[str, Any] = {
        "model": str(kvnet.data_dir / "models" / TINY),
        "messages": [{"role": "system", "content": rules(volume)}, {"role": "user", "content": "What is rule 7?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        return Answer(reply.status_code, reply.text, 0)
    usage = reply.json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(200, reply.json()["choices"][0]["message"]["content"], cached)


def pair(kvnet: Kvnet, other: Kvnet, folder: Path) -> str:
    """Two members with the same model; the first has the rules and is slow to send them. Its address."""
    for node in (kvnet, other):
        write_model(node.data_dir / "models" / TINY, {**LLAMA, "max_position_embeddings": 8192})
    kvnet.json("namespace", "export", str(folder / "mine.kvns"))
    other.json("namespace", "import", str(folder / "mine.kvns"))
    other.json("key", "trust", kvnet.json("key", "show")["publisher"])
    kvnet.environment["KVNET_LIMITS_UPLOAD_BYTES_S"] = str(SLOW_BYTES_S)
    started, _ = kvnet.start("--model", TINY)
    return str(started["addresses"][0])


def served(kvnet: Kvnet) -> int:
    """How many chunks the provider has sent."""
    counters: dict[str, int] = kvnet.asked("status")["counters"]
    return counters.get("chunks_served", 0)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_request_is_answered_right_when_its_provider_vanishes_in_mid_fetch(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path, end: signal.Signals
) -> None:
    address = pair(kvnet, other, tmp_path)
    provider = kvnet._nodes[-1]
    url = kvnet.json("node", "status")["endpoint"][0]
    expected = [ask(kvnet, url, volume) for volume in range(TRIES)]
    assert {each.status for each in expected} == {200}
    other.start("--model", TINY, "--bootstrap", address)
    asked_at = other.json("node", "status")["endpoint"][0]
    other.watch(lambda seen: any(peer["member"] for peer in seen["peers"]), "peers")
    assert provider.poll() is None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for volume in range(TRIES):
            answering = pool.submit(ask, other, asked_at, volume)
            while not served(kvnet) and not answering.done():
                pass
            if served(kvnet):
                break
            assert answering.result().text == expected[volume].text
        assert served(kvnet), "nothing was fetched for any of them"
        try:
            provider.send_signal(end)
            answer = answering.result(timeout=TIMEOUT_S)
        finally:
            provider.send_signal(signal.SIGCONT)
    assert (answer.status, answer.text) == (200, expected[volume].text)
    # And the node goes on.
    again = ask(other, asked_at, volume)
    assert (again.status, again.text) == (200, expected[volume].text)
