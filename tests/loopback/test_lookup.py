"""Lookups among real nodes: the longest prefix, by about one query; and a node that moves to another port."""

import os
import statistics

import pytest
import trio

from benchmarks.lookup import GOAL, Measured, measure, report
from benchmarks.lookup_swarm import Texts, query_of, running, until

PATIENCE_S = 120.0


def check(measured: Measured, n_prompts: int) -> None:
    said = report(measured)
    assert measured.right == n_prompts, said
    assert measured.rounds <= 2, said
    assert 0 < measured.dht_queries <= 14, said
    assert statistics.median(measured.asked) <= 1, said


async def test_eight_nodes_find_the_longest_prefix_with_about_one_query() -> None:
    check(await measure(8, 40), 40)


@pytest.mark.nightly
async def test_twenty_nodes_find_the_longest_prefix_of_two_hundred_prompts() -> None:
    measured = await measure(20, 200)
    check(measured, 200)
    # Only at night: what takes milliseconds cannot be timed while another test runs.
    assert measured.echoes <= GOAL, report(measured)


async def test_a_node_that_comes_back_on_another_port_with_less_is_found_and_its_old_claims_are_gone() -> None:
    texts, seed = Texts(7), os.urandom(32)
    first, second = texts.artifact(), texts.artifact()
    async with running() as hub, running(bootstrap=hub.node.addresses()) as asker:
        async with running(seed=seed, bootstrap=hub.node.addresses()) as provider:
            provider.add(first)
            provider.add(second)
            where = provider.node.addresses()
            await until(lambda: len(asker.tables.claims(query_of(first))) == 1, PATIENCE_S)
            await until(lambda: len(asker.node.sessions()) == 2, PATIENCE_S)
        await until(lambda: len(asker.node.sessions()) == 1, PATIENCE_S)
        async with running(seed=seed, bootstrap=hub.node.addresses()) as provider:
            assert provider.node.addresses() != where
            provider.add(second)
            await until(lambda: len(asker.node.sessions()) == 2, PATIENCE_S)
            await until(lambda: asker.tables.claims(query_of(first)) == [], PATIENCE_S)
            lookups = asker.node.finder.lookups
            found = await lookups.find(query_of(second), 0, trio.current_time() + PATIENCE_S)
            assert found.candidates[0].providers == (provider.node.peer_id,)
            assert found.candidates[0].reusable_tokens == len(second)
