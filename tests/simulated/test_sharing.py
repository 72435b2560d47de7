"""Nodes that hold parts, and nodes whose rate is limited."""

from collections.abc import Sequence
from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.node import NodeOptions
from kvnet.format.chunks import ChunkKind
from kvnet.format.hashes import ArtifactHash
from kvnet.network.memory import World
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.messages.artifacts import GetHave
from kvnet.protocol.pace import Purpose
from kvnet.protocol.serve import ServeLimits
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(3000)]
PACED = AnnounceLimits(interval_s=1.2, verify_s=0.0)


async def fetch_part(node: Node, artifact: ArtifactHash, indices: Sequence[int] | None = None) -> Fetched:
    fetcher = node.exchange.fetcher
    located = await fetcher.locate(artifact)
    fetched = await fetcher.fetch(located, await fetcher.chunk_list(located), indices)
    node.exchange.fetched(fetched)
    return fetched


async def test_holder_of_a_part_says_which_and_is_asked_for_nothing_else(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    part = await start_node(world, nursery, tmp_path, "part", who=identity("part", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a"]))
    added = await a.add(TOKENS)
    tiles = [spec.index for spec in added.record.manifest.plan() if spec.kind is ChunkKind.TILE]
    await part.meet(a)
    held = await fetch_part(part, added.record.hash, tiles[: len(tiles) // 3])
    assert not held.record.complete
    await c.meet(part, a)
    fetched = await fetch_part(c, added.record.hash)
    assert fetched.record.complete
    assert part.exchange.counters()["requests_GetHave"] == a.exchange.counters()["requests_GetHave"] - 1 == 1
    assert 0 < fetched.delivered[part.network.peer_id].n_chunks <= held.fetched_chunks
    assert fetched.fetched_chunks == added.record.manifest.n_chunks


async def test_parts_of_several_holders_make_a_whole(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    others = [
        await start_node(world, nursery, tmp_path, name, who=identity(name, trusts=["a"])) for name in ("b", "c", "d")
    ]
    added = await a.add(TOKENS)
    n_chunks = added.record.manifest.n_chunks
    for number, node in enumerate(others[:2]):
        await node.meet(a)
        await fetch_part(node, added.record.hash, range(number, n_chunks, 2))
    world.kill(a.network)
    await others[2].meet(*others[:2])
    fetched = await fetch_part(others[2], added.record.hash)
    assert fetched.record.complete
    assert len([each for each in fetched.delivered.values() if each.n_chunks]) == 2


async def test_peer_without_the_capability_is_not_asked_what_it_has(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", options=NodeOptions(serving=False))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    assert not any(isinstance(name, GetHave) for name in a.exchange.counters())
    source = await start_node(world, nursery, tmp_path, "source", who=identity("a"))
    await source.add(TOKENS)
    await c.meet(a, source)
    assert (await fetch_part(c, added.record.hash)).record.complete
    assert "requests_GetHave" not in a.exchange.counters()


async def seconds_of(node: Node, artifact: ArtifactHash, purpose: Purpose = Purpose.INTERACTIVE) -> float:
    fetcher = node.exchange.fetcher
    located = await fetcher.locate(artifact)
    entries = await fetcher.chunk_list(located)
    fetched = await fetcher.fetch(located, entries, purpose=purpose)
    assert fetched.record.complete
    return fetched.seconds


async def test_limited_upload_is_kept_and_shared_by_purpose(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    added = await a.add(TOKENS)
    rate = added.record.size_bytes / 4.0
    options = NodeOptions(announce=PACED, serve=ServeLimits(total_bytes_per_s=rate))
    limited = await start_node(world, nursery, tmp_path, "limited", who=identity("a"), options=options)
    await limited.add(TOKENS)
    waiting, copying = [
        await start_node(world, nursery, tmp_path, name, who=identity(name, trusts=["a"])) for name in ("w", "c")
    ]
    took: dict[str, float] = {}

    async def fetch(node: Node, purpose: Purpose) -> None:
        await node.meet(limited)
        took[node.name] = await seconds_of(node, added.record.hash, purpose)

    async with trio.open_nursery() as both:
        both.start_soon(fetch, waiting, Purpose.INTERACTIVE)
        both.start_soon(fetch, copying, Purpose.SCRUB)
    assert 3.5 < took["w"] < 5.5
    assert 7 < took["c"] < 9.5


async def test_limited_download_is_kept(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    added = await a.add(TOKENS)
    options = NodeOptions(announce=PACED, download_bytes_s=added.record.size_bytes / 10.0)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), options=options)
    await b.meet(a)
    assert 9 < await seconds_of(b, added.record.hash) < 11


async def test_peer_that_may_send_only_a_little_is_good_enough_when_there_is_no_other(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    rate = 2000.0
    options = NodeOptions(announce=PACED, serve=ServeLimits(total_bytes_per_s=rate))
    limited = await start_node(world, nursery, tmp_path, "limited", who=identity("a"), options=options)
    added = await limited.add(TOKENS)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await b.meet(limited)
    expected_s = added.record.size_bytes / rate
    assert 0.9 * expected_s < await seconds_of(b, added.record.hash) < 1.2 * expected_s
    assert expected_s > 60
