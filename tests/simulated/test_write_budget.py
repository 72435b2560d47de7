"""What whole nodes write of their own accord, and what they leave alone once the day's writes are used up."""

from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.write_budget import WriteBudget, Writing
from kvnet.network.memory import World
from tests.simulated.nodes import NOW_S, identity, start_node
from tests.simulated.test_completion import QUESTION, SYSTEM, converse

PLENTY = 1 << 40


async def test_conversations_are_kept_until_the_days_writes_are_used_up_and_answered_as_ever(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    free = await start_node(world, nursery, tmp_path, "free")
    told = await converse(free, 2, [SYSTEM])
    spent = free.keeper.counters()["kept_bytes"]
    budget = WriteBudget(spent, NOW_S)
    a = await start_node(world, nursery, tmp_path, "a", write_budget=budget)
    talk = [SYSTEM]
    first = await converse(a, 2, talk)
    assert [each.text for each in first] == [each.text for each in told]
    assert budget.left_bytes(NOW_S) < spent
    budget.spend(PLENTY, Writing.FETCHED, NOW_S)
    before = [record.hash for record in a.store.artifacts()]
    later = await converse(a, 2, talk)
    assert all(each.text for each in later)
    assert all(each.reuse.created_tokens == 0 for each in later)
    assert [record.hash for record in a.store.artifacts()] == before
    assert a.keeper.counters()["keep_over_budget"] == 2


async def test_what_a_prompt_fetches_is_taken_from_the_budget_and_never_refused(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    budget = WriteBudget(1000, NOW_S)
    a = await start_node(world, nursery, tmp_path, "a", who=identity("a"))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), write_budget=budget)
    await b.meet(a)
    await a.ask(SYSTEM, QUESTION)
    for _ in range(2):
        told = await b.ask(SYSTEM, QUESTION)
        assert told.reuse.source == "peer"
        assert budget.left_bytes(NOW_S) == 0
        assert budget.state(NOW_S).fetched_bytes >= told.reuse.sources[0].n_bytes
        b.store.collect_garbage(everything=True)
        await b.engine.drop_live()
    assert "kept" not in b.keeper.counters()
