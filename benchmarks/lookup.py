"""How long a lookup takes among real nodes, beside one echo on the same streams, and whether it finds the longest.

``python -m benchmarks.lookup --nodes 20`` runs that many nodes in one process on loopback, connected to each other. The
first of them looks up what the others hold. An echo is the smallest request of the control session and its answer.
"""

import argparse
import logging
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import trio

from benchmarks.lookup_swarm import NAMESPACE, ROOT, Member, Texts, longest, query_of, running, until
from benchmarks.report import machine
from kvnet.exchange.lookups import LookedUp
from kvnet.format.prefix import block_keys
from kvnet.protocol.lookup import LookupQuery
from kvnet.protocol.messages.statements import Tell

GOAL = 3.0
"""A lookup takes at most so many echoes."""

DEADLINE_S = 3.0
MESH_S = 120.0
"""Seconds that 20 nodes may take to connect each to each: about 30 s of processor time."""

N_UNKNOWN = 5
"""Prompts that nobody has anything of: those cost DHT queries."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        nodes: how many.
        artifacts: held by all but the one that asks.
        echo_s: seconds of each echo.
        lookup_s: seconds of each lookup, the keys of the prompt included.
        all_asked_s: seconds of each lookup that asks every member, as without tables.
        right: lookups that found the longest prefix there is.
        asked: peers asked by each lookup.
        rounds: most rounds of any lookup.
        dht_queries: most DHT queries of any lookup.
    """

    nodes: int
    artifacts: int
    echo_s: tuple[float, ...]
    lookup_s: tuple[float, ...]
    all_asked_s: tuple[float, ...]
    right: int
    asked: tuple[int, ...]
    rounds: int
    dht_queries: int

    @property
    def echoes(self) -> float:
        """The median lookup in echoes."""
        return statistics.median(self.lookup_s) / statistics.median(self.echo_s)


async def measure(n_nodes: int, n_prompts: int, *, artifacts_each: int = 8, seed: int = 1) -> Measured:
    """Run a swarm and look prompts up in it.

    Args:
        n_nodes: of the swarm.
        n_prompts: to look up, each once.
        artifacts_each: held by each node but the first.
        seed: of the texts.
    """
    texts = Texts(seed)
    async with AsyncExitStack() as stack:
        asker, *others = await _swarm(stack, n_nodes)
        for other in others:
            for _ in range(artifacts_each):
                other.add(texts.artifact())
        held = [tokens for other in others for tokens in other.artifacts]
        await until(lambda: _told(asker) == len(held), 200.0, lambda: f"told of {_told(asker)} of {len(held)}")
        keys = [set(block_keys(ROOT, tokens)) for tokens in held]
        echo_s, lookup_s, all_asked_s, found = [], [], [], []
        right = 0
        for _ in range(n_prompts):
            tokens = texts.prompt(held)
            expected = longest(query_of(tokens), keys)
            echo_s.append(await _echo(asker))
            seconds, looked_up = await _look_up(asker, tokens)
            lookup_s.append(seconds)
            found.append(looked_up)
            right += _best(looked_up) == expected
            all_asked_s.append(await _ask_all(asker, query_of(tokens)))
        asked = tuple(len(each.asked) for each in found)
        for _ in range(N_UNKNOWN):
            _, looked_up = await _look_up(asker, texts.unknown())
            found.append(looked_up)
        return Measured(
            n_nodes,
            len(held),
            tuple(echo_s),
            tuple(lookup_s),
            tuple(all_asked_s),
            right,
            asked,
            max(each.rounds for each in found),
            max(each.dht_queries for each in found),
        )


async def _swarm(stack: AsyncExitStack, n_nodes: int) -> list[Member]:
    """Nodes that find each other through the first, which has a session with each; the others get as far as they do."""
    first = await stack.enter_async_context(running())
    bootstrap = first.node.addresses()
    members = [first]
    for number in range(1, n_nodes):
        # One after the other: all at once they keep each other busy with handshakes until those time out.
        members += [await stack.enter_async_context(running(bootstrap=bootstrap))]
        await until(partial(_met, first, number), 60.0)
    with trio.move_on_after(MESH_S):
        await until(lambda: all(len(each.node.sessions()) >= n_nodes - 1 for each in members), math.inf)
    return members


def _met(node: Member, n_others: int) -> bool:
    return len(node.node.sessions()) >= n_others


def _told(asker: Member) -> int:
    return sum(member.n_artifacts for member in asker.tables.members().values())


def _best(found: LookedUp) -> int:
    return found.candidates[0].reusable_tokens if found.candidates else 0


async def _echo(asker: Member) -> float:
    session = asker.node.sessions()[0]
    began = time.perf_counter()
    await session.ask(Tell(request_id=0, slot=session.slots[NAMESPACE], statements=()))
    return time.perf_counter() - began


async def _look_up(asker: Member, tokens: Sequence[int]) -> tuple[float, LookedUp]:
    began = time.perf_counter()
    query = query_of(tokens)
    found = await asker.node.finder.lookups.find(query, 0, trio.current_time() + DEADLINE_S)
    return time.perf_counter() - began, found


async def _ask_all(asker: Member, query: LookupQuery) -> float:
    lookups = asker.node.finder.lookups
    tables, lookups.tables = lookups.tables, None
    try:
        began = time.perf_counter()
        await lookups.find(query, 0, trio.current_time() + DEADLINE_S, dht=False)
        return time.perf_counter() - began
    finally:
        lookups.tables = tables


def report(measured: Measured) -> str:
    """What to print."""
    echo, lookup, every = (
        [1000 * each for each in (statistics.median(row), statistics.quantiles(row, n=20)[-1])]
        for row in (measured.echo_s, measured.lookup_s, measured.all_asked_s)
    )
    n_prompts, asked = len(measured.lookup_s), statistics.mean(measured.asked)
    return (
        f"\n{measured.nodes} nodes, {measured.artifacts} artifacts, {n_prompts} prompts; p50 and p95 in ms\n"
        f"  one echo                      {echo[0]:7.2f} {echo[1]:7.2f}\n"
        f"  lookup by the tables          {lookup[0]:7.2f} {lookup[1]:7.2f}  {measured.echoes:5.2f} echoes\n"
        f"  lookup that asks all members  {every[0]:7.2f} {every[1]:7.2f}  {every[0] / echo[0]:5.2f} echoes\n"
        f"  longest prefix right          {measured.right} of {n_prompts}\n"
        f"  peers asked                   {asked:.2f} on average, {max(measured.asked)} at most\n"
        f"  rounds                        {measured.rounds} at most\n"
        f"  DHT queries                   {measured.dht_queries} at most, for prompts that nobody has"
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Measure and print; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description="Lookups among real nodes on loopback")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=200)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    measured = trio.run(measure, options.nodes, options.prompts)
    print(report(measured))
    met = measured.echoes <= GOAL and measured.right == options.prompts
    return 0 if met and measured.rounds <= 2 and measured.dht_queries <= 14 else 1


if __name__ == "__main__":
    import sys

    print(machine())
    raise SystemExit(main(sys.argv[1:]))
