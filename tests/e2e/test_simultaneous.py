"""Requests at the same time over one artifact, while the node exports the same prefix: each answers as if alone."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvnet_node.demonstration import demo_model
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

REQUESTS = 8
DOCUMENT = "Rules of the house. " + "One must be quiet after ten, and friendly before. " * 24
ALONE = {"x-kvnet-reuse": "off", "x-kvnet-private": "1"}
"""Computes everything, and leaves nothing behind."""


@dataclass(frozen=True)
class Answer:
    text: str
    reason: str
    reused_tokens: int


@dataclass
class Talker:
    """Asks a node about one named context."""

    url: str
    model: str
    max_tokens: int

    def ask(self, question: str, *, stream: bool = False, headers: dict[str, str] | None = None) -> Answer:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        reused_tokens = int(response.headers["x-kvnet-reused-tokens"])
        pieces, part = ([response.json()], "message") if not stream else (list(_events(response.text)), "delta")
        choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
        text = "".join(choice[part].get("content") or "" for choice in choices)
        return Answer(text, choices[-1]["finish_reason"], reused_tokens)


def _events(body: str) -> Iterator[dict[str, Any]]:
    for line in body.split("\n\n"):
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def while_exporting(kvnet: Kvnet, document: Path, name: str, ask: Callable[[], None]) -> None:
    """Asks at least once, and until an export that began before has ended."""
    done = threading.Event()
    added: list[dict[str, Any]] = []

    def add() -> None:
        try:
            added.append(kvnet.json("add", str(document), "--name", name))
        finally:
            done.set()

    exporting = threading.Thread(target=add)
    exporting.start()
    ask()
    while not done.is_set():
        ask()
    exporting.join()
    assert added, "the export failed"


def run_rounds(kvnet: Kvnet, folder: Path, model: str, rounds: int, max_tokens: int) -> None:
    started, _ = kvnet.start("--model", model)
    document = folder / "rules.txt"
    document.write_text(DOCUMENT)
    context = kvnet.json("add", str(document), "--name", "rules")
    (url,) = kvnet.json("node", "status")["endpoint"]
    talker = Talker(url, f"{model}#rules", max_tokens)
    assert started["pid"]
    with ThreadPoolExecutor(REQUESTS) as pool:
        for number in range(rounds):
            questions = [f"Round {number}, question {i}: {'may I ' * i}sing?" for i in range(REQUESTS)]
            expected = [talker.ask(question, headers=ALONE) for question in questions]
            assert {each.reused_tokens for each in expected} == {0}

            def ask(questions: list[str] = questions, expected: list[Answer] = expected) -> None:
                streams = [bool(i % 2) for i in range(REQUESTS)]
                answers = list(pool.map(lambda q, s: talker.ask(q, stream=s), questions, streams))
                assert [(a.text, a.reason) for a in answers] == [(e.text, e.reason) for e in expected]
                assert min(answer.reused_tokens for answer in answers) >= context["tokens"] // 256 * 256

            document.write_text(f"{DOCUMENT}And this is version {number}.")
            while_exporting(kvnet, document, f"version-{number}", ask)
    live = kvnet.json("node", "status")["live"]
    assert [(each["model"], each["n_caches"] > 0) for each in live] == [(model, True)]
    scrubbed = kvnet.json("store", "scrub")
    assert (scrubbed["bad_chunks"], scrubbed["damaged"]) == (0, [])
    assert scrubbed["artifacts"] > rounds


@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_simultaneous_requests_over_one_artifact_and_an_export_answer_as_each_alone(
    kvnet: Kvnet, tmp_path: Path, rounds: int
) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", LLAMA)
    run_rounds(kvnet, tmp_path, "tiny", rounds, 12)


@pytest.mark.nightly
def test_simultaneous_requests_to_smollm2_answer_as_each_alone(kvnet: Kvnet, tmp_path: Path) -> None:
    found = demo_model(lambda _: None)
    (kvnet.data_dir / "models").mkdir(parents=True)
    (kvnet.data_dir / "models" / "smollm2").symlink_to(found)
    run_rounds(kvnet, tmp_path, "smollm2", 20, 24)
