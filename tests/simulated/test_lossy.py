"""Artifacts of a lossy codec on whole nodes: who uses them, and what may be made of them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.kv_state import ExportEvent, ExportRequest, Origin
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.errors import TrustError
from kvnet.exchange.node import NodeOptions
from kvnet.exchange.publisher import AddRequest, Publisher
from kvnet.exchange.reuse import Lossy, Rejected, find_local, judge
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Verdict
from kvnet.format.manifest import encode_manifest
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from tests.simulated.nodes import Node, identity, start_node

TOKENS = [3 + 11 * position % 200 for position in range(1000)]
PROMPT = [*TOKENS, 40, 41, 42]

PREFILL_S = 0.002
"""Seconds a token; the toy's K/V of a token is 256 bytes, and 96 in q8."""
BREAK_EVEN_BYTES_S = 256 / PREFILL_S
MACHINE = Machine(PrefillSpeed([SpeedPoint(0, 1 / PREFILL_S)]), restore_bytes_s=1e9)


async def node_with(
    world: World,
    nursery: trio.Nursery,
    directory: Path,
    name: str,
    lossy: Lossy,
    *,
    trusts: tuple[str, ...] = (),
) -> Node:
    costs = ToyCosts(prefill_s_per_token=PREFILL_S)
    who = identity(name, trusts=list(trusts))
    return await start_node(world, nursery, directory, name, who=who, options=NodeOptions(lossy=lossy), costs=costs)


def found(node: Node, lossy: Lossy, *, exact_only: bool = False) -> tuple[Codec | None, int, set[str]]:
    """Codec and tokens of what a lookup in the store takes, and the codes of what it turns down."""
    result = find_local(
        node.store,
        node.engine.info,
        node.identity,
        PROMPT,
        limit_tokens=len(PROMPT) - 1,
        exact_only=exact_only,
        lossy=lossy,
    )
    codes = {rejected.code for rejected in result.rejected}
    return (result.hit.manifest.codec, result.hit.n_tokens, codes) if result.hit else (None, 0, codes)


async def test_q8_is_another_artifact_of_the_same_prefix(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.NEVER)
    raw = (await a.add(TOKENS)).record
    added = await a.add(TOKENS, codec=Codec.Q8)
    q8 = added.record
    assert (added.reused_tokens, added.prefilled_tokens) == (len(TOKENS), 0)
    assert q8.hash != raw.hash
    assert q8.manifest.last_prefix_key == raw.manifest.last_prefix_key
    assert q8.manifest.codec is Codec.Q8
    assert a.store.tokens_of(q8.hash) == a.store.tokens_of(raw.hash) == TOKENS
    assert q8.manifest.total_size_bytes == 4 * len(TOKENS) + 96 * len(TOKENS)
    assert (await a.add(TOKENS, codec=Codec.Q8)).existed


async def test_q8_is_tolerant_at_best_and_says_why(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.ALWAYS)
    record = (await a.add(TOKENS, codec=Codec.Q8)).record
    manifest = record.manifest
    verdict = judge(manifest, record.hash, a.engine.info, a.identity, exact_only=False, lossy=Lossy.ALWAYS)
    assert not isinstance(verdict, Rejected)
    assert verdict.verdict is Verdict.TOLERANT
    assert verdict.differences == ("stored with the lossy codec q8",)


async def test_lossy_state_is_used_only_where_the_owner_allows_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.NEVER)
    await a.add(TOKENS, codec=Codec.Q8)
    assert found(a, Lossy.NEVER) == (None, 0, {"lossy"})
    for allowed in (Lossy.SLOW_LINKS, Lossy.ALWAYS):
        assert found(a, allowed) == (Codec.Q8, 1000, set())
        assert found(a, allowed, exact_only=True) == (None, 0, {"not_exact"})
    await a.add(TOKENS)
    assert found(a, Lossy.ALWAYS) == (Codec.RAW, 1000, set())


async def test_raw_is_computed_anew_where_only_lossy_state_is_held(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.ALWAYS)
    await a.add(TOKENS, codec=Codec.Q8)
    added = await a.add(PROMPT)
    assert (added.reused_tokens, added.prefilled_tokens) == (0, len(PROMPT))
    b = await node_with(world, nursery, tmp_path, "b", Lossy.NEVER)
    assert (await b.add(PROMPT)).record.entries == added.record.entries


async def test_what_extends_lossy_state_is_stored_as_lossy_and_shares_its_blocks(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.NEVER)
    first = (await a.add(TOKENS, codec=Codec.Q8)).record
    added = await a.add(PROMPT, codec=Codec.Q8)
    assert (added.reused_tokens, added.prefilled_tokens) == (1000, 3)
    assert added.record.manifest.codec is Codec.Q8
    assert added.record.entries[1:4] == first.entries[1:4]


async def test_a_conversation_that_began_with_lossy_state_is_kept_as_lossy(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.ALWAYS)
    question = ("user", "what did the keeper write down? " * 40)
    prompt = list((await a.ask_now(question, private=True)).reuse.prepared.tokens)
    await a.engine.drop_live()
    await a.add(prompt[:800], codec=Codec.Q8)
    told = await a.ask(question)
    assert (told.reuse.reused_tokens, told.reuse.verdict) == (800, Verdict.TOLERANT)
    codecs = {record.manifest.codec for record in a.store.artifacts()}
    assert codecs == {Codec.Q8}
    assert max(record.manifest.n_tokens for record in a.store.artifacts()) > 800


async def test_lossy_state_in_ram_is_not_published_as_raw(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.ALWAYS)
    question = ("user", "what did the keeper write down? " * 40)
    prompt = list((await a.ask_now(question, private=True)).reuse.prepared.tokens)
    await a.engine.drop_live()
    record = (await a.add(prompt[:800], codec=Codec.Q8)).record
    # Answered, and left in RAM; the keeper of this node is told that lossy state is none of its business.
    a.keeper.lossy = Lossy.NEVER
    await a.ask(question)
    assert [each.hash for each in a.store.artifacts()] == [record.hash]
    assert a.keeper.counters()["keep_not_allowed"] == 1
    publisher = Publisher(a.store, a.lane, a.identity)
    with pytest.raises(TrustError, match="lossy codec q8"):
        await publisher.add(
            a.engine, AddRequest(prompt[:850], b"", Codec.RAW, pinned=True, created_s=1_800_000_000, prefill=False)
        )
    added = await a.add(prompt[:850])
    assert (added.reused_tokens, added.prefilled_tokens) == (0, 850)
    b = await node_with(world, nursery, tmp_path, "b", Lossy.NEVER)
    assert (await b.add(prompt[:850])).record.entries == added.record.entries


class BegunWithLossy(ToyEngine):
    """What it holds live came out of a lossy artifact, until it is dropped."""

    origins: tuple[Origin, ...] = ()
    dropped = 0

    async def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        async with aclosing(super().export(request)) as events:
            async for event in events:
                yield replace(event, origins=self.origins)

    async def drop_live(self) -> None:
        await super().drop_live()
        self.origins = ()
        self.dropped += 1


async def test_an_add_drops_live_state_that_began_as_lossy_and_computes_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await node_with(world, nursery, tmp_path, "a", Lossy.ALWAYS)
    record = (await a.add(TOKENS, codec=Codec.Q8)).record
    engine = BegunWithLossy(tmp_path / "toy-model", ToyCosts(), 1 << 20, 1 << 40)
    engine.origins = (Origin(encode_manifest(record.manifest), 1000),)
    publisher = Publisher(a.store, a.lane, a.identity)
    added = await publisher.add(
        engine, AddRequest(PROMPT, b"", Codec.RAW, pinned=True, created_s=1_800_000_000, prefill=True)
    )
    assert engine.dropped == 1
    assert added.record.manifest.codec is Codec.RAW
    await engine.aclose()


SLOW, FAST = 0.6, 100.0
"""Rates as shares of what raw needs to be worth fetching; q8 needs three eighths of that."""


async def measured_pair(
    world: World, nursery: trio.Nursery, directory: Path, lossy: Lossy, share: float, codecs: tuple[Codec, ...]
) -> tuple[Node, Node]:
    """a has the prompt's beginning in these codecs; b knows itself and its link to a."""
    a = await node_with(world, nursery, directory, "a", Lossy.NEVER)
    b = await node_with(world, nursery, directory, "b", lossy, trusts=("a",))
    world.set_link(a.network, b.network, Link(latency_s=0.005, rate_bytes_per_s=share * BREAK_EVEN_BYTES_S))
    await b.meet(a)
    other = [5 + position % 90 for position in range(3000)]
    await b.fetch((await a.add(other)).record.hash)
    for codec in codecs:
        await a.add(LONG, codec=codec)
    return a, b


LONG = [3 + 11 * position % 200 + position // 800 for position in range(8000)]


@pytest.mark.parametrize(
    ("lossy", "share", "offered", "taken"),
    [
        (Lossy.NEVER, FAST, (Codec.RAW, Codec.Q8), Codec.RAW),
        (Lossy.NEVER, SLOW, (Codec.RAW, Codec.Q8), None),
        (Lossy.NEVER, FAST, (Codec.Q8,), None),
        (Lossy.SLOW_LINKS, FAST, (Codec.RAW, Codec.Q8), Codec.RAW),
        (Lossy.SLOW_LINKS, FAST, (Codec.Q8,), None),
        (Lossy.SLOW_LINKS, SLOW, (Codec.RAW, Codec.Q8), Codec.Q8),
        (Lossy.SLOW_LINKS, SLOW, (Codec.Q8,), Codec.Q8),
        (Lossy.ALWAYS, FAST, (Codec.RAW, Codec.Q8), Codec.Q8),
        (Lossy.ALWAYS, SLOW, (Codec.RAW, Codec.Q8), Codec.Q8),
    ],
)
async def test_link_and_policy_choose_the_codec(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    lossy: Lossy,
    share: float,
    offered: tuple[Codec, ...],
    taken: Codec | None,
) -> None:
    _, b = await measured_pair(world, nursery, tmp_path, lossy, share, offered)
    search = await b.exchange.finder.search(
        b.engine.info, [*LONG, 7, 7], 0, prefill_tokens_s=1 / PREFILL_S, machine=MACHINE
    )
    if taken is None:
        assert search.fetched is None
        assert any("lossy codec q8" in reason or "computing" in reason for reason in search.reasons)
        return
    assert search.fetched is not None
    record = b.store.get(search.fetched.artifact)
    assert record is not None
    assert (record.manifest.codec, search.fetched.n_tokens) == (taken, len(LONG))


async def test_without_a_measured_machine_slow_links_take_nothing_lossy(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    _, b = await measured_pair(world, nursery, tmp_path, Lossy.SLOW_LINKS, SLOW, (Codec.Q8,))
    search = await b.exchange.finder.search(b.engine.info, [*LONG, 7, 7], 0)
    assert search.fetched is None
    assert any("not measured yet" in reason for reason in search.reasons)
