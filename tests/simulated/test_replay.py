"""A recorded agent trace over two whole nodes: what is reused is what the recorded blocks share."""

from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from benchmarks.replay_trace import Request, Scale, common_length, requests
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.network.memory import World
from kvnet_node.prompts.normalise import BILLING_LINE, normalise
from tests.simulated.nodes import Node, Told, identity, start_node

SCALE = Scale(blocks=16, characters=64)
"""A byte is a token of the toy: prompts of about 700 to 2,500 tokens."""


async def replayed(nodes: tuple[Node, ...], wanted: list[Request], *, reuse: bool = True) -> list[Told]:
    return [await nodes[each.node].ask(*each.messages, reuse=reuse) for each in wanted]


def possible(told: list[Told], wanted: list[Request], *, across_nodes: bool) -> list[int]:
    """Of each prompt, how many tokens an earlier one began with; one token is always computed."""
    prompts = [each.reuse.prepared.tokens for each in told]
    found = []
    for number, (prompt, request) in enumerate(zip(prompts, wanted, strict=True)):
        earlier = (
            common_length(prompt, prompts[before])
            for before in range(number)
            if across_nodes or wanted[before].node == request.node
        )
        found.append(min(max(earlier, default=0), len(prompt) - 1))
    return found


def reused(told: list[Told]) -> int:
    return sum(each.reuse.reused_tokens for each in told)


def check(told: list[Told], expected: list[int]) -> None:
    """Live caches continue at any token; what is stored is found and reused in whole blocks."""
    for number, (each, tokens) in enumerate(zip(told, expected, strict=True)):
        blocks = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        assert blocks <= each.reuse.reused_tokens <= tokens, f"request {number} from {each.reuse.source}"


@pytest.mark.parametrize("seed", range(3))
async def test_a_swarm_reuses_what_the_trace_shares_and_more_than_each_nodes_own_cache(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, seed: int
) -> None:
    wanted = requests(SCALE, seed=seed)
    a = await start_node(world, nursery, tmp_path, "a", who=identity("a", trusts=["b"]))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await b.meet(a)
    swarm = await replayed((a, b), wanted)
    check(swarm, possible(swarm, wanted, across_nodes=True))
    alone = tuple([await start_node(world, nursery, tmp_path, name, alone=True) for name in ("c", "d")])
    own = await replayed(alone, wanted)
    check(own, possible(own, wanted, across_nodes=False))
    assert reused(swarm) > reused(own) > 0
    assert {each.reuse.source for each in own} == {"none", "ram"}
    assert {"peer", "ram"} <= {each.reuse.source for each in swarm}
    assert [each.text for each in swarm] == [each.text for each in own]


async def test_without_reuse_the_same_trace_saves_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    alone = tuple([await start_node(world, nursery, tmp_path, name, alone=True) for name in ("c", "d")])
    assert reused(await replayed(alone, requests(SCALE)[:10], reuse=False)) == 0


RULES = "".join(f"Rule {n}: look at file {n * 7919 % 1000} before you change it.\n" for n in range(60))


def turn(number: int, history: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A turn as an agent sends it, after the node has taken out what varies at its head."""
    line = (
        f"x-anthropic-billing-header: cc_version=2.1.39.{number}c; cc_entrypoint=cli; cch={number * 7919 % 99991:05};"
    )
    messages = [{"role": role, "content": text} for role, text in (("system", f"{line}\n{RULES}"), *history)]
    normalised = normalise({"messages": messages})
    assert [each.kind for each in normalised.removed] == [BILLING_LINE]
    return [(each["role"], each["content"]) for each in normalised.body["messages"]]


async def session(node: Node, history: list[tuple[str, str]], numbers: range) -> list[Told]:
    told = []
    for number in numbers:
        history.append(("user", f"Step {number}: " + "and look at the next of these lines " * (5 + number)))
        told.append(await node.ask(*turn(number, history)))
        history.append(("assistant", told[-1].text))
    return told


async def test_an_agents_session_hits_what_it_repeats_and_goes_on_at_the_second_node(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", who=identity("a", trusts=["b"]))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await b.meet(a)
    history: list[tuple[str, str]] = []
    on_a = await session(a, history, range(5))
    repeated = sum(
        common_length(now.reuse.prepared.tokens, before.reuse.prepared.tokens) for before, now in pairwise(on_a)
    )
    assert reused(on_a) >= 0.95 * repeated > 0
    (on_b,) = await session(b, history, range(5, 6))
    held = on_a[-1].finished.completed.held_tokens
    assert on_b.reuse.source == "peer"
    assert on_b.reuse.reused_tokens == held // BLOCK_TOKENS * BLOCK_TOKENS
