"""Completions with a real engine and a real store: from RAM, from disk, and many at once."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from kvnet.engine.client import EngineClient
from kvnet.engine.prompts import PromptKind
from kvnet.exchange.answers import Asked, Body, Finished, Reuse, Started
from kvnet.exchange.completion import Completer
from kvnet.exchange.keeping import Keeper
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.prefix_reuse import PrefixReuse
from kvnet.exchange.publisher import Publisher
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.store.disk import DiskStore
from tests.simulated.nodes import FixedSpeeds, identity

MAX_TOKENS = 12
SYSTEM = {"role": "system", "content": "You answer briefly, and in order. " * 40}


def question(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"Question {n}: what comes after {n * 7919}? " * 3}


@dataclass
class Bench:
    """A completer with everything it needs."""

    engine: EngineClient
    store: DiskStore
    keeper: Keeper
    completer: Completer
    used: list[Finished] = field(default_factory=list)

    async def ask(self, *messages: dict[str, str], reuse: bool = True, private: bool = False) -> tuple[str, Reuse]:
        """The text of an answer, and what was reused for it."""
        body = json.dumps({"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}).encode()
        asked = Asked(PromptKind.CHAT, body, {}, MAX_TOKENS, reuse=reuse, private=private)
        text, started = b"", None
        async for event in self.completer.complete(self.engine, asked):
            match event:
                case Started():
                    started = event
                case Body(data):
                    text += data
                case Finished():
                    pass
        assert started is not None
        answer = json.loads(text)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == started.reuse.reused_tokens
        assert answer["usage"]["cache_creation_input_tokens"] == started.reuse.created_tokens
        return answer["choices"][0]["message"]["content"], started.reuse


@pytest.fixture
async def bench(engine: EngineClient, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Bench]:
    """A completer over the tiny llama."""
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 34, min_free_bytes=0)
    lane, keepers_lane, who = ThreadLane(), ThreadLane(), identity("a")
    keeper = Keeper(store, keepers_lane, who, Publisher(store, keepers_lane, who))
    await nursery.start(keeper.run)
    used: list[Finished] = []
    completer = Completer(PrefixReuse(store, lane, who, None), speeds=FixedSpeeds(), keeper=keeper, used=used.append)
    yield Bench(engine, store, keeper, completer, used)
    with trio.fail_after(120):
        await completer.drain()
    store.close()


async def test_a_conversation_goes_on_from_ram_and_after_that_from_disk_with_the_same_answers(bench: Bench) -> None:
    talk = [SYSTEM]
    for n in range(3):
        talk.append(question(n))
        text, reuse = await bench.ask(*talk)
        assert reuse.source == ("ram" if n else "none")
        talk.append({"role": "assistant", "content": text})
        await bench.keeper.wait_idle()
    assert bench.keeper.counters()["kept"] >= 2
    records = bench.store.artifacts()
    assert [record.manifest.n_tokens % BLOCK_TOKENS for record in records] == [0]
    del talk[-1]
    cold, _ = await bench.ask(*talk, reuse=False, private=True)
    await bench.engine.drop_live()
    warm, reuse = await bench.ask(*talk, private=True)
    assert (reuse.source, reuse.reused_tokens) == ("disk", records[0].manifest.n_tokens)
    assert warm == cold == text
    assert len(bench.used) == 3


async def test_many_at_once_over_one_prefix_answer_as_each_does_alone_while_it_is_kept(bench: Bench) -> None:
    alone = [(await bench.ask(SYSTEM, question(n), reuse=False, private=True))[0] for n in range(8)]
    for _ in range(3):
        await bench.engine.drop_live()
        together: dict[int, str] = {}

        async def ask(n: int, answers: dict[int, str]) -> None:
            answers[n] = (await bench.ask(SYSTEM, question(n)))[0]

        async with trio.open_nursery() as askers:
            for n in range(8):
                askers.start_soon(ask, n, together)
        assert [together[n] for n in range(8)] == alone
        await bench.keeper.wait_idle()
    shared = bench.store.artifacts()[0].manifest.n_tokens // BLOCK_TOKENS
    assert shared >= 1
