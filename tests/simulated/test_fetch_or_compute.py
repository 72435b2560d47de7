"""Fetch or compute, on whole nodes: a link that cannot win costs nothing, and one that stops winning not much."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.toy import ToyCosts
from kvnet.exchange.planning import LEAST_STORED_SHARE
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from tests.simulated.nodes import Node, Told, identity, start_node

PREFILL_S = 0.002
"""Seconds a token: 500 tokens a second, and 256 bytes of K/V a token: the break-even rate is 128 kB/s."""

BREAK_EVEN_BYTES_S = 256 / PREFILL_S
MACHINE = Machine(PrefillSpeed([SpeedPoint(0, 1 / PREFILL_S)]), restore_bytes_s=1e9)
OPENING_TOKENS = 7
"""What all prompts begin with."""

FAST = Link(latency_s=0.005, rate_bytes_per_s=100 * BREAK_EVEN_BYTES_S)


def talk(subject: str) -> tuple[str, str]:
    """About 5,400 tokens, which take 11 s to compute."""
    return "user", "".join(f"{subject} {n}: and the keeper wrote down number {n * 7919 % 1000}. " for n in range(110))


async def pair(world: World, nursery: trio.Nursery, directory: Path) -> tuple[Node, Node]:
    """Two connected nodes; the second knows what it does with the model."""
    costs = ToyCosts(prefill_s_per_token=PREFILL_S)
    a = await start_node(world, nursery, directory, "a", costs=costs)
    b = await start_node(world, nursery, directory, "b", who=identity("b", trusts=["a"]), costs=costs)
    world.set_link(a.network, b.network, FAST)
    await b.meet(a)
    b.speeds.known, b.speeds.tokens_s = MACHINE, 1 / PREFILL_S
    return a, b


async def plain(node: Node, *messages: tuple[str, str]) -> Told:
    """The same without looking for anything, and without leaving anything behind."""
    return await node.ask_now(*messages, reuse=False, private=True)


async def learn_the_link(world: World, a: Node, b: Node, link: Link) -> None:
    """Have b fetch something from a over a link, so that it knows what that does."""
    world.set_link(a.network, b.network, link)
    await a.ask(talk("other"))
    await b.ask(talk("other"))
    await b.engine.drop_live()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
async def test_where_fetching_loses_the_node_computes_says_so_and_loses_no_time(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, share: float
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=share * BREAK_EVEN_BYTES_S))
    sent = a.exchange.counters()
    alone = await plain(b, talk("tide"))
    told = await b.ask_now(talk("tide"))
    assert told.text == alone.text
    assert told.reuse.source != "peer"
    assert told.reuse.reused_tokens <= OPENING_TOKENS
    assert told.finished.ttft_s - alone.finished.ttft_s < max(0.020, 0.02 * alone.finished.ttft_s)
    assert told.reuse.plan is not None
    assert told.reuse.plan.plan.fetch is None
    assert told.reuse.plan.plan.seconds == pytest.approx(alone.finished.ttft_s, rel=0.02)
    assert any("than it is computed" in reason or "computing was expected" in reason for reason in told.reuse.reasons)
    # Where nothing at all could come in time, not even a lookup is sent.
    asked = {name for name, count in a.exchange.counters().items() if count != sent.get(name, 0)}
    assert asked <= ({"requests_Lookup"} if share > LEAST_STORED_SHARE else set())


async def test_where_fetching_wins_the_plan_and_what_came_of_it_are_recorded(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    alone = await plain(b, talk("tide"))
    told = await b.ask_now(talk("tide"))
    assert (told.text, told.reuse.source) == (alone.text, "peer")
    report = told.reuse.plan
    assert report is not None
    fetch, happened = report.plan.fetch, report.happened
    assert fetch is not None
    assert happened is not None
    assert fetch.peer == a.network.peer_id
    assert happened.n_tokens == fetch.n_tokens == told.reuse.reused_tokens
    assert happened.n_bytes >= fetch.n_bytes > 0
    assert not happened.ended_early
    assert report.alternatives[-1].prefilled_tokens == told.reuse.prompt_tokens
    assert told.finished.ttft_s < 0.2 * alone.finished.ttft_s


async def test_the_prediction_of_a_link_that_is_known_holds(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=4 * BREAK_EVEN_BYTES_S))
    told = await b.ask_now(talk("tide"))
    report = told.reuse.plan
    assert report is not None
    assert report.happened is not None
    fetch = report.plan.fetch
    assert fetch is not None
    assert report.bytes_s == pytest.approx(4 * BREAK_EVEN_BYTES_S, rel=0.1)
    assert report.happened.seconds == pytest.approx(fetch.seconds, rel=0.15)


async def test_a_link_that_drops_to_a_tenth_in_mid_fetch_costs_little_and_what_came_is_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    rate = 4 * BREAK_EVEN_BYTES_S
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=rate))
    alone = await plain(b, talk("tide"))

    async def slow_down() -> None:
        await trio.sleep(1.2)
        world.set_link(a.network, b.network, Link(latency_s=0.005, rate_bytes_per_s=rate / 10))

    nursery.start_soon(slow_down)
    told = await b.ask_now(talk("tide"))
    assert told.text == alone.text
    assert told.reuse.source == "peer"
    assert BLOCK_TOKENS <= told.reuse.reused_tokens < told.reuse.prompt_tokens - BLOCK_TOKENS
    report = told.reuse.plan
    assert report is not None
    assert report.happened is not None
    assert report.happened.ended_early
    # What came before the drop was worth it; what was waited for after it is bounded.
    assert told.finished.ttft_s < alone.finished.ttft_s + 0.5


async def test_a_link_that_dies_in_mid_fetch_is_not_waited_for_as_long_as_the_prefill_takes(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=4 * BREAK_EVEN_BYTES_S))
    alone = await plain(b, talk("tide"))

    async def hang() -> None:
        await trio.sleep(1.2)
        world.hang(a.network)

    nursery.start_soon(hang)
    told = await b.ask_now(talk("tide"))
    assert told.text == alone.text
    assert 0 < told.reuse.reused_tokens < told.reuse.prompt_tokens - BLOCK_TOKENS
    assert told.finished.ttft_s < alone.finished.ttft_s + 1.0


@pytest.mark.parametrize("share", [0.8, 0.95, 1.05, 1.2])
async def test_near_the_break_even_nothing_is_lost_either_way(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, share: float
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=share * BREAK_EVEN_BYTES_S))
    alone = await plain(b, talk("tide"))
    told = await b.ask_now(talk("tide"))
    assert told.text == alone.text
    assert told.finished.ttft_s < alone.finished.ttft_s + 0.5
    assert share > 1 or told.reuse.reused_tokens <= OPENING_TOKENS


async def test_a_machine_that_nobody_measured_fetches_as_it_did(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    b.speeds.known = None
    await a.ask(talk("tide"))
    told = await b.ask_now(talk("tide"))
    assert told.reuse.source == "peer"
    assert told.reuse.plan is None


async def test_a_link_that_was_slow_is_tried_again_after_some_time(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    await learn_the_link(world, a, b, Link(latency_s=0.005, rate_bytes_per_s=0.2 * BREAK_EVEN_BYTES_S))
    assert (await b.ask_now(talk("tide"))).reuse.source != "peer"
    await b.engine.drop_live()
    await b.keeper.wait_idle()
    assert (await b.ask_now(talk("night"))).reuse.source != "peer"
    world.set_link(a.network, b.network, FAST)
    await a.ask(talk("dawn"))
    await trio.sleep(600)
    assert (await b.ask_now(talk("dawn"))).reuse.source == "peer"


async def test_a_shared_fetch_serves_a_second_request_that_weighs_for_itself(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(talk("tide"))
    world.set_link(a.network, b.network, Link(latency_s=0.005, rate_bytes_per_s=4 * BREAK_EVEN_BYTES_S))
    alone = await plain(b, talk("tide"))
    told: list[Told] = []

    async def ask() -> None:
        told.append(await b.ask_now(talk("tide")))

    async with trio.open_nursery() as both:
        both.start_soon(ask)
        both.start_soon(ask)
    assert {each.text for each in told} == {alone.text}
    assert all(each.reuse.reused_tokens > BLOCK_TOKENS for each in told)
    assert all(each.finished.ttft_s < alone.finished.ttft_s for each in told)
