"""``kvnet explain`` tells of what clients asked the running node, and keeps nothing of it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet, files_of
from tests.mlx.tinymodels import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

LINE = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch={};"
RULES = "Read before you write. " * 40


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvnet]:
    """A running node with one tiny model."""
    folder = tmp_path_factory.mktemp("node")
    runner = Kvnet(folder / "data")
    write_model(folder / "data" / "models" / "tiny")
    runner.start("--model", "tiny")
    yield runner
    runner.end()


def ask(node: Kvnet, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Send a request to the node's endpoint."""
    (url,) = node.json("node", "status")["endpoint"]
    plain = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    with httpx.Client(timeout=TIMEOUT_S) as client:
        return client.post(f"{url.removesuffix('/v1')}{path}", json=plain | body, headers=headers)


def chat(node: Kvnet, *texts: str, system: str = RULES, **headers: str) -> httpx.Response:
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body = {"messages": [{"role": "system", "content": system}, *turns]}
    return ask(node, "/v1/chat/completions", body, **headers)


def killers(report: dict[str, Any]) -> list[str]:
    return [each["killer"] for each in report["killers"]]


def test_the_last_request_is_explained_with_what_was_reused_and_where_it_parts(node: Kvnet) -> None:
    first = chat(node, "Of cats", system=f"{LINE.format('56445')}\n{RULES}\nSession id: 8f3a2b91cc")
    second = chat(node, "Of dogs", system=f"{LINE.format('0aaa9')}\n{RULES}\nSession id: 77d0aa13ef")
    assert (first.status_code, second.status_code) == (200, 200)
    told = node.json("explain")
    assert (told["request"], told["state"]) == (second.headers["x-kvnet-request"], "answered")
    reuse, report = told["sections"]["reuse"], told["sections"]["prompt"]["report"]
    assert reuse["source"] == "ram"
    assert reuse["reused_tokens"] == int(second.headers["x-kvnet-reused-tokens"])
    assert 0 < reuse["reused_tokens"] <= report["common"] < report["size"] == reuse["prompt_tokens"]
    assert report["against"] == first.headers["x-kvnet-request"]
    assert report["section"] == "system"
    assert report["later"]["line"] == 2
    assert sorted(killers(report)) == ["billing-line", "request-id"]
    assert [each["killer"] for each in report["killers"] if each["removed"]] == ["billing-line"]
    ran = node("explain")
    assert "from RAM" in ran.stdout
    assert "messages[0].content, line 2" in ran.stdout


def test_an_agents_request_is_explained_by_its_id(node: Kvnet) -> None:
    def message(number: int, *texts: str) -> httpx.Response:
        roles = ("user", "assistant")
        turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        system = [{"type": "text", "text": LINE.format(f"{number:05x}")}, {"type": "text", "text": "Be kind. " * 40}]
        return ask(node, "/v1/messages", {"system": system, "messages": turns})

    first, second = message(1, "Hello"), message(2, "Hello", "Hi", "And now?")
    chat(node, "Something else")
    told = node.json("explain", second.headers["x-kvnet-request"], "--section", "prompt")
    assert list(told["sections"]) == ["prompt"]
    report = told["sections"]["prompt"]["report"]
    assert report["against"] == first.headers["x-kvnet-request"]
    assert (report["share"], report["section"], killers(report)) == (1.0, "", ["billing-line"])


def test_of_a_private_request_nothing_but_its_figures_is_told(node: Kvnet) -> None:
    answer = chat(node, "Zanzibar", **{"x-kvnet-private": "1"})
    assert answer.status_code == 200
    told = node.json("explain")
    assert told["request"] == answer.headers["x-kvnet-request"]
    assert "private" in told["sections"]["prompt"]["note"]
    assert "Zanzibar" not in json.dumps(told)


def test_a_refused_request_is_explained_by_what_the_client_was_told(node: Kvnet) -> None:
    answer = chat(node, "Hello " * 5000)
    assert answer.status_code == 400
    told = node.json("explain")
    assert told["state"] == "failed"
    assert told["failure"].startswith("400: ")
    assert told["sections"]["reuse"]["note"]


def test_what_cannot_be_explained_is_a_clear_error(node: Kvnet) -> None:
    chat(node, "Hello")
    for arguments, wanted in (
        (("req-nothing",), "begin with 'req-nothing'"),
        (("--section", "x"), "expected sections"),
    ):
        ran = node("--json", "explain", *arguments)
        assert (ran.code, ran.stdout) == (2, "")
        assert wanted in ran.error["message"]


def test_nothing_that_can_be_explained_is_on_disk(node: Kvnet) -> None:
    assert chat(node, "Quagmire and xylophone").status_code == 200
    assert node.json("explain")["state"] == "answered"
    for file, content in files_of(node.data_dir).items():
        assert b"xylophone" not in content, file
