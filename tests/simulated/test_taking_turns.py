"""A prompt and a copy of the same artifact at the same time: one fetch, with the prompt first."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetch_pack import ProgressCallback
from kvnet.exchange.fetcher import Fetched
from kvnet.format.hashes import ArtifactHash
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.pace import Purpose
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(6000)]
FRONT = 1500
PROMPT = [*TOKENS[:FRONT], 5, 6, 7]
RATE = 200e3
SLOW = Link(latency_s=0.01, rate_bytes_per_s=RATE)
LARGEST_BYTES = 65_536
"""Of a chunk."""


async def copy(node: Node, artifact: ArtifactHash, progress: ProgressCallback | None = None) -> Fetched:
    """What ``kvnet fetch`` does."""
    fetcher = node.exchange.fetcher
    located = await fetcher.locate(artifact)
    entries = await fetcher.chunk_list(located)
    fetched = await fetcher.fetch(located, entries, progress=progress, purpose=Purpose.REPLICATION)
    node.exchange.fetched(fetched)
    return fetched


class Copying:
    """A copy in the background, and when so many chunks of it have come."""

    def __init__(self, node: Node, artifact: ArtifactHash, nursery: trio.Nursery, after_chunks: int) -> None:
        self.begun, self.ended = trio.Event(), trio.Event()
        self.results: list[Fetched] = []
        self.events: list[FetchProgress] = []
        self.scope = trio.CancelScope()
        self._after_chunks = after_chunks
        nursery.start_soon(self._run, node, artifact)

    async def _run(self, node: Node, artifact: ArtifactHash) -> None:
        with self.scope:
            self.results.append(await copy(node, artifact, self._progress))
        self.ended.set()

    async def _progress(self, event: FetchProgress) -> None:
        self.events.append(event)
        if event.done_chunks >= self._after_chunks:
            self.begun.set()


async def two_nodes(world: World, nursery: trio.Nursery, folder: Path) -> tuple[Node, Node, ArtifactHash]:
    """One that has an artifact and one that has not, on a slow link."""
    a = await start_node(world, nursery, folder, "a")
    b = await start_node(world, nursery, folder, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.meet(a)
    world.set_link(a.network, b.network, SLOW)
    return a, b, added.record.hash


def served(node: Node) -> int:
    """Chunks that a node has sent."""
    return node.exchange.counters().get("chunks_served", 0)


async def test_a_prompt_during_a_copy_takes_what_came_and_no_chunk_is_sent_for_both(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, artifact = await two_nodes(world, nursery, tmp_path)
    copying = Copying(b, artifact, nursery, after_chunks=8)
    await copying.begun.wait()
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == FRONT
    assert not copying.ended.is_set()
    await copying.ended.wait()
    (fetched,) = copying.results
    assert fetched.record.complete
    # What was on its way when the prompt came is sent again: no more than one chunk, and what the peer had in hand.
    assert served(a) <= len(fetched.record.entries) + 3
    prompts = sum(source.n_bytes for source in answer.sources)
    assert fetched.fetched_bytes + prompts == fetched.record.size_bytes
    assert (fetched.resumed_chunks, fetched.held_chunks) == (0, fetched.meanwhile_chunks)
    assert fetched.fetched_chunks + fetched.meanwhile_chunks == len(fetched.record.entries)
    assert any(event.gives_way for event in copying.events)


async def test_a_prompt_waits_no_longer_beside_a_copy_that_begins_at_the_other_end(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, artifact = await two_nodes(world, nursery, tmp_path)
    # It has the beginning alone, so that what is rarest is the end.
    part = await start_node(world, nursery, tmp_path, "part", who=identity("part", trusts=["a"]))
    alone = await start_node(world, nursery, tmp_path, "alone", who=identity("alone", trusts=["a"]))
    await part.meet(a)
    assert (await part.generate(PROMPT)).reused_tokens == FRONT
    for asker in (b, alone):
        await asker.meet(a, part)
        for provider in (a, part):
            world.set_link(provider.network, asker.network, SLOW)
    undisturbed = await alone.generate(PROMPT)
    copying = Copying(b, artifact, nursery, after_chunks=4)
    await copying.begun.wait()
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == undisturbed.reused_tokens == FRONT
    # The chunk that each of the two has on its way is waited for.
    assert answer.ttft_s < undisturbed.ttft_s + 2 * LARGEST_BYTES / RATE
    await copying.ended.wait()
    assert copying.results[0].record.complete


async def test_a_copy_that_begins_while_a_prompt_fetches_leaves_that_to_the_prompt(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    _, b, artifact = await two_nodes(world, nursery, tmp_path)
    copying: list[Copying] = []

    async def begin_copy(event: FetchProgress) -> None:
        if event.done_chunks and not copying:
            copying.append(Copying(b, artifact, nursery, after_chunks=1))

    search = await b.exchange.finder.search(b.engine.info, PROMPT, 0, progress=begin_copy)
    assert search.fetched is not None
    assert search.fetched.n_tokens == FRONT
    assert not copying[0].begun.is_set()
    await copying[0].ended.wait()
    (fetched,) = copying[0].results
    assert fetched.record.complete
    assert fetched.fetched_chunks + fetched.meanwhile_chunks == len(fetched.record.entries)
    assert fetched.fetched_bytes + search.fetched.n_bytes == fetched.record.size_bytes


async def test_a_copy_goes_on_when_the_prompt_that_came_first_is_cancelled(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, artifact = await two_nodes(world, nursery, tmp_path)
    copying = Copying(b, artifact, nursery, after_chunks=2)
    await copying.begun.wait()
    prompt = trio.CancelScope()

    async def cancel(event: FetchProgress) -> None:
        if event.done_chunks:
            prompt.cancel()

    with prompt:
        await b.exchange.finder.search(b.engine.info, PROMPT, 0, progress=cancel)
    assert prompt.cancelled_caught
    await copying.ended.wait()
    assert copying.results[0].record.complete
    assert copying.results[0].meanwhile_chunks > 0
    assert served(a) <= len(copying.results[0].record.entries) + 6


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_prompt_gets_its_prefix_when_the_copy_that_gave_way_is_cancelled(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, when: str
) -> None:
    _, b, artifact = await two_nodes(world, nursery, tmp_path)
    copying = Copying(b, artifact, nursery, after_chunks=2)
    await copying.begun.wait()
    if when == "before":
        copying.scope.cancel()

    async def cancel(event: FetchProgress) -> None:
        if event.done_chunks:
            copying.scope.cancel()

    search = await b.exchange.finder.search(b.engine.info, PROMPT, 0, progress=cancel)
    assert search.fetched is not None
    assert search.fetched.n_tokens == FRONT
    await copying.ended.wait()
    assert not copying.results
    assert (await copy(b, artifact)).record.complete


async def test_a_copy_that_prompts_keep_interrupting_ends_with_all_of_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    _, b, artifact = await two_nodes(world, nursery, tmp_path)
    copying = Copying(b, artifact, nursery, after_chunks=1)
    await copying.begun.wait()
    n_bytes = 0
    for end in (900, 1800, 2700, 3600):
        search = await b.exchange.finder.search(b.engine.info, [*TOKENS[:end], 5, 6, 7], 0)
        assert search.fetched is not None
        assert search.fetched.n_tokens == end
        n_bytes += search.fetched.n_bytes
    await copying.ended.wait()
    (fetched,) = copying.results
    assert fetched.record.complete
    assert fetched.fetched_bytes + n_bytes == fetched.record.size_bytes
