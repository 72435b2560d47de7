"""Completions on whole nodes: what a conversation reuses from RAM, disk and peers, and what is kept of it."""

import errno
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.prompts import PromptKind
from kvnet.engine.toy import ToyCosts
from kvnet.errors import BusyError, EngineCrashedError, PromptError, WindowError
from kvnet.exchange.answers import Asked, Body, Finished
from kvnet.exchange.completion import Completer
from kvnet.exchange.keeping import ToKeep
from kvnet.exchange.prefix_reuse import PrefixReuse
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from tests.simulated.nodes import OTHER, Node, Told, identity, start_node
from tests.simulated.talking import body
from tests.simulated.test_failing_disk import FaultyFiles

SYSTEM = ("system", "".join(f"Rule {n}: be brief about {n * 7919 % 1000}. " for n in range(60)))
QUESTION = ("user", "What now?")


async def pair(world: World, nursery: trio.Nursery, directory: Path) -> tuple[Node, Node]:
    """Two connected nodes that trust each other."""
    a = await start_node(world, nursery, directory, "a", who=identity("a", trusts=["b"]))
    b = await start_node(world, nursery, directory, "b", who=identity("b", trusts=["a"]))
    await b.meet(a)
    return a, b


async def converse(node: Node, turns: int, talk: list[tuple[str, str]]) -> list[Told]:
    """Ask and add the answers to the talk."""
    told = []
    for _ in range(turns):
        talk.append(("user", f"question {len(talk)}: " + "and further " * 25))
        told.append(await node.ask(*talk))
        talk.append(("assistant", told[-1].text))
    return told


async def cold(node: Node, *messages: tuple[str, str]) -> str:
    return (await node.ask_now(*messages, reuse=False, private=True)).text


async def test_the_same_request_twice_comes_from_ram_and_says_so(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", costs=ToyCosts(prefill_s_per_token=0.001))
    a.speeds.tokens_s = 1000.0
    first = await a.ask(SYSTEM, QUESTION)
    prompt = first.reuse.prompt_tokens
    assert (first.reuse.source, first.reuse.reused_tokens, first.reuse.saved_s) == ("none", 0, 0.0)
    assert first.reuse.created_tokens == prompt // BLOCK_TOKENS * BLOCK_TOKENS
    assert first.reuse.reasons
    again = await a.ask(SYSTEM, QUESTION)
    assert again.text == first.text
    assert (again.reuse.source, again.reuse.reused_tokens, again.reuse.sources) == ("ram", prompt - 1, ())
    assert again.reuse.reasons == ()
    assert again.reuse.created_tokens == 0
    assert again.reuse.saved_s == pytest.approx((prompt - 1) / 1000, abs=0.01)
    assert again.finished.ttft_s < first.finished.ttft_s
    assert [tokens for tokens, _ in a.speeds.noted] == [prompt, 1]
    assert [each.reuse.source for each in a.used] == ["none", "ram"]


async def test_what_ram_has_lost_comes_back_from_disk(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    first = await a.ask(SYSTEM, QUESTION)
    await a.engine.drop_live()
    again = await a.ask(SYSTEM, QUESTION)
    assert again.text == first.text
    assert again.reuse.source == "disk"
    assert again.reuse.reused_tokens == first.reuse.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.reuse.sources[0].signer == a.identity.key.public
    assert "this node is on no network: no peer was asked" in again.reuse.reasons


async def test_a_prompt_that_begins_like_a_stored_one_for_a_few_tokens_is_computed(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    await a.ask(SYSTEM, QUESTION)
    await a.engine.drop_live()
    other = ("system", f"Another text. {SYSTEM[1]}")
    told = await a.ask_now(other, QUESTION)
    # The template begins both, which is worth reading no chunk; a short prompt of which it is much is another matter.
    assert (told.reuse.source, told.reuse.reused_tokens) == ("none", 0)
    short = await a.ask_now(("system", SYSTEM[1][:100]), QUESTION)
    assert short.reuse.source == "disk"
    assert short.reuse.reused_tokens > 100


async def test_ram_is_used_where_disk_holds_no_more(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    talk = [SYSTEM]
    told = await converse(a, 3, talk)
    assert [each.reuse.source for each in told] == ["none", "ram", "ram"]
    assert told[2].reuse.reused_tokens >= told[1].reuse.prompt_tokens
    assert told[2].text == await cold(a, *talk[:-1])


async def test_a_session_continued_on_a_second_node_hits_the_blocks_that_the_first_one_made(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    talk = [SYSTEM]
    on_a = await converse(a, 3, talk)
    on_b = await converse(b, 1, talk)
    held = on_a[-1].finished.completed.held_tokens
    assert on_b[0].reuse.source == "peer"
    assert on_b[0].reuse.reused_tokens == held // BLOCK_TOKENS * BLOCK_TOKENS
    assert on_b[0].reuse.sources[0].peer == a.network.peer_id
    assert on_b[0].text == await cold(b, *talk[:-1])
    # And back: what b made of it is found by a, and says whom it came from.
    await a.engine.drop_live()
    back = await converse(a, 1, talk)
    assert back[0].reuse.source == "peer"
    assert back[0].reuse.reused_tokens > on_b[0].reuse.reused_tokens
    made_by_b = next(record for record in b.store.artifacts() if record.manifest.publisher == b.identity.key.public)
    assert {span.publisher for span in made_by_b.manifest.derived_from} == {a.identity.key.public}


async def test_turns_of_a_conversation_do_not_pile_up_and_each_writes_only_its_own_blocks(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    talk = [SYSTEM]
    await converse(a, 6, talk)
    records = a.store.artifacts()
    assert len(records) == 1
    assert not records[0].pinned
    assert a.keeper.counters()["superseded"] == a.keeper.counters()["kept"] - 1 > 1
    kept = records[0].manifest
    assert kept.n_tokens % BLOCK_TOKENS == 0
    # Only token ids of earlier turns are left over, in packs that are used otherwise, until garbage is collected.
    assert a.store.usage().chunks == kept.n_chunks + a.keeper.counters()["superseded"]
    written = kept.n_tokens * a.engine.info.kv_bytes_per_token
    assert a.keeper.counters()["kept_bytes"] == written
    a.store.collect_garbage()
    assert a.store.usage().chunks == kept.n_chunks
    assert (a.store.verify(records[0].hash).bad, a.store.verify(records[0].hash).missing) == ((), ())
    # Only the newest is offered and announced.
    offered = await b.exchange.finder.search(b.engine.info, a.store.tokens_of(records[0].hash), 0)
    assert offered.fetched is not None
    assert offered.fetched.artifact == records[0].hash
    assert len(a.exchange._offering._announced) == 1


async def test_a_session_that_moves_to_and_fro_does_not_pile_up_either(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    talk = [SYSTEM]
    counts: list[tuple[int, int]] = []
    for _ in range(4):
        for node in (a, b):
            await converse(node, 2, talk)
            await node.engine.drop_live()
        counts.append((len(a.store.artifacts()), len(b.store.artifacts())))
    # The newest of each signer; and the one that depends on nobody else, for the day the other is distrusted.
    assert counts[1] == counts[-1]
    assert max(counts[-1]) <= 3
    assert (await b.ask(*talk[:-1])).text == talk[-1][1]


async def test_a_named_or_pinned_artifact_is_never_let_go(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    talk = [SYSTEM]
    await converse(a, 1, talk)
    pinned = a.store.artifacts()[0].hash
    a.store.pin(pinned)
    await converse(a, 2, talk)
    assert pinned in [record.hash for record in a.store.artifacts()]


async def test_a_private_request_writes_announces_asks_and_counts_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(SYSTEM, QUESTION)
    answered = dict(a.exchange.counters())
    told = await b.ask(SYSTEM, QUESTION, private=True)
    assert (told.reuse.source, told.reuse.created_tokens) == ("none", 0)
    assert a.exchange.counters() == answered
    assert (b.store.artifacts(), b.used, b.engine.lives, b.keeper.counters()) == ([], [], [], {})
    assert (b.exchange.announcing().keys, b.speeds.noted) == (0, [])
    assert "the request is private: no peer was asked" in told.reuse.reasons
    # What this node holds may be used, and is not touched.
    await a.engine.drop_live()
    before = a.store.artifacts()
    own = await a.ask(SYSTEM, QUESTION, private=True)
    assert own.reuse.source == "disk"
    assert a.store.artifacts() == before


async def test_a_request_without_reuse_looks_nowhere_and_is_kept_all_the_same(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    first = await a.ask(SYSTEM, QUESTION)
    asked = dict(a.exchange.counters())
    told = await b.ask(SYSTEM, QUESTION, reuse=False)
    assert (told.text, told.reuse.source, told.reuse.reused_tokens) == (first.text, "none", 0)
    assert told.reuse.reasons == ("the request turned reuse off",)
    assert a.exchange.counters() == asked
    assert len(b.store.artifacts()) == 1


async def test_a_prefix_shorter_than_a_block_is_found_at_a_peer_when_it_ends_with_a_message(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    system = ("system", "Be brief, and say so when you do not know. " * 3)
    tokens = await a.engine.context_tokens([{"role": "system", "content": system[1]}], {})
    assert len(tokens) < BLOCK_TOKENS
    await a.add(tokens)
    told = await b.ask(system, QUESTION)
    assert (told.reuse.source, told.reuse.reused_tokens) == ("peer", len(tokens))
    assert told.text == await cold(b, system, QUESTION)


async def test_the_next_turn_of_a_conversation_in_ram_is_not_held_up_by_the_dht(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hub = await start_node(world, nursery, tmp_path, "hub", who=identity("hub", namespaces=(OTHER,)))
    a = await start_node(world, nursery, tmp_path, "a", bootstrap=(hub.network.address,))
    await trio.sleep(5)
    a.speeds.tokens_s = 300.0
    world.hang(hub.network)
    talk = [SYSTEM]
    told = await converse(a, 2, talk)
    assert told[0].reuse.lookup_s > 0.2
    assert told[1].reuse.source == "ram"
    assert told[1].reuse.lookup_s < 0.02


async def test_requests_that_miss_the_same_prefix_share_one_fetch(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    first = await a.ask(SYSTEM, QUESTION)
    size = a.store.artifacts()[0].manifest.total_size_bytes
    world.set_link(a.network, b.network, Link(latency_s=0.01, rate_bytes_per_s=1e6))
    told: list[Told] = []

    async def ask(delay_s: float) -> None:
        await trio.sleep(delay_s)
        told.append(await b.ask_now(SYSTEM, QUESTION))

    async with trio.open_nursery() as askers:
        for n in range(5):
            askers.start_soon(ask, n * 0.05)
    assert {each.text for each in told} == {first.text}
    assert {each.reuse.source for each in told} == {"peer"}
    assert a.exchange.counters()["bytes_served"] == size
    assert sum(each.reuse.sources[0].n_bytes for each in told) == size
    await b.keeper.wait_idle()


async def test_two_requests_with_one_new_prompt_are_exported_once(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    async with trio.open_nursery() as askers:
        for _ in range(4):
            askers.start_soon(a.ask_now, SYSTEM, QUESTION)
    await a.keeper.wait_idle()
    assert len(a.store.artifacts()) == 1
    assert (a.engine.exports, a.keeper.counters()["kept"]) == (1, 1)


async def test_who_waits_for_a_fetch_takes_it_over_when_the_one_that_fetches_is_cancelled(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    first = await a.ask(SYSTEM, QUESTION)
    size = a.store.artifacts()[0].manifest.total_size_bytes
    world.set_link(a.network, b.network, Link(latency_s=0.01, rate_bytes_per_s=200e3))
    leaving = trio.CancelScope()

    async def leave() -> None:
        with leaving:
            await b.ask_now(SYSTEM, QUESTION)

    async with trio.open_nursery() as askers:
        askers.start_soon(leave)
        await trio.sleep(0.3)
        askers.start_soon(_cancel_at, leaving, trio.current_time() + 1.5)
        told = await b.ask_now(SYSTEM, QUESTION)
    assert leaving.cancelled_caught
    assert (told.text, told.reuse.source) == (first.text, "peer")
    assert told.reuse.reused_tokens == first.reuse.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    # What had arrived before is not fetched again, but for what was on its way.
    assert a.exchange.counters()["bytes_served"] < 1.6 * size


async def _cancel_at(scope: trio.CancelScope, when_s: float) -> None:
    await trio.sleep_until(when_s)
    scope.cancel()


async def test_a_peer_that_dies_while_requests_wait_for_its_prefix_lets_all_of_them_compute_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    first = await a.ask(SYSTEM, QUESTION)
    world.set_link(a.network, b.network, Link(latency_s=0.01, rate_bytes_per_s=100e3))
    told: list[Told] = []

    async def ask() -> None:
        told.append(await b.ask_now(SYSTEM, QUESTION))

    async with trio.open_nursery() as askers:
        askers.start_soon(ask)
        askers.start_soon(ask)
        await trio.sleep(1.0)
        world.kill(a.network)
    assert [each.text for each in told] == [first.text] * 2
    assert len({each.reuse.source for each in told}) == 1
    assert all(each.finished.ttft_s < 30 for each in told)
    assert all(each.reuse.reasons for each in told)


async def test_a_lying_peer_changes_no_answer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(
        world, nursery, tmp_path, "a", who=identity("a"), lie=lambda data: bytes([data[0] ^ 1]) + data[1:]
    )
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await b.meet(a)
    first = await a.ask(SYSTEM, QUESTION)
    told = await b.ask(SYSTEM, QUESTION)
    assert (told.text, told.reuse.source) == (first.text, "none")
    assert told.reuse.reasons


async def test_a_network_that_is_off_changes_no_answer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    first = await a.ask(SYSTEM, QUESTION)
    world.hang(a.network)
    told = await b.ask(SYSTEM, QUESTION)
    assert (told.text, told.reuse.source) == (first.text, "none")
    assert told.finished.ttft_s < 4.0


async def test_an_engine_that_crashes_costs_the_request_it_was_running_and_no_other(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    a.engine.crash_at_token = 3
    with pytest.raises(EngineCrashedError):
        await a.ask(SYSTEM, QUESTION)
    assert (a.used, a.store.artifacts()) == ([], [])
    told = await a.ask(SYSTEM, QUESTION)
    assert told.text == await cold(a, SYSTEM, QUESTION)
    assert len(a.store.artifacts()) == 1


async def test_damage_on_disk_is_set_aside_and_the_answer_comes_all_the_same(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    first = await a.ask(SYSTEM, QUESTION)
    await a.engine.drop_live()
    record = a.store.artifacts()[0]
    location = a.store.locate_all([record.entries[record.manifest.plan().tiles_of_block(1)[0]].hash])[0]
    assert location is not None
    location.path.chmod(0o600)
    with location.path.open("r+b") as file:
        file.seek(location.offset)
        file.write(b"\xff\xfe\xfd")
    told = await a.ask(SYSTEM, QUESTION)
    assert (told.text, told.reuse.reused_tokens) == (first.text, BLOCK_TOKENS)
    assert [rejected.code for rejected in told.reuse.rejected] == ["restore_failed"]


async def test_more_than_the_window_is_refused_with_the_figures_before_anybody_is_asked(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await pair(world, nursery, tmp_path)
    await a.ask(SYSTEM, QUESTION)
    asked = dict(a.exchange.counters())
    huge = Asked(PromptKind.CHAT, body(SYSTEM, QUESTION), {}, 1 << 20)
    with pytest.raises(WindowError, match=r"1,048,576 tokens; the prompt has 1,\d\d\d and 1,048,576"):
        _ = [event async for event in b.completer.complete(b.engine, huge)]
    assert a.exchange.counters() == asked
    with pytest.raises(PromptError):
        await b.ask()
    assert (await b.ask(SYSTEM, QUESTION)).reuse.source == "peer"


async def test_a_reader_that_leaves_stops_the_answer_and_nothing_is_kept(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    events = a.completer.complete(a.engine, Asked(PromptKind.CHAT, body(SYSTEM, QUESTION), {}, 12))
    async for event in events:
        if isinstance(event, Body):
            break
    await events.aclose()
    await a.keeper.wait_idle()
    assert (a.used, a.store.artifacts()) == ([], [])
    assert (await a.ask(SYSTEM, QUESTION)).text
    with trio.fail_after(10):
        await a.completer.drain()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["no space", "input/output error"])
@pytest.mark.parametrize("operation", ["sync", "rename"])
async def test_a_disk_that_fails_while_a_conversation_is_kept_costs_one_warning_and_no_answer(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    code: int,
) -> None:
    files = FaultyFiles()
    a = await start_node(world, nursery, tmp_path, "a", files=files)
    files.arm(operation, 1, code)
    told = await a.ask(SYSTEM, QUESTION)
    assert told.text
    assert not files.waiting
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert a.store.artifacts() == []
    assert a.exchange.announcing().keys == 0
    assert a.keeper.counters() == {"keep_failed": 1}
    again = await a.ask(SYSTEM, QUESTION)
    assert again.text == told.text
    assert len(a.store.artifacts()) == 1


async def test_a_ledger_that_cannot_be_written_breaks_no_answer(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)

    def full(finished: Finished) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    a.completer = Completer(PrefixReuse(a.store, a.lane, a.identity, None), speeds=a.speeds, keeper=a.keeper, used=full)
    told = await a.ask(SYSTEM, QUESTION)
    assert told.finished.completed.finish_reason == "length"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(a.store.artifacts()) == 1


async def test_a_live_cache_that_is_gone_is_no_failure(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    await a.ask_now(SYSTEM, QUESTION)
    a.engine.lives.clear()
    await a.keeper.wait_idle()
    assert a.keeper.counters() == {"keep_no_live_state": 1}
    assert (a.store.artifacts(), caplog.records) == ([], [])


async def test_a_draining_node_refuses_requests_and_leaves_nothing_half_kept(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", alone=True)
    told = await a.ask_now(SYSTEM, QUESTION)
    with trio.fail_after(10):
        await a.completer.drain()
    with pytest.raises(BusyError):
        await a.ask(SYSTEM, QUESTION)
    a.keeper.offer(ToKeep(a.engine, told.reuse.prepared.tokens, None))  # type: ignore[arg-type]
    assert a.keeper.idle
    assert not list((tmp_path / "a").rglob("*.part"))
