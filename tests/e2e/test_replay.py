"""A recorded agent trace and an agent's session, replayed through the endpoint of two nodes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay import MODES, SMOLLM2_SCALE, Replayed, nodes, replay, settle, table
from benchmarks.replay_trace import Scale, requests, shared, symbols
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet_node.asking import Told, ask
from kvnet_node.demonstration import Side, demo_model
from tests.mlx.tinymodels import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

SCALE = Scale(blocks=16, characters=64)
"""A byte is a token of the tiny model: prompts of 734 to 2,454 tokens."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def replays(tiny: Path) -> dict[str, Replayed]:
    wanted = requests(SCALE)
    return {mode: replay(tiny, wanted, mode) for mode in MODES}


def test_a_swarm_saves_more_than_own_caches_and_those_more_than_none(replays: dict[str, Replayed]) -> None:
    none, own, swarm = (replays[mode].reused_tokens for mode in MODES)
    assert none == 0
    assert swarm > own > 0
    assert replays["swarm"].by_source().get("peer", 0) > 0
    assert replays["own cache"].by_source().keys() <= {"ram", "disk"}
    assert len({replays[mode].prompt_tokens for mode in MODES}) == 1


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("mode", ["own cache", "swarm"])
def test_hits_are_what_the_shared_blocks_of_the_trace_predict(replays: dict[str, Replayed], mode: str) -> None:
    wanted = requests(SCALE)
    at_all, here = (shared(wanted, across_nodes=across) for across in (mode == "swarm", False))
    from_peers: list[bool] = []
    for number, (sent, (anywhere, size), (own, _)) in enumerate(zip(replays[mode].sent, at_all, here, strict=True)):
        assert sent.prompt_tokens == size
        most, own_most = min(anywhere, size - 1), min(own, size - 1)
        # Live caches continue anywhere, what is stored in whole blocks only; for less than a block nobody is asked.
        assert whole_blocks(own_most) <= sent.reused_tokens <= most, f"request {number}: {sent}"
        if whole_blocks(most) - own_most >= BLOCK_TOKENS:
            from_peers.append(sent.reused_tokens >= whole_blocks(most))
    # Peers have a quarter of a second to answer for so small a model, which a busy machine may miss once in a while.
    assert sum(from_peers) >= len(from_peers) / 2, from_peers
    assert bool(from_peers) == (mode == "swarm")


def test_the_table_shows_each_way_beside_the_others(replays: dict[str, Replayed]) -> None:
    text = table([replays[mode] for mode in MODES], requests(SCALE))
    assert [line.split("  ")[0].strip() for line in text.splitlines()[1:]] == list(MODES)
    assert "peer" in text.splitlines()[-1]


RULES = "".join(f"Rule {n}: look at file {n * 7919 % 1000} before you change it.\n" for n in range(24))
SESSIONS = 3
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {"type": "object"}}}
    for name in ("read", "write", "search")
]


def body(model: Path, session: int, number: int, history: list[dict[str, str]]) -> dict[str, Any]:
    """A turn of an agent: a billing line that varies, rules, tools, and a history that grows."""
    line = (
        f"x-anthropic-billing-header: cc_version=2.1.39.{number}c; cc_entrypoint=cli; cch={number * 7919 % 99991:05};"
    )
    system = f"{line}\nThis is session {session}.\n{RULES}"
    messages = [{"role": "system", "content": system}, *history]
    return {"model": str(model), "messages": messages, "tools": TOOLS, "max_tokens": 8}


def turns(side: Side, model: Path, session: int, history: list[dict[str, str]], numbers: range) -> list[Told]:
    told = []
    for number in numbers:
        history.append({"role": "user", "content": f"Step {number}: " + "look at the next line " * (5 + number)})
        told.append(ask(side.endpoint, body(model, session, number, history)))
        history.append({"role": "assistant", "content": told[-1].text})
    return told


def test_an_agents_session_hits_what_it_repeats_and_goes_on_at_the_second_node(tiny: Path) -> None:
    with nodes(tiny, paired=True) as (first, second):
        # For so small a model a peer has a quarter of a second to answer, which a busy machine may miss: then the
        # second node computes, and has that session itself from there on. So another session is tried.
        for session in range(SESSIONS):
            history: list[dict[str, str]] = []
            on_first = turns(first, tiny, session, history, range(5))
            settle(first, 5 * (session + 1))
            (on_second,) = turns(second, tiny, session, history, range(5, 6))
            # Each prompt begins with all of the one before it but the marks that begin the answer.
            opening = len(symbols(())) - 1
            repeated = sum(before.prompt_tokens - opening for before, _ in pairwise(on_first))
            assert sum(each.reused_tokens for each in on_first) >= 0.95 * repeated
            assert {each.source for each in on_first[1:]} == {"ram"}
            if on_second.source == "peer":
                break
        assert on_second.source == "peer"
        assert on_second.reused_tokens >= on_first[-1].prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.nightly
def test_smollm2_saves_more_in_a_swarm_too() -> None:
    wanted = requests(SMOLLM2_SCALE)
    model = demo_model(lambda _: None)
    none, own, swarm = (replay(model, wanted, mode) for mode in MODES)
    assert swarm.reused_tokens > own.reused_tokens > none.reused_tokens == 0
    assert swarm.ttft_s(0.5) < none.ttft_s(0.5)
