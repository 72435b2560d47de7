"""Samples are made when nobody waits, and what was found is known at the next start."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.model_folder import ModelEntry, inspect_model
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.errors import BusyError
from kvnet.exchange.measured import Measurements
from kvnet.network.memory import World
from kvnet_node.config import load_config
from kvnet_node.engines import EngineShelf
from kvnet_node.model_matching import REST_S, RETRY_S, ModelMatching
from kvnet_node.paths import DataPaths
from tests.simulated.nodes import Node, StartNode, start_node
from tests.unit.node.test_engines import make_model


class Engines:
    """Opens toy engines; counts the samples they make, and lets the first ones fail."""

    def __init__(self) -> None:
        self.made = 0
        self.failures = 0
        self.error = 0.0

    @asynccontextmanager
    async def open(self, model_path: Path, **_: Any) -> AsyncIterator[ToyEngine]:
        engines = self

        class Counting(ToyEngine):
            async def sample(self) -> bytes:
                if engines.failures:
                    engines.failures -= 1
                    raise BusyError("no room")
                engines.made += 1
                return await super().sample()

        engine = Counting(model_path, ToyCosts(), 1 << 20, 1 << 40)
        engine.error = self.error
        yield engine
        await engine.aclose()


@pytest.fixture
def start(world: World, nursery: trio.Nursery, tmp_path: Path) -> StartNode:
    return partial(start_node, world, nursery, tmp_path / "nodes")


class Matched:
    """A node that compares its models with those of others.

    Args:
        node: the node.
        directory: its data directory.
    """

    def __init__(self, node: Node, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.node = node
        self.engines = Engines()
        paths = DataPaths(directory)
        config = load_config(directory, environment={"KVNET_ENGINE_IDLE_UNLOAD_S": "100000"})
        self.shelf = EngineShelf(config, paths, self.engines.open)
        self.numerics = Measurements()
        self.matching = ModelMatching(paths, self.shelf, self.numerics, node.exchange, node.lane)

    async def run(self, nursery: trio.Nursery) -> "Matched":
        """Hold it until the nursery ends."""
        await self.matching.load()
        await nursery.start(self.shelf.run)
        await nursery.start(self.matching.run)
        return self


def entry(directory: Path, name: str = "toy") -> ModelEntry:
    found = inspect_model(make_model(directory, name))
    assert found is not None
    return found


async def test_a_sample_is_made_of_a_model_at_rest_and_not_of_one_in_use(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    matched = await Matched(await start("a"), tmp_path / "a").run(nursery)
    model = entry(tmp_path)
    async with matched.shelf.use_entry(model):
        await trio.sleep(10 * REST_S)
        assert matched.engines.made == 0
        # That it is here is told all the same.
        assert [own.here.name for own in matched.matching.book.models()] == [model.name]
    await trio.sleep(REST_S / 2)
    assert matched.engines.made == 0
    await trio.sleep(2 * REST_S)
    assert matched.engines.made == 1
    await trio.sleep(10 * REST_S)
    assert matched.engines.made == 1
    (own,) = matched.matching.book.models()
    assert own.sample


async def test_a_sample_that_found_no_room_is_made_another_time(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    matched = await Matched(await start("a"), tmp_path / "a").run(nursery)
    matched.engines.failures = 1
    async with matched.shelf.use_entry(entry(tmp_path)):
        pass
    await trio.sleep(4 * REST_S)
    assert matched.engines.made == 0
    # That the model is here is known without a sample.
    assert [own.sample for own in matched.matching.book.models()] == [b""]
    await trio.sleep(RETRY_S)
    assert matched.engines.made == 1


async def test_nothing_is_computed_or_asked_unasked_on_battery(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a"), await start("b")
    matched = await Matched(a, tmp_path / "a").run(nursery)
    beside = await Matched(b, tmp_path / "b").run(nursery)
    matched.matching.exchange.unasked = lambda: False
    model = entry(tmp_path)
    await beside.matching.know(model)
    async with matched.shelf.use_entry(model):
        pass
    await a.meet(b)
    await trio.sleep(10 * REST_S)
    assert matched.engines.made == 0
    assert matched.matching.exchange.of(b.network.peer_id) == []
    # What is asked for is done all the same.
    assert await matched.matching.know(model) == ""
    await matched.matching.refresh(5.0)
    (found,) = matched.matching.exchange.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.measured is not None


async def test_a_model_is_loaded_for_its_sample_only_when_that_is_asked_for(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    matched = await Matched(await start("a"), tmp_path / "a").run(nursery)
    model = entry(tmp_path)
    await trio.sleep(10 * REST_S)
    assert matched.shelf.loaded() == []
    loading: list[str] = []
    assert await matched.matching.know(model, loading.append) == ""
    assert (loading, matched.engines.made) == ([model.name], 1)
    assert await matched.matching.know(model, loading.append) == ""
    assert (loading, matched.engines.made) == ([model.name], 1)
    matched.engines.failures = 1
    assert "no room" in await matched.matching.know(entry(tmp_path, "second"))


async def test_what_was_found_of_a_peer_is_known_at_the_next_start(
    autojump_clock: MockClock, start: StartNode, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = await start("a"), await start("b")
    here, there = Matched(a, tmp_path / "a"), Matched(b, tmp_path / "b")
    there.engines.error = 0.5
    model = entry(tmp_path)
    for matched in (here, there):
        await matched.run(nursery)
        await matched.matching.know(model)
    await a.meet(b)
    await trio.sleep(1.0)
    (found,) = here.matching.exchange.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.measured is not None
    assert not found.match.measured.tolerated
    await trio.sleep(1.0)
    again = Measurements()
    later = ModelMatching(DataPaths(tmp_path / "a"), here.shelf, again, b.exchange, b.lane, meet=False)
    await later.load()
    assert again.all() == here.numerics.all()
    assert [own.here.name for own in later.book.models()] == [model.name]
