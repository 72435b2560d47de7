"""Several models in memory at once share what the device has."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.engine.client import EngineClient, open_engine
from kvnet.errors import CrowdedError, EngineCrashedError
from kvnet_node.config import load_config
from kvnet_node.engines import EngineShelf
from kvnet_node.paths import DataPaths
from tests.mlx import tinymodels
from tests.mlx.completing import complete, told

pytestmark = pytest.mark.mlx

BUDGET_BYTES = 2_400_000
"""Two tiny models and their part of K/V, but not the K/V of a long prompt beside both."""


@asynccontextmanager
async def open_small(model_path: Path, **options: Any) -> AsyncIterator[EngineClient]:
    async with open_engine(model_path, **{**options, "memory_budget_bytes": BUDGET_BYTES}) as engine:
        yield engine


def talk(n_tokens: int) -> dict[str, Any]:
    """About so many tokens: the tiny models' tokens are bytes."""
    return {"messages": [{"role": "user", "content": "x" * n_tokens}], "max_tokens": 4}


async def test_two_models_share_the_memory_and_each_answers_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("one", "two"):
        tinymodels.write_model(tmp_path / "models" / name)
    engines = EngineShelf(load_config(tmp_path, environment={}), DataPaths(tmp_path), open_small)
    async with trio.open_nursery() as nursery:
        await nursery.start(engines.run)
        async with engines.use("one") as one:
            free_bytes = BUDGET_BYTES - one.info.weights_size_bytes
            room_tokens = free_bytes // one.info.kv_bytes_per_token
            # The second's weights count as much as the first's.
            shared_tokens = (free_bytes - one.info.weights_size_bytes) // 2 // one.info.kv_bytes_per_token
            assert shared_tokens > 600
            alone = await complete(one, talk(300), live=True)
            long = await complete(one, talk(room_tokens - 400), live=True)
            async with engines.use("two") as two:
                assert (await one.live()).size_bytes <= free_bytes // 4
                assert told((await complete(one, talk(300), live=True)).body) == told(alone.body)
                assert told((await complete(two, talk(300), live=True)).body)["text"]
                # A process that is started anew has the limit of the one that ended.
                assert isinstance(one, EngineClient)
                assert one.process_id is not None
                os.kill(one.process_id, signal.SIGKILL)
                with pytest.raises(EngineCrashedError):
                    await complete(one, talk(300))
        with pytest.raises(CrowdedError, match="other models in memory leave"):
            async with engines.use("one") as one:
                await complete(one, talk(room_tokens - 400), live=True)
        with trio.fail_after(120):
            while engines.loaded() != ["one"]:  # noqa: ASYNC110 - nobody is told when an unused engine is gone
                await trio.sleep(0.01)
        async with engines.use("one") as one:
            with trio.fail_after(120):
                while engines._loaded[one.info.path].held_bytes < BUDGET_BYTES:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.01)
            assert told((await complete(one, talk(room_tokens - 400), live=True)).body) == told(long.body)
        nursery.cancel_scope.cancel()
