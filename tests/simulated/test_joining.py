"""Peers that come, go, come back, or get an artifact while another node fetches it."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import NotFoundError
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.presence import Presences, PresenceState
from kvnet.format.hashes import ArtifactHash
from kvnet.network.interface import ByteStream
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.fetch_limits import PATIENCE_S
from kvnet.protocol.messages.chunks import GetChunks
from kvnet.protocol.pace import Purpose
from kvnet.store.interface import ArtifactRecord
from tests.evil import EvilPeer, relay_answer
from tests.simulated.nodes import MINE, Node, identity, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(5000)]
"""20 blocks of 64 KiB."""
PROMPT = [*TOKENS, 5, 6, 7]
SLOW = Link(latency_s=0.005, rate_bytes_per_s=64e3)
"""A block a second."""

Then = Callable[[], Awaitable[None]]
Start = Callable[..., Awaitable[Node]]


@pytest.fixture
def start(world: World, nursery: trio.Nursery, tmp_path: Path) -> Start:
    """Starts a node that trusts "a" and "b"."""

    async def begin(name: str, **options: object) -> Node:
        who = identity(name, trusts=["a", "b"])
        return await start_node(world, nursery, tmp_path, name, who=who, **options)  # type: ignore[arg-type]

    return begin


async def fetch(
    node: Node, artifact: ArtifactHash, purpose: Purpose, *, at_chunk: int = 0, then: Then | None = None
) -> Fetched:
    """Fetch all of it, and do something else when so many chunks have come."""
    located = await node.exchange.fetcher.locate(artifact)
    entries = await node.exchange.fetcher.chunk_list(located)

    async with trio.open_nursery() as nursery:

        async def progress(event: FetchProgress) -> None:
            if event.done_chunks == at_chunk and then is not None:
                nursery.start_soon(then)

        fetched = await node.exchange.fetcher.fetch(located, entries, purpose=purpose, progress=progress)
        node.exchange.fetched(fetched)
    return fetched


async def copy_to(node: Node, *others: Node, artifact: ArtifactHash) -> None:
    """Have a node hold what another one has."""
    await node.meet(*others)
    assert (await node.fetch(artifact)).record.complete


BOTH = pytest.mark.parametrize("purpose", [Purpose.INTERACTIVE, Purpose.REPLICATION])


@BOTH
async def test_a_peer_that_turns_up_during_a_fetch_brings_chunks(
    autojump_clock: MockClock, world: World, start: Start, purpose: Purpose
) -> None:
    a, b, c = [await start(name) for name in "abc"]
    record = (await a.add(TOKENS)).record
    await copy_to(b, a, artifact=record.hash)
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)

    async def meet_b() -> None:
        await c.meet(b)

    began_s = trio.current_time()
    fetched = await fetch(c, record.hash, purpose, at_chunk=4, then=meet_b)
    assert fetched.record.complete
    assert fetched.delivered[b.network.peer_id].n_chunks >= 12
    # Alone it would have taken 20 s.
    assert trio.current_time() - began_s < 8


async def test_a_peer_that_gets_the_artifact_during_a_fetch_of_it_brings_chunks(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, b, c = [await start(name, tables=True) for name in "abc"]
    record = (await a.add(TOKENS)).record
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a, b)

    async def copy_to_b() -> None:
        await copy_to(b, a, artifact=record.hash)

    fetched = await fetch(c, record.hash, Purpose.REPLICATION, at_chunk=4, then=copy_to_b)
    assert fetched.record.complete
    assert fetched.delivered[b.network.peer_id].n_chunks >= 6


async def test_a_peer_that_serves_again_brings_chunks(autojump_clock: MockClock, world: World, start: Start) -> None:
    a, b, c = [await start(name) for name in "abc"]
    record = (await a.add(TOKENS)).record
    await copy_to(b, a, artifact=record.hash)
    world.set_link(a.network, c.network, SLOW)
    presences = {node.name: Presences(node.exchange) for node in (b, c)}
    await c.meet(a, b)
    presences["b"].become(PresenceState.PAUSED)
    b.exchange.serving = False
    await trio.sleep(1)

    async def serve_again() -> None:
        b.exchange.serving = True
        presences["b"].become(PresenceState.SERVING)

    fetched = await fetch(c, record.hash, Purpose.REPLICATION, at_chunk=4, then=serve_again)
    assert fetched.delivered[b.network.peer_id].n_chunks >= 12


@BOTH
async def test_a_fetch_goes_on_in_the_session_that_takes_the_place_of_the_one_it_began_in(
    autojump_clock: MockClock, world: World, start: Start, purpose: Purpose
) -> None:
    """As when a namespace is joined meanwhile: every session is closed and opened anew."""
    a, c = [await start(name) for name in "ac"]
    record = (await a.add(TOKENS)).record
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)
    fetched = await fetch(c, record.hash, purpose, at_chunk=4, then=a.exchange.reload)
    assert fetched.record.complete
    assert fetched.delivered[a.network.peer_id].n_chunks == len(record.entries)


async def lose_for(node: Node, other: Node, seconds: float) -> None:
    """A node loses its connection to another, and has it back later."""
    await node.network.disconnect(other.network.peer_id)
    await trio.sleep(seconds)
    await node.meet(other)


async def test_a_copy_goes_on_when_its_only_provider_is_back(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, c = [await start(name) for name in "ac"]
    record = (await a.add(TOKENS)).record
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)

    async def lose() -> None:
        await lose_for(c, a, 20.0)

    fetched = await fetch(c, record.hash, Purpose.REPLICATION, at_chunk=4, then=lose)
    assert fetched.record.complete
    # It has noticed at once that the peer is there again.
    assert fetched.seconds < 20 + 20 + 3


async def test_a_copy_goes_on_with_another_peer_that_turns_up_when_its_only_provider_is_gone(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, b, c = [await start(name) for name in "abc"]
    record = (await a.add(TOKENS)).record
    await copy_to(b, a, artifact=record.hash)
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)

    async def replace() -> None:
        world.kill(a.network)
        await trio.sleep(20)
        await c.meet(b)

    fetched = await fetch(c, record.hash, Purpose.REPLICATION, at_chunk=4, then=replace)
    assert fetched.record.complete
    assert fetched.delivered[b.network.peer_id].n_chunks >= 14


@pytest.mark.parametrize(("purpose", "ends_s"), [(Purpose.INTERACTIVE, 5.0), (Purpose.REPLICATION, PATIENCE_S + 15.0)])
async def test_a_fetch_whose_only_provider_does_not_come_back_ends_and_says_what_is_missing(
    autojump_clock: MockClock, world: World, start: Start, purpose: Purpose, ends_s: float
) -> None:
    a, c = [await start(name) for name in "ac"]
    record = (await a.add(TOKENS)).record
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)
    gone_s = 0.0

    async def kill() -> None:
        nonlocal gone_s
        gone_s = trio.current_time()
        world.kill(a.network)

    with pytest.RaisesGroup(pytest.RaisesExc(NotFoundError, match=r"1\d chunks are missing")):
        await fetch(c, record.hash, purpose, at_chunk=4, then=kill)
    assert trio.current_time() - gone_s < ends_s


# --- what is remembered of peers --------------------------------------------------------------------------------------


async def test_a_peer_that_turned_up_late_is_rated_by_the_time_it_was_asked_for(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, b, c = [await start(name) for name in "abc"]
    record = (await a.add(TOKENS)).record
    await copy_to(b, a, artifact=record.hash)
    world.set_link(a.network, c.network, SLOW)
    world.set_link(b.network, c.network, Link(latency_s=0.005, rate_bytes_per_s=640e3))
    await c.meet(a)

    async def meet_b() -> None:
        await c.meet(b)

    await fetch(c, record.hash, Purpose.INTERACTIVE, at_chunk=9, then=meet_b)
    assert c.exchange.fetcher.scores.rate_bytes_s(b.network.peer_id) > 300e3
    assert c.exchange.fetcher.scores.rate_bytes_s(a.network.peer_id) < 100e3


async def test_every_fetch_that_a_peer_brought_nothing_for_counts_against_it(
    autojump_clock: MockClock, world: World, start: Start, nursery: trio.Nursery
) -> None:
    a, c = [await start(name) for name in "ac"]
    record = (await a.add(TOKENS)).record

    async def breaks(stream: ByteStream, _request: GetChunks) -> None:
        await stream.reset()

    network = world.network("breaks")
    EvilPeer(network, (MINE,), relay_answer(record), breaks)
    await nursery.start(network.run)
    assert await c.exchange.connect(network.address) is not None
    for _ in range(2):
        with pytest.raises(NotFoundError):
            await c.fetch(record.hash)
    assert c.exchange.fetcher.scores.standing(network.peer_id, trio.current_time()) == pytest.approx(1 / 3, rel=0.02)


# --- order, and what is left of a fetch that is cut short -------------------------------------------------------------


async def in_part(node: Node, record: ArtifactRecord, source: Node, n_tokens: int) -> None:
    """Have a node hold the beginning of an artifact."""
    await node.meet(source)
    located = await node.exchange.fetcher.locate(record.hash)
    entries = await node.exchange.fetcher.chunk_list(located)
    fetched = await node.exchange.fetcher.fetch(located, entries, record.manifest.plan().needed_for(n_tokens))
    node.exchange.fetched(fetched)


async def cut_short(node: Node, artifact: ArtifactHash, purpose: Purpose, n_chunks: int) -> list[int]:
    """Fetch, and be cancelled after so many chunks: those that came, in order."""
    located = await node.exchange.fetcher.locate(artifact)
    entries = await node.exchange.fetcher.chunk_list(located)
    came: list[int] = []
    with trio.CancelScope() as scope:

        async def progress(event: FetchProgress) -> None:
            came.append(event.index)
            if len(came) == n_chunks:
                scope.cancel()

        await node.exchange.fetcher.fetch(located, entries, purpose=purpose, progress=progress)
    return came


async def half_and_whole(world: World, start: Start) -> tuple[Node, Node, ArtifactRecord]:
    """A node that fetches, beside one that holds all of an artifact and one that holds its first half."""
    a, b, c = [await start(name) for name in "abc"]
    record = (await a.add(TOKENS)).record
    await in_part(b, record, a, 2560)
    for other in (a, b):
        world.set_link(other.network, c.network, SLOW)
    await c.meet(a, b)
    return a, c, record


async def test_a_copy_begins_with_the_token_ids_and_what_is_rare_and_an_answer_with_the_front(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    _, c, record = await half_and_whole(world, start)
    second_half = set(range(len(record.entries))) - set(record.manifest.plan().needed_for(2560))
    rare = await cut_short(c, record.hash, Purpose.REPLICATION, 12)
    assert 0 in rare[:2]
    # Each of the two brings about half; the whole one what only it has.
    assert len(second_half.intersection(rare)) >= 4


async def test_a_copy_that_is_cut_short_is_reused_up_to_its_first_gap(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, c, record = await half_and_whole(world, start)
    cold = await c.generate(PROMPT, reuse=False)
    came = await cut_short(c, record.hash, Purpose.REPLICATION, 12)
    held = c.store.get(record.hash)
    assert held is not None
    assert not held.complete
    front = next(index for index in range(len(record.entries)) if index not in came)
    assert max(came) > front, "there is no gap"
    world.partition([c.network])
    answer = await c.generate(PROMPT)
    assert answer.text == cold.text
    assert answer.reused_tokens == (front - len(record.manifest.plan().token_chunks)) * 256
    # What has come is not fetched again.
    world.heal()
    await c.meet(a)
    fetched = await fetch(c, record.hash, Purpose.REPLICATION)
    assert fetched.record.complete
    assert fetched.fetched_chunks <= len(record.entries) - len(came)


async def test_a_copy_from_one_peer_that_is_cut_short_is_of_use_as_far_as_it_came(
    autojump_clock: MockClock, world: World, start: Start
) -> None:
    a, c = [await start(name) for name in "ac"]
    record = (await a.add(TOKENS)).record
    world.set_link(a.network, c.network, SLOW)
    await c.meet(a)
    assert await cut_short(c, record.hash, Purpose.REPLICATION, 9) == list(range(9))
    world.kill(a.network)
    answer = await c.generate(PROMPT)
    assert answer.reused_tokens == (9 - len(record.manifest.plan().token_chunks)) * 256
