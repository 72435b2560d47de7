"""Engine processes of this node: started at first use, kept while they may be wanted again."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from kvnet.engine.interface import Engine, OpenEngine
from kvnet.engine.models import ModelEntry, choose_model
from kvnet_node.config import Config
from kvnet_node.models import demo_models_dir, models_here
from kvnet_node.paths import DataPaths

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

MAX_IDLE_ENGINES = 1
"""Loaded models that nobody uses at the moment; one more is ended first. Weights are most of a machine's memory."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Loaded:
    entry: ModelEntry
    engine: Engine
    end: trio.Event
    ended: trio.Event = field(default_factory=trio.Event)
    users: int = 0


class EngineShelf:
    """The engines of one node.

    Args:
        config: which models to look at, and the default one.
        paths: where engines may write.
        open_engine: starts an engine process.
    """

    def __init__(self, config: Config, paths: DataPaths, open_engine: OpenEngine) -> None:
        self._config = config
        self._paths = paths
        self._open_engine = open_engine
        self._nursery: trio.Nursery | None = None
        self._loaded: dict[Path, _Loaded] = {}
        self._starting = trio.Lock()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Hold engines until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def models(self) -> list[ModelEntry]:
        """Every model on this machine; reads folders."""
        return models_here(self._config, self._paths.data_dir)

    async def choose(self, model: str | None) -> ModelEntry:
        """The model to use: the one named, else the default, else the only shareable one.

        The demo's model is nobody's choice beside one of their own.

        Raises:
            UnknownModelError: none of these gives exactly one.
        """
        entries = await trio.to_thread.run_sync(self.models)
        default = self._config.model_default or None
        own = [entry for entry in entries if entry.path.parent != demo_models_dir()]
        if not model and not default and any(entry.shareable for entry in own):
            entries = own
        return choose_model(model, default, entries)

    @property
    def digest_cache(self) -> Path:
        """The file that remembers hashes of weights between starts."""
        return self._paths.engine_dir / "weight-digests.json"

    def prepare_work_dir(self) -> Path:
        """The folder engines may write to, made when it is missing."""
        self._paths.engine_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._paths.engine_dir

    def loaded(self) -> list[str]:
        """Names of the models in memory."""
        return [loaded.entry.name for loaded in self._loaded.values()]

    @asynccontextmanager
    async def use(self, model: str | None, loading: Callable[[str], None] = lambda _: None) -> AsyncIterator[Engine]:
        """The engine of a model, loaded if it is not; it stays at least as long as the context.

        Args:
            model: its name or folder; None for the default.
            loading: told the model's name before it is loaded, which takes seconds.

        Raises:
            UnknownModelError: no such model, or none chosen.
            EngineError: it cannot be loaded.
        """
        loaded = await self._get(await self.choose(model), loading)
        try:
            yield loaded.engine
        finally:
            loaded.users -= 1

    async def _get(self, entry: ModelEntry, loading: Callable[[str], None]) -> _Loaded:
        async with self._starting:
            loaded = self._loaded.get(entry.path)
            if loaded is None:
                loading(entry.name)
                await self._make_room()
                loaded = await self._start(entry)
            loaded.users += 1
            return loaded

    async def _make_room(self) -> None:
        idle = [loaded for loaded in self._loaded.values() if loaded.users == 0]
        for loaded in idle[: max(0, len(idle) - MAX_IDLE_ENGINES + 1)]:
            loaded.end.set()
            await loaded.ended.wait()

    async def _start(self, entry: ModelEntry) -> _Loaded:
        if self._nursery is None:
            raise RuntimeError("the engine shelf is not running")
        loaded: _Loaded = await self._nursery.start(self._hold, entry)
        return loaded

    async def _hold(self, entry: ModelEntry, *, task_status: "TaskStatus[_Loaded]" = trio.TASK_STATUS_IGNORED) -> None:
        work_dir = self.prepare_work_dir()
        async with self._open_engine(entry.path, digest_cache=self.digest_cache, work_dir=work_dir) as engine:
            loaded = _Loaded(entry, engine, trio.Event())
            self._loaded[entry.path] = loaded
            _log.info("engine started", model=entry.name)
            task_status.started(loaded)
            try:
                await loaded.end.wait()
            finally:
                self._loaded.pop(entry.path, None)
        loaded.ended.set()
        _log.info("engine ended", model=entry.name)
