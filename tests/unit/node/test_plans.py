"""``kvnet explain``: the plan of a request and the links, in values and in words."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvnet.engine.completions import Completed
from kvnet.engine.interface import Engine, ModelInfo
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.exchange.answers import Finished, Reuse
from kvnet.exchange.planning import Happened, Missing, PlanReport, Weigher
from kvnet.format.codecs import Codec
from kvnet.protocol.ids import PeerId, peer_text
from kvnet.protocol.speeds import Link, Machine, PrefillSpeed, SpeedPoint
from kvnet_node.api.requests_log import LoggedRequest, RequestLog
from kvnet_node.calling import Names
from kvnet_node.commands.explain import RENDERERS
from kvnet_node.operations import requests as r
from kvnet_node.operations.explain import explained
from kvnet_node.operations.plans import LinkFacts, PeerFacts, verdict
from tests.unit.node.test_explain import nothing_loaded, reuse

PEER = PeerId(b"\x00\x24\x08\x01\x12\x20" + bytes(32))
MACHINE = Machine(PrefillSpeed([SpeedPoint(0, 500.0)]), 1e9, 0.01, {Codec.SHUFFLE_ZSTD1: 1e9})
MB = 1e6


@asynccontextmanager
async def toy(model: str) -> AsyncIterator[Engine | None]:
    yield ToyEngine(Path(model), ToyCosts(), 1 << 20, 1 << 40)


def weighed(bytes_s: float, happened: Happened | None = None) -> PlanReport:
    """Of a prompt of 1,100 tokens, of which a peer has 1,024 in blocks of 12 MB."""
    weigher = Weigher(MACHINE, 1100, 0, 0, 46_080)
    missing = Missing({index: (index, 256 * 46_080) for index in range(4)}, {})
    report = weigher.weigh(weigher.offer(Link(PEER, 0.002, bytes_s), 1024, missing))
    return PlanReport(report.plan, report.alternatives, report.words, report.bytes_s, happened)


def finish(log: RequestLog, found: Reuse) -> LoggedRequest:
    request = log.begin(time_s=1.0, path="/v1/chat/completions", model="tiny")
    log.reused(request, found)
    log.finish(request, Finished(Completed((1,), "stop", 0, 0.1, 1, 0.25, 0.1), found, ttft_s=0.75, total_s=2.5))
    return request


async def section(
    log: RequestLog, name: str, facts: LinkFacts | None = None, names: Names | None = None
) -> tuple[dict[str, Any], str]:
    def links(info: ModelInfo | None) -> LinkFacts:
        assert info is None or info.name == "tiny"
        return facts or LinkFacts(peers=(PeerFacts(PEER, 0.004),))

    loaded = toy if facts is not None else nothing_loaded
    result = await explained(log, r.ExplainRequest("", [name]), loaded, links, names)
    return result.sections[name], RENDERERS[name](result.sections[name])


async def test_a_plan_that_fetches_is_told_step_by_step_with_what_each_took() -> None:
    log = RequestLog()
    report = weighed(200 * MB, Happened(1024, 47_000_000, 0.3, ended_early=False))
    finish(log, reuse(prompt_tokens=1100, reused_tokens=1024, restore_s=0.05, sources=(object(),), plan=report))
    values, words = await section(log, "plan")
    plan = values
    assert [(step["kind"], step["end_token"]) for step in plan["steps"]] == [
        ("fetch", 1024), ("restore", 1024), ("compute", 1100),
    ]  # fmt: skip
    assert [step["took_s"] for step in plan["steps"]] == [0.3, 0.05, 0.25]
    assert (plan["expected_bytes_s"], plan["fetched_bytes"], plan["fetched_tokens"]) == (200 * MB, 47_000_000, 1024)
    lines = words.splitlines()
    assert lines[0].startswith("fetching 1,024 tokens at 200 MB/s was expected to pay: ")
    assert lines[1].startswith(
        f"fetch 1,024 tokens (47.2 MB) from peer {peer_text(PEER)}: 0.238 s expected, took 0.300"
    )
    assert lines[3] == "compute tokens 1,024 to 1,100: 0.152 s expected, took 0.250 s"
    assert lines[4].endswith("took 0.750 s, looking included")
    assert "fetched: 47.0 MB came, 1,024 tokens could be used" in lines
    assert lines[-1] == "instead, 2.2 s: compute tokens 0 to 1,100"
    _, called = await section(log, "plan", names=Names({PEER: "studio"}))
    assert "fetch 1,024 tokens (47.2 MB) from studio: " in called


async def test_a_plan_that_computes_says_why_and_what_fetching_would_have_taken() -> None:
    log = RequestLog()
    finish(log, reuse(prompt_tokens=1100, plan=weighed(1 * MB)))
    values, words = await section(log, "plan")
    assert [step["kind"] for step in values["steps"]] == ["compute"]
    assert words.splitlines()[0].startswith(
        "computing was expected to be sooner than fetching: 2.20 s, against 47.40 s with 1,024 tokens from a peer"
    )
    assert words.splitlines()[-1].startswith("instead, 47")


async def test_a_fetch_that_was_ended_early_says_so() -> None:
    log = RequestLog()
    report = weighed(math.inf, Happened(256, 12_000_000, 0.9, ended_early=True))
    finish(log, reuse(prompt_tokens=1100, reused_tokens=256, plan=report))
    values, words = await section(log, "plan")
    assert values["expected_bytes_s"] is None
    assert values["ended_early"]
    assert "256 tokens could be used; it was ended early, as computing the rest had become sooner" in words


async def test_where_nothing_was_weighed_it_is_said_why() -> None:
    log = RequestLog()
    log.begin(time_s=1.0, path="/v1/chat/completions", model="tiny")
    assert "did not begin" in (await section(log, "plan"))[1]
    finish(log, reuse())
    assert "kvnet bench calibrate" in (await section(log, "plan"))[1]


async def test_links_are_told_with_the_rate_that_each_position_and_codec_takes() -> None:
    log = RequestLog()
    finish(log, reuse(prompt_tokens=1100))
    peers = (PeerFacts(PEER, 0.004, 2 * MB, 2 * MB), PeerFacts(PEER))
    shares = (("raw", 1.0), ("shuffle+zstd-1", 0.8))
    values, words = await section(log, "link", LinkFacts(MACHINE, "calibrated 2026-01-02", shares, peers))
    assert values["position"] == 1100
    at = {(each["position"], each["codec"]): each["bytes_s"] for each in values["break_even"]}
    assert at[1100, "raw"] == pytest.approx(256 * 500, rel=0.01)
    assert at[0, "shuffle+zstd-1"] == pytest.approx(0.8 * 256 * 500, rel=0.01)
    assert [peer["rtt_s"] for peer in values["peers"]] == [0.004, None]
    assert words.splitlines()[0] == "this machine: calibrated 2026-01-02"
    assert "4.0 ms" in words
    assert "fetching pays: 15.6 times the 128 kB/s needed" in words
    assert "not measured yet: the next fetch finds out" in words


async def test_links_of_a_machine_that_was_not_measured_are_told_with_what_measures_it() -> None:
    log = RequestLog()
    finish(log, reuse(prompt_tokens=1100))
    values, words = await section(log, "link", LinkFacts(peers=(PeerFacts(PEER, 0.004),)))
    assert values["break_even"] == []
    assert words.splitlines()[0].endswith("kvnet bench calibrate")
    assert peer_text(PEER) in words
    called = (await section(log, "link", LinkFacts(peers=(PeerFacts(PEER),)), Names({PEER: "studio"})))[1]
    assert ("studio" in called, peer_text(PEER) in called) == (True, False)
    assert "no peer is connected" in (await section(log, "link", LinkFacts()))[1]


async def test_links_of_a_model_that_is_not_in_memory_are_told_as_far_as_they_are_known() -> None:
    log = RequestLog()
    finish(log, reuse(prompt_tokens=1100))
    words = (await section(log, "link"))[1]
    assert "not in memory" in words
    assert peer_text(PEER) in words
    assert "no peer is connected" not in words


async def test_a_request_that_was_refused_needed_no_link() -> None:
    log = RequestLog()
    log.begin(time_s=1.0, path="/v1/chat/completions", model="no-such-model")
    words = (await section(log, "link"))[1]
    assert words.startswith("its answer did not begin")
    assert "in memory" not in words
    assert peer_text(PEER) in words


@pytest.mark.parametrize(
    ("expected_bytes_s", "rates", "words"),
    [
        (1 * MB, [None], "computing is sooner on any link"),
        (1 * MB, [4 * MB, 2 * MB], "computing is sooner: 1.00 MB/s of the 2.00 MB/s needed at token 512"),
        (3 * MB, [4 * MB, 2 * MB], "fetching pays in codec q8 only: 1.5 times the 2.00 MB/s needed"),
        (8 * MB, [4 * MB, 2 * MB], "fetching pays: 2.0 times the 4.00 MB/s needed"),
        (8 * MB, [None, 2 * MB], "fetching pays in codec q8 only: 4.0 times the 2.00 MB/s needed"),
    ],
)
def test_a_verdict_names_what_the_link_carries_and_what_is_needed(
    expected_bytes_s: float, rates: list[float | None], words: str
) -> None:
    needed = [r.BreakEven(512, codec, rate) for codec, rate in zip(("raw", "q8"), rates, strict=False)]
    assert verdict(PeerFacts(PEER, 0.001, 1.0, expected_bytes_s), needed) == words
