"""Bytes that changed on the disk: never decoded from, never sent on, and replaced when somebody has them."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import EngineError
from kvnet.exchange.publisher import AddRequest, Publisher
from kvnet.format.chunks import ChunkKind
from kvnet.format.codecs import Codec
from kvnet.network.memory import World
from kvnet.store.interface import ArtifactRecord
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]
PROMPT = [*TOKENS, 5, 6, 7]


def damage(node: Node, record: ArtifactRecord, index: int) -> None:
    """Change one byte of a chunk where it lies."""
    location = node.store.locate_all([record.entries[index].hash])[0]
    assert location is not None
    location.path.chmod(0o600)
    with location.path.open("r+b") as file:
        file.seek(location.offset)
        byte = file.read(1)
        file.seek(location.offset)
        file.write(bytes([byte[0] ^ 1]))


def chunk(record: ArtifactRecord, kind: ChunkKind, block: int = 0) -> int:
    """The first chunk of a kind, or the first tile of a block."""
    return next(spec.index for spec in record.manifest.plan() if spec.kind is kind and spec.block == block)


async def test_what_lies_before_a_damaged_tile_is_reused_at_once_and_the_tile_counts_as_missing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    record = (await a.add(TOKENS)).record
    cold = await a.generate(PROMPT, reuse=False)
    damage(a, record, chunk(record, ChunkKind.TILE, block=2))
    first = await a.generate(PROMPT)
    assert (first.text, first.reused_tokens) == (cold.text, 512)
    assert [rejected.code for rejected in first.rejected] == ["restore_failed"]
    second = await a.generate(PROMPT)
    assert (second.text, second.reused_tokens, second.rejected) == (cold.text, 512, ())


async def test_what_is_damaged_is_not_extended_and_adding_it_again_makes_it_whole(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    record = (await a.add(TOKENS)).record
    damage(a, record, chunk(record, ChunkKind.TILE, block=2))
    added = await a.add([*TOKENS, 9, 9])
    assert (added.reused_tokens, added.prefilled_tokens) == (512, 990)
    assert a.store.verify(added.record.hash).bad == ()
    cold = await a.generate([*TOKENS, 9, 9, 4], reuse=False)
    assert (await a.generate([*TOKENS, 9, 9, 4])).text == cold.text


async def test_damaged_token_ids_hide_no_other_artifact(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    await a.add(TOKENS[:400])
    record = (await a.add(TOKENS)).record
    damage(a, record, chunk(record, ChunkKind.TOKENS))
    answer = await a.generate(PROMPT)
    assert answer.reused_tokens == 400
    assert [(each.artifact, each.code) for each in answer.rejected] == [(record.hash, "damaged")]
    assert (await a.add([*TOKENS[:400], 7])).reused_tokens == 400


async def test_a_damaged_chunk_is_not_sent_on_and_comes_from_another_peer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    c = await start_node(world, nursery, tmp_path, "c", who=identity("c", trusts=["a"]))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record
    await c.meet(a)
    await c.fetch(record.hash)
    # Of those that are asked of the first provider before it is known how fast anybody is.
    damage(a, record, chunk(record, ChunkKind.TILE, block=0))
    await b.meet(a)
    located = await b.exchange.fetcher.locate(record.hash)
    await b.meet(c)
    entries = await b.exchange.fetcher.chunk_list(located)
    fetched = await b.exchange.fetcher.fetch(located, entries)
    assert fetched.record.complete
    assert a.exchange.counters()["chunks_damaged"] == 1
    delivered = {peer: each.n_chunks for peer, each in fetched.delivered.items()}
    assert sum(delivered.values()) == len(entries)
    assert delivered[a.network.peer_id] < len(entries)


async def test_a_request_that_meets_damage_gets_the_chunk_back_from_a_peer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record
    await b.meet(a)
    await b.fetch(record.hash)
    damage(b, record, chunk(record, ChunkKind.TILE, block=1))
    cold = await b.generate(PROMPT, reuse=False)
    mended = await b.generate(PROMPT)
    assert (mended.text, mended.reused_tokens) == (cold.text, len(TOKENS))
    assert (mended.sources[0].source, mended.sources[0].n_bytes) == ("peer", record.entries[2].length_bytes)


async def test_the_same_tokens_in_another_codec_are_another_artifact_of_the_same_state(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    raw = await a.add(TOKENS)
    publisher = Publisher(a.store, a.lane, a.identity)
    request = AddRequest(TOKENS, b"", Codec.SHUFFLE_ZSTD1, pinned=True, created_s=1_800_000_000)
    packed = await publisher.add(a.engine, request)
    assert packed.record.hash != raw.record.hash
    assert packed.record.manifest.last_prefix_key == raw.record.manifest.last_prefix_key
    assert (packed.reused_tokens, packed.prefilled_tokens) == (len(TOKENS), 0)
    cold = await a.generate(PROMPT, reuse=False)
    a.store.remove(raw.record.hash)
    warm = await a.generate(PROMPT)
    assert (warm.text, warm.sources[0].artifact) == (cold.text, packed.record.hash)


async def test_nothing_cannot_be_added(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    with pytest.raises(EngineError, match="at least 1 token"):
        await a.add([])
    assert not a.store.artifacts()
