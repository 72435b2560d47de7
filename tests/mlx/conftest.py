"""Tiny models on disk and engines in their own processes."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from kvnet.engine.client import EngineClient, open_engine
from tests.mlx import tinymodels


class Opener(Protocol):
    def __call__(
        self, model: Path, *, memory_budget_bytes: int | None = None, digest_cache: Path | None = None
    ) -> AbstractAsyncContextManager[EngineClient]: ...


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, full attention, float32."""
    return tinymodels.write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    """Opens an engine process; its private folder is the test's."""

    def opened(
        model: Path, *, memory_budget_bytes: int | None = None, digest_cache: Path | None = None
    ) -> AbstractAsyncContextManager[EngineClient]:
        return open_engine(model, digest_cache=digest_cache, work_dir=tmp_path, memory_budget_bytes=memory_budget_bytes)

    return opened


@pytest.fixture
async def engine(opener: Opener, tiny_llama: Path) -> AsyncIterator[EngineClient]:
    """An engine with the tiny llama."""
    async with opener(tiny_llama) as opened:
        yield opened
