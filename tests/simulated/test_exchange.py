"""Whole nodes on a simulated network: fetching, reuse, trust, liars and peers that go."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import NotFoundError, TrustError
from kvnet.exchange.lane import InlineLane, P, T
from kvnet.exchange.serving import ChunkServer
from kvnet.format.chunks import ChunkKind
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.store.disk import DiskStore
from tests.simulated.nodes import MINE, OTHER, Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]
PROMPT = [*TOKENS, 5, 6, 7]


def chunk_bytes(node: Node, artifact: bytes) -> list[bytes]:
    """Every chunk of an artifact as this node's store gives it."""
    record = node.store.get(artifact)  # type: ignore[arg-type]
    assert record is not None
    return [node.store.read_chunk(entry.hash) for entry in record.entries]


async def test_an_artifact_added_on_one_node_is_fetched_whole_by_another(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS, context=b'{"any":"context"}')
    await b.meet(a)
    fetched = await b.fetch(added.record.hash)
    assert fetched.record.complete
    assert fetched.fetched_chunks == added.record.manifest.n_chunks
    assert chunk_bytes(b, added.record.hash) == chunk_bytes(a, added.record.hash)
    assert b.store.context_of(added.record.hash) == b'{"any":"context"}'


async def test_a_node_that_fetched_serves_on_when_the_publisher_is_gone(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    await b.fetch(added.record.hash)
    world.kill(a.network)
    await c.meet(b)
    fetched = await c.fetch(added.record.hash)
    assert fetched.record.envelope == added.record.envelope


async def test_a_generation_reuses_a_peers_prefix_and_answers_as_if_it_had_not(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    cold = await b.generate(PROMPT, reuse=False)
    await b.meet(a)
    warm = await b.generate(PROMPT)
    assert warm.text == cold.text
    assert warm.reused_tokens == len(TOKENS)
    assert [source.source for source in warm.sources] == ["peer"]
    assert warm.sources[0].signer == added.record.manifest.publisher
    again = await b.generate(PROMPT)
    assert again.text == cold.text
    assert [source.source for source in again.sources] == ["disk"]


async def test_reuse_ends_at_the_first_token_that_differs_inside_a_block(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await a.add(TOKENS)
    await b.meet(a)
    prompt = [*TOKENS[:777], 250, *TOKENS[778:]]
    assert TOKENS[777] != 250
    search = await b.exchange.finder.search(b.engine.info, prompt, 0)
    assert search.fetched is not None
    assert (search.fetched.n_tokens, search.fetched.peer) == (777, a.network.peer_id)
    warm = await b.generate(prompt)
    assert warm.reused_tokens == 777
    assert warm.text == (await b.generate(prompt, reuse=False)).text
    # Only the tiles of the shared blocks came; the artifact is held in part and still serves what it has.
    record = next(iter(b.store.artifacts()))
    held = [b.store.has_chunk(entry.hash) for entry in record.entries]
    tiles = [spec.index for spec in record.manifest.plan() if spec.kind is ChunkKind.TILE]
    assert not record.complete
    assert all(held[index] for index in record.manifest.plan().needed_for(777))
    assert not all(held[index] for index in tiles)


LIES = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "truncated": lambda data: data[:-1],
    "extended": lambda data: data + b"\0",
    "zeroed": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_bad_chunk_is_discarded_and_fetched_elsewhere(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, lie: object
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    evil = await start_node(
        world,
        nursery,
        tmp_path,
        "evil",
        who=identity("evil", trusts=["a"]),
        lie=lie,  # type: ignore[arg-type]
    )
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await evil.meet(a)
    await evil.fetch(added.record.hash)
    await b.meet(evil)
    with pytest.raises(NotFoundError, match="missing"):
        await b.fetch(added.record.hash)
    assert b.store.get(added.record.hash) is None
    await b.meet(a)
    fetched = await b.fetch(added.record.hash)
    assert chunk_bytes(b, added.record.hash) == chunk_bytes(a, added.record.hash)
    # What it did is remembered: it is not asked again.
    assert set(fetched.delivered) == {a.network.peer_id}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_liar_beside_an_honest_peer_is_named_and_costs_no_chunk(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, lie: object
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    evil_identity = identity("evil", trusts=["a"])
    evil = await start_node(world, nursery, tmp_path, "evil", who=evil_identity, lie=lie)  # type: ignore[arg-type]
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await evil.meet(a)
    await evil.fetch(added.record.hash)
    await b.meet(evil)
    await b.meet(a)
    fetched = await b.fetch(added.record.hash)
    assert chunk_bytes(b, added.record.hash) == chunk_bytes(a, added.record.hash)
    liar = fetched.delivered[evil.network.peer_id]
    assert (liar.n_chunks, liar.dropped) == (0, "bad_chunk")
    assert b.exchange.fetcher.scores.banned(evil.network.peer_id, trio.current_time())


async def test_an_untrusted_publishers_artifact_is_neither_fetched_nor_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b")
    added = await a.add(TOKENS)
    await b.meet(a)
    with pytest.raises(TrustError, match="not among the trusted publishers"):
        await b.fetch(added.record.hash)
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert not b.store.artifacts()


async def test_what_derives_from_an_untrusted_publisher_is_not_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["b"]))
    original = await a.add(TOKENS)
    await b.meet(a)
    await b.fetch(original.record.hash)
    extended = await b.add([*TOKENS, *range(3, 250)])
    assert extended.reused_tokens == len(TOKENS)
    spans = extended.record.manifest.derived_from
    assert [(span.artifact, span.publisher) for span in spans] == [
        (original.record.hash, original.record.manifest.publisher)
    ]
    await c.meet(b)
    with pytest.raises(TrustError, match="come from an artifact signed by"):
        await c.fetch(extended.record.hash)


async def test_a_peer_without_the_namespace_gets_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    outsider = await start_node(
        world, nursery, tmp_path, "outsider", who=identity("outsider", trusts=["a"], namespaces=(OTHER,))
    )
    added = await a.add(TOKENS)
    await outsider.meet(a)
    with pytest.raises(NotFoundError):
        await outsider.fetch(added.record.hash)
    answer = await outsider.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert [known.member for known in outsider.exchange.peers()] == [False]


async def test_a_provider_that_dies_half_way_is_replaced_by_another(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    await b.fetch(added.record.hash)
    await c.meet(a, b)
    located = await c.exchange.fetcher.locate(added.record.hash)
    entries = await c.exchange.fetcher.chunk_list(located)

    async def kill_at_second_chunk(event: object) -> None:
        if event.done_chunks == 2:  # type: ignore[attr-defined]
            world.kill(a.network)

    fetched = await c.exchange.fetcher.fetch(located, entries, progress=kill_at_second_chunk)
    assert fetched.record.complete
    assert chunk_bytes(c, added.record.hash) == chunk_bytes(b, added.record.hash)


async def test_a_peer_that_hangs_costs_a_generation_no_more_than_the_lookup(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await a.add(TOKENS)
    await b.meet(a)
    world.hang(a.network)
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert answer.ttft_s <= 3.5
    assert answer.text == (await b.generate(PROMPT, reuse=False)).text


async def test_a_fetch_from_nobody_but_a_hanging_peer_ends_with_the_number_of_missing_chunks(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    located = await b.exchange.fetcher.locate(added.record.hash)
    entries = await b.exchange.fetcher.chunk_list(located)
    world.hang(a.network)
    started_s = trio.current_time()
    with pytest.raises(NotFoundError, match=f"{len(entries)} chunks are missing"):
        await b.exchange.fetcher.fetch(located, entries)
    assert trio.current_time() - started_s < 120
    assert b.store.get(added.record.hash) is None


async def test_the_dht_leads_to_a_provider_nobody_has_named(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hub = await start_node(world, nursery, tmp_path, "hub", who=identity("hub", namespaces=(OTHER,)))
    bootstrap = (hub.network.address,)
    a = await start_node(world, nursery, tmp_path, "a", bootstrap=bootstrap)
    added = await a.add(TOKENS)
    await trio.sleep(60)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), bootstrap=bootstrap)
    await trio.sleep(5)
    found = await b.exchange.providers_of(added.record.hash, timeout_s=10)
    assert [hint.peer for hint in found] == [a.network.peer_id]
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == len(TOKENS)


async def test_members_again_after_a_namespace_was_imported(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"], namespaces=(OTHER,)))
    added = await a.add(TOKENS)
    await b.meet(a)
    object.__setattr__(b.identity, "members", (MINE, OTHER))
    await b.exchange.reload()
    await trio.sleep(10)
    assert (await b.fetch(added.record.hash)).record.complete


async def test_adding_again_after_an_edit_computes_from_the_first_changed_token(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    first = await a.add(TOKENS)
    same = await a.add(TOKENS)
    assert same.existed
    assert same.record.hash == first.record.hash
    edited = [*TOKENS[:1100], 9, *TOKENS[1101:]]
    assert edited != TOKENS
    second = await a.add(edited)
    assert second.reused_tokens == 1100
    assert second.prefilled_tokens == 400
    assert second.record.manifest.derived_from == ()
    assert second.new_bytes < first.new_bytes / 2
    shorter = await a.add(TOKENS[:700])
    assert (shorter.reused_tokens, shorter.prefilled_tokens) == (700, 0)
    cold = await a.generate([*TOKENS[:700], 8], reuse=False)
    assert (await a.generate([*TOKENS[:700], 8])).text == cold.text


async def test_a_prompt_equal_longer_shorter_and_of_one_token_is_answered_as_cold(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    await a.add(TOKENS)
    for prompt in (TOKENS, [*TOKENS, 9], TOKENS[:-1], TOKENS[:1], [9]):
        cold = await a.generate(prompt, reuse=False)
        for _ in range(2):
            warm = await a.generate(prompt)
            assert warm.text == cold.text
            assert warm.text
            assert warm.reused_tokens <= len(prompt) - 1


async def test_a_peer_slower_than_computing_is_given_up_and_what_it_sent_is_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await a.add(TOKENS)
    await b.meet(a)
    cold = await b.generate(PROMPT, reuse=False)
    # 384 kB of K/V at 100 kB/s: 4 s, against 3 s of prefill at 500 tokens a second.
    world.set_link(a.network, b.network, Link(latency_s=0.01, rate_bytes_per_s=100e3))
    warm = await b.generate(PROMPT, prefill_tokens_s=500.0)
    assert warm.text == cold.text
    assert 0 < warm.reused_tokens < len(TOKENS)
    assert warm.ttft_s < 3.5 + 3.5


async def test_a_peer_that_dies_while_a_prompt_waits_costs_no_more_than_the_prefill_it_would_have_spared(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await a.add(TOKENS)
    await b.meet(a)
    cold = await b.generate(PROMPT, reuse=False)
    world.set_link(a.network, b.network, Link(latency_s=0.01, rate_bytes_per_s=100e3))

    async def hang_soon() -> None:
        await trio.sleep(1.5)
        world.hang(a.network)

    nursery.start_soon(hang_soon)
    warm = await b.generate(PROMPT, prefill_tokens_s=500.0)
    assert warm.text == cold.text
    assert warm.ttft_s < 3.5 + 3.5


async def test_a_peer_that_hangs_right_after_its_lookup_reply_costs_no_more_than_the_lookup(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await a.add(TOKENS)
    await b.meet(a)
    cold = await b.generate(PROMPT, reuse=False)
    world.set_link(a.network, b.network, Link(latency_s=0.2, rate_bytes_per_s=1e6))

    async def hang_soon() -> None:
        await trio.sleep(0.5)
        world.hang(a.network)

    nursery.start_soon(hang_soon)
    warm = await b.generate(PROMPT, prefill_tokens_s=500.0)
    assert warm.text == cold.text
    assert warm.reused_tokens == 0
    assert warm.ttft_s < 2.5


async def test_what_comes_and_goes_while_the_store_is_read_counts_after_what_was_read(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    kept = (await a.add(TOKENS[:300])).record
    gone = (await a.add(TOKENS[:600])).record
    empty = DiskStore.open(tmp_path / "empty", quota_bytes=1 << 30, min_free_bytes=0)

    class MeddlingLane(InlineLane):
        async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
            result = await super().run(function, *args, **kwargs)
            server.offer(kept, [])
            server.withdraw(gone.hash)
            return result

    for store, held in ((empty, 1), (a.store, 1)):
        server = ChunkServer(store, MeddlingLane(), a.identity, lambda _peer, _session: None)
        await server.load()
        assert len(server) == held
    empty.close()
