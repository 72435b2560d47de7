"""An add that ends early keeps the whole blocks it has computed, and the next one goes on from them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.kv_state import ExportEvent, ExportRequest, Origin, PrefillProgress
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.engine.toy_model import PREFILL_STEP
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.publisher import Added, AddRequest, Publisher
from kvnet.exchange.unfinished import Beginning, EarlyEnd
from kvnet.format.codecs import Codec
from kvnet.format.hashes import ChunkHash
from kvnet.format.manifest import encode_manifest
from kvnet.store.disk import DiskStore
from kvnet.trust.policy import Accepted
from tests.simulated.nodes import identity

TOKENS = [1, *(3 + n % 251 for n in range(1799))]
STEP_S = 1.0
COSTS = ToyCosts(prefill_s_per_token=STEP_S / PREFILL_STEP)


class Lying(ToyEngine):
    """Tells of other bytes than it has written, and of a live cache when it is given one."""

    origins: tuple[Origin, ...] = ()
    lies = False

    async def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        async with aclosing(super().export(request)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress):
                    written = event.written
                    if self.lies:
                        written = tuple(replace(chunk, hash=ChunkHash(bytes(32))) for chunk in written)
                    yield replace(event, written=written, origins=self.origins)
                else:
                    yield event


@dataclass
class Adding:
    """A publisher with a store of its own, and what it said of adds that ended early."""

    directory: Path
    name: str = "a"
    trusts: tuple[str, ...] = ()
    kept: list[Beginning] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = DiskStore.open(self.directory / self.name, quota_bytes=1 << 30, min_free_bytes=0)
        self.identity = identity(self.name, trusts=self.trusts)
        self.publisher = Publisher(self.store, InlineLane(), self.identity)
        self.engine = Lying(self.directory / "toy-model", COSTS, 1 << 20, 1 << 40)

    async def add(self, *, seconds: float = 1e9, codec: Codec = Codec.RAW) -> Added | None:
        """Add the text; None when it did not end within so many seconds."""
        request = AddRequest(TOKENS, b'{"messages":[]}', codec, pinned=True, created_s=1_800_000_000)
        early = EarlyEnd(lambda _: None, self.kept.append, self.lost.append)
        done: list[Added] = []
        with trio.move_on_after(seconds):
            done.append(await self.publisher.add(self.engine, request, early=early))
        return done[0] if done else None

    def check(self) -> None:
        """Everything held matches its hash."""
        for record in self.store.artifacts():
            found = self.store.verify(record.hash)
            assert (found.bad, found.missing) == ((), ())


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.SHUFFLE_ZSTD1])
async def test_an_interrupted_add_is_gone_on_with_and_ends_as_if_it_had_not_been(
    tmp_path: Path, autojump_clock: MockClock, codec: Codec
) -> None:
    one, straight = Adding(tmp_path), Adding(tmp_path, "straight")
    assert await one.add(seconds=2.5, codec=codec) is None
    (kept,) = one.kept
    assert kept.record.manifest.n_tokens == 2 * PREFILL_STEP
    assert (kept.record.complete, kept.record.pinned) == (True, False)
    assert one.store.tokens_of(kept.record.hash) == TOKENS[: 2 * PREFILL_STEP]
    assert one.store.context_of(kept.record.hash) in (None, b"")
    one.check()

    added, at_once = await one.add(codec=codec), await straight.add(codec=codec)
    assert added is not None
    assert at_once is not None
    assert (added.reused_tokens, added.prefilled_tokens) == (2 * PREFILL_STEP, 1800 - 2 * PREFILL_STEP)
    assert added.superseded == kept.record.hash
    assert [record.hash for record in one.store.artifacts()] == [added.record.hash]
    assert added.record.manifest.root == at_once.record.manifest.root
    assert added.record.pinned
    one.check()


async def test_a_second_interruption_takes_the_place_of_the_first(tmp_path: Path, autojump_clock: MockClock) -> None:
    one = Adding(tmp_path)
    await one.add(seconds=1.5)
    await one.add(seconds=2.5)
    first, second = one.kept
    assert second.superseded == first.record.hash
    assert second.record.manifest.n_tokens == 3 * PREFILL_STEP
    assert [record.hash for record in one.store.artifacts()] == [second.record.hash]
    one.check()


async def test_less_than_a_block_beyond_what_is_held_is_not_kept_and_that_is_said(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Adding(tmp_path)
    await one.add(seconds=0.5)
    await one.add(seconds=1.5)
    await one.add(seconds=0.5)
    assert [kept.record.manifest.n_tokens for kept in one.kept] == [PREFILL_STEP]
    assert len(one.lost) == 2
    assert "256 tokens" in one.lost[0]
    assert len(one.store.artifacts()) == 1


async def test_garbage_collection_may_take_a_beginning_and_leaves_what_was_pinned(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Adding(tmp_path)
    await one.add(seconds=2.5)
    one.store.collect_garbage(everything=True)
    assert one.store.artifacts() == []
    added = await one.add()
    assert added is not None
    assert (added.reused_tokens, added.superseded) == (0, None)


async def test_a_beginning_that_somebody_pinned_stays(tmp_path: Path, autojump_clock: MockClock) -> None:
    one = Adding(tmp_path)
    await one.add(seconds=2.5)
    one.store.pin(one.kept[0].record.hash)
    added = await one.add()
    assert added is not None
    assert added.superseded is None
    assert len(one.store.artifacts()) == 2


async def test_tiles_that_are_not_those_the_engine_told_of_are_not_kept(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Adding(tmp_path)
    one.engine.lies = True
    await one.add(seconds=2.5)
    assert one.kept == []
    assert "hash" in one.lost[0]
    assert one.store.artifacts() == []


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_beginning_names_whom_a_live_cache_came_from_and_is_not_kept_without_trust(
    tmp_path: Path, autojump_clock: MockClock, *, trusted: bool
) -> None:
    friend = Adding(tmp_path, "friend")
    theirs = await friend.add()
    assert theirs is not None
    one = Adding(tmp_path, trusts=("friend",) if trusted else ())
    assert isinstance(one.identity.policy().judge(theirs.record.manifest), Accepted) == trusted
    one.engine.origins = (Origin(encode_manifest(theirs.record.manifest), 300),)
    await one.add(seconds=2.5)
    if not trusted:
        assert (one.kept, len(one.lost)) == ([], 1)
        return
    (span,) = one.kept[0].record.manifest.derived_from
    assert (span.artifact, span.first_block, span.last_block) == (theirs.record.hash, 0, 1)
