"""``kvnet explain``: what is told of a request the node remembers, in values and in words."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvnet.engine.completions import Completed
from kvnet.engine.interface import Engine
from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.errors import UsageError
from kvnet.exchange.answers import Asked, Finished, Reuse
from kvnet.exchange.prefix_reuse import Source
from kvnet.exchange.reuse import Rejected
from kvnet.format.fingerprint import Verdict
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.protocol.ids import PeerId
from kvnet.trust.keys import PublisherKey, publisher_text
from kvnet_node.api.failures import ApiFailure
from kvnet_node.api.requests_log import LoggedRequest, RequestLog
from kvnet_node.calling import Names
from kvnet_node.commands.explain import RENDERERS, render
from kvnet_node.operations import requests as r
from kvnet_node.operations.explain import SECTIONS, explained
from kvnet_node.prompts.normalise import Removed
from kvnet_node.prompts.outline import outline
from kvnet_node.prompts.sections import as_characters

SIGNER = PublisherKey(bytes(32)).public
ARTIFACT = ArtifactHash(bytes(range(32)))
NO_PROMPT = PreparedPrompt((), (), 0, 0)


@asynccontextmanager
async def nothing_loaded(model: str) -> AsyncIterator[Engine | None]:
    yield None


def reuse(**fields: Any) -> Reuse:
    plain: dict[str, Any] = {
        "prompt_tokens": 12_950, "reused_tokens": 0, "created_tokens": 0, "source": "none", "sources": (),
        "saved_s": 0.0, "lookup_s": 0.0, "restore_s": 0.0, "window_tokens": 0, "verdict": None, "rejected": (),
        "reasons": (), "prepared": NO_PROMPT,
    }  # fmt: skip
    return Reuse(**{**plain, **fields})


def chat(*texts: str, system: str = "Be brief.") -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *turns]}


def add(
    log: RequestLog,
    body: dict[str, Any],
    model: str = "tiny",
    found: Reuse | None = None,
    *,
    private: bool = False,
    removed: tuple[Removed, ...] = (),
) -> LoggedRequest:
    """A request that was answered; its tokens are its characters."""
    request = log.begin(time_s=1_764_438_842.5, path="/v1/chat/completions", model=model)
    log.run(request, Asked(PromptKind.CHAT, json.dumps(body).encode(), {}, 16, private=private), removed)
    found = replace(found or reuse(), prepared=as_characters(outline(body)))
    log.reused(request, found)
    log.finish(request, Finished(Completed((1,), "stop", 0, 0.1, 1, 0.1, 0.1), found, ttft_s=1.25, total_s=2.5))
    return request


async def section(log: RequestLog, name: str, request: str = "", names: Names | None = None) -> dict[str, Any]:
    result = await explained(log, r.ExplainRequest(request, [name]), nothing_loaded, names=names)
    assert list(result.sections) == [name]
    return result.sections[name]


async def test_state_from_a_peer_is_told_with_its_peer_its_time_and_its_signer() -> None:
    log = RequestLog()
    peer = PeerId(b"\x00\x24\x08\x01\x12\x20" + bytes(32))
    source = Source("peer", peer, 12_288, 4_000_000, 0.9, SIGNER, ARTIFACT)
    found = reuse(reused_tokens=12_288, source="peer", sources=(source,), saved_s=7.1, verdict=Verdict.TOLERANT)
    add(log, chat("Hello"), found=found)
    words = RENDERERS["reuse"](await section(log, "reuse")).splitlines()
    assert words[0].startswith("12,288 of 12,950 tokens from peer 12D3KooW")
    assert " in 0.900 s (4.00 MB), saved about 7.1 s, " in words[0]
    assert words[0].endswith(f"signed by {publisher_text(SIGNER)}, artifact {artifact_text(ARTIFACT)}")
    assert words[1] == "restored state: TOLERANT"
    names = Names({peer: "studio"}, {SIGNER: "mini"})
    [called, _] = RENDERERS["reuse"](await section(log, "reuse", names=names)).splitlines()
    assert "tokens from studio in 0.900 s" in called
    assert f"signed by mini, artifact {artifact_text(ARTIFACT)}" in called


async def test_reuse_from_memory_is_told_without_a_source() -> None:
    log = RequestLog()
    add(log, chat("Hello"), found=reuse(reused_tokens=12_000, created_tokens=662, source="ram", saved_s=-0.25))
    words = RENDERERS["reuse"](await section(log, "reuse")).splitlines()
    assert words == [
        "12,000 of 12,950 tokens from RAM, 0.250 s slower than computing them",
        "662 tokens newly kept for prompts to come",
    ]


async def test_why_nothing_was_reused_is_told_with_each_rejected_artifact() -> None:
    log = RequestLog()
    rejected = Rejected(ARTIFACT, "untrusted-publisher", "its publisher is not trusted")
    add(log, chat("Hello"), found=reuse(reasons=("no peer had more",), rejected=(rejected,)))
    assert RENDERERS["reuse"](await section(log, "reuse")).splitlines() == [
        "0 of 12,950 tokens reused",
        "why not more: no peer had more",
        f"not used: {artifact_text(ARTIFACT)}: its publisher is not trusted (untrusted-publisher)",
    ]


async def test_a_request_is_compared_with_the_most_similar_one_before_it() -> None:
    log = RequestLog()
    add(log, chat("Of cats"))
    similar = add(log, chat("Of dogs and wolves", "They howl."))
    add(log, chat("Of birds"))
    add(log, chat("Of dogs and wolves", "They howl.", "When?"), model="other")
    last = add(log, chat("Of dogs and wolves", "They bark.", "Why?"))
    report = msgspec.convert(await section(log, "prompt"), r.ExplainedPrompt).report
    assert report is not None
    assert (report.request, report.against) == (last.id, similar.id)
    assert report.section == "messages[2] (assistant)"
    assert report.later is not None
    assert (report.later.path, report.later.offset) == ("messages[2].content", 5)
    assert sum(each.size for each in report.sections) == report.size
    assert sum(each.shared for each in report.sections) == report.common


async def test_a_context_and_its_model_are_compared_with_each_other() -> None:
    log = RequestLog()
    first = add(log, chat("Hello"), model="tiny#book")
    add(log, chat("Hello"), model="tiny")
    report = msgspec.convert(await section(log, "prompt"), r.ExplainedPrompt).report
    assert report is not None
    assert (report.against, report.share) == (first.id, 1.0)


async def test_what_was_taken_out_and_what_varies_are_told() -> None:
    log = RequestLog()
    removed = (Removed("billing line", 81, "system"),)
    add(log, chat("Hello", system="Session id: 8f3a2b91cc"), removed=removed)
    add(log, chat("Hello", system="Session id: 77d0aa13ef"), removed=removed)
    report = msgspec.convert(await section(log, "prompt"), r.ExplainedPrompt).report
    assert report is not None
    assert [(each.killer, each.certain, each.removed) for each in report.killers] == [
        ("request-id", True, False),
        ("billing-line", True, True),
    ]


async def test_the_first_request_has_nothing_to_be_compared_with() -> None:
    log = RequestLog()
    add(log, chat("Hello", system="Today is Monday."))
    words = RENDERERS["prompt"](await section(log, "prompt"))
    assert "no earlier request of this model to compare with" in words
    assert "date-at-top" in words


async def test_of_a_private_request_no_prompt_is_told() -> None:
    log = RequestLog()
    add(log, chat("My secret"), private=True)
    result = await explained(log, r.ExplainRequest(), nothing_loaded)
    assert "private" in result.sections["prompt"]["note"]
    assert "secret" not in msgspec.json.encode(result).decode()


async def test_a_failed_request_says_what_the_client_was_told() -> None:
    log = RequestLog()
    request = log.begin(time_s=1.0, path="/v1/messages", model="tiny")
    request.failure = ApiFailure(400, "invalid_request_error", "expected messages, found none")
    result = await explained(log, r.ExplainRequest(), nothing_loaded)
    assert (result.state, result.failure) == ("failed", "400: expected messages, found none")
    words = render(result)
    assert "failed 400: expected messages, found none" in words
    assert "its answer did not begin" in words
    assert "its prompt was not ready" in words


async def test_a_request_is_found_by_how_its_id_begins() -> None:
    log = RequestLog()
    first = add(log, chat("Hello"))
    add(log, chat("Hello again"))
    result = await explained(log, r.ExplainRequest(first.id), nothing_loaded)
    assert (result.request, list(result.sections), result.state) == (first.id, list(SECTIONS), "answered")
    assert (result.ttft_s, result.total_s) == (1.25, 2.5)
    assert "after 1.2 s, all after 2.5 s" in render(result)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (r.ExplainRequest("req-none"), "none or several that begin with 'req-none'"),
        (r.ExplainRequest("req-"), "none or several that begin with 'req-'"),
        (r.ExplainRequest("", ["promt"]), "expected sections out of reuse, plan, link, prompt, found 'promt'"),
    ],
)
async def test_what_cannot_be_explained_is_said(request_: r.ExplainRequest, wanted: str) -> None:
    log = RequestLog()
    add(log, chat("Hello"))
    add(log, chat("Hello"))
    with pytest.raises(UsageError, match=wanted):
        await explained(log, request_, nothing_loaded)


async def test_before_the_first_request_there_is_nothing_to_explain() -> None:
    with pytest.raises(UsageError, match="none since the node started") as caught:
        await explained(RequestLog(), r.ExplainRequest(), nothing_loaded)
    assert "HTTP endpoint" in caught.value.hint


def test_a_section_of_a_newer_node_is_shown_as_its_values() -> None:
    result = r.ExplainResult("req-1", 1.0, "/v1/x", "m", "answered", "", 0.0, 0.0, {"weather": {"rain_s": 0.5}})
    assert "weather\n  rain_s  0.5" in render(result)


def test_control_characters_of_a_prompt_are_not_obeyed_by_the_terminal() -> None:
    place = r.TextPlace("system", "messages[0].\x1b[2J", 0, 1, 1, "a\x1b[31m\nb")
    report = r.PromptReport("req-2", "req-1", 2, 2, 1, 0.5, "\x1b[0m", in_template=False, sections=[], later=place)
    words = RENDERERS["prompt"](msgspec.to_builtins(r.ExplainedPrompt(report)))
    assert "\x1b" not in words
    assert "“a\\x1b[31m\\nb”" in words
