"""Engine processes of this node: started at first use, ended when nobody has used them for a while or for room."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from kvnet.engine.interface import Engine, OpenEngine
from kvnet.engine.model_folder import ModelEntry
from kvnet.engine.models import choose_model
from kvnet.errors import BusyError, CrowdedError, EngineError, UnknownModelError
from kvnet.network.news import News
from kvnet_node.config import Config
from kvnet_node.failures import leaf_of
from kvnet_node.models import demo_models_dir, models_here
from kvnet_node.output import format_bytes
from kvnet_node.paths import DataPaths

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

_log = structlog.get_logger(__name__)

# How old the list of models may be from which a status names the one that requests get that name none.
_DEFAULT_AGE_S = 5.0


@dataclass(slots=True)
class _Loaded:
    """An engine in memory. ``changed`` tells when its users or its end change.

    Attributes:
        held_bytes: what it may have in use: what it was told, or more while requests it had begun need that.
        share_bytes: what it should have.
    """

    entry: ModelEntry
    engine: Engine
    idle_since: float
    held_bytes: int = 0
    share_bytes: int = 0
    users: int = 0
    end: bool = False
    changed: News = field(default_factory=News)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def weights_bytes(self) -> int:
        return self.engine.info.weights_size_bytes


@dataclass(slots=True)
class _Loading:
    """An engine on its way, and then what became of it."""

    weights_bytes: int
    done: trio.Event = field(default_factory=trio.Event)
    loaded: _Loaded | None = None
    failure: BaseException = field(default_factory=lambda: EngineError("the node is about to stop"))


class EngineShelf:
    """The engines of one node.

    Args:
        config: which models to look at, the default one, and how long an unused engine stays.
        paths: where engines may write.
        open_engine: starts an engine process.
    """

    def __init__(self, config: Config, paths: DataPaths, open_engine: OpenEngine) -> None:
        self._config = config
        self._paths = paths
        self._open_engine = open_engine
        self._nursery: trio.Nursery | None = None
        self._loaded: dict[Path, _Loaded] = {}
        self._loading: dict[Path, _Loading] = {}
        self._starting = trio.Lock()
        self._sharing = trio.Lock()
        self._scan: tuple[float, list[ModelEntry]] | None = None
        self._failed: dict[Path, str] = {}

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Hold engines until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def models(self) -> list[ModelEntry]:
        """Every model on this machine; reads folders."""
        return models_here(self._config, self._paths.data_dir)

    async def entries(self, *, max_age_s: float = 0.0) -> list[ModelEntry]:
        """Every model on this machine, from folders read at most ``max_age_s`` seconds ago."""
        now = trio.current_time()
        if self._scan is None or now - self._scan[0] > max_age_s or not max_age_s:
            self._scan = (now, await trio.to_thread.run_sync(self.models))
        return self._scan[1]

    async def choose(self, model: str | None, *, max_age_s: float = 0.0) -> ModelEntry:
        """The model to use: the one named, else the default, else the only shareable one.

        The demo's model is nobody's choice beside one of their own.

        Args:
            model: a name or folder, or None.
            max_age_s: how old the list of models may be; what is not in an older one is looked for anew.

        Raises:
            UnknownModelError: none of these gives exactly one.
        """
        if max_age_s:
            try:
                return self._chosen(model, await self.entries(max_age_s=max_age_s))
            except UnknownModelError:
                pass
        return self._chosen(model, await self.entries())

    def _chosen(self, model: str | None, entries: list[ModelEntry]) -> ModelEntry:
        default = self._config.model_default or None
        own = [entry for entry in entries if entry.path.parent != demo_models_dir()]
        if not model and not default and any(entry.shareable for entry in own):
            entries = own
        return choose_model(model, default, entries)

    async def default(self) -> tuple[str, str]:
        """The model of requests that name none, or "" and why there is none."""
        try:
            return (await self.choose(None, max_age_s=_DEFAULT_AGE_S)).name, ""
        except UnknownModelError as error:
            return "", f"{error}; {error.hint}" if error.hint else str(error)

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

    def engines(self) -> list[Engine]:
        """The engines of the models in memory."""
        return [loaded.engine for loaded in self._loaded.values()]

    def in_memory(self) -> list[tuple[ModelEntry, Engine]]:
        """The models in memory, with their engines."""
        return [(each.entry, each.engine) for each in self._loaded.values()]

    def at_rest(self, seconds: float) -> list[tuple[ModelEntry, Engine]]:
        """The models in memory that nobody has used for so many seconds, with their engines."""
        since = trio.current_time() - seconds
        resting = [each for each in self._loaded.values() if not each.users and not each.end]
        return [(each.entry, each.engine) for each in resting if each.idle_since <= since]

    def failure(self) -> str:
        """Why the last attempt to load a model failed, while none has been loaded since; else ""."""
        return next(iter(self._failed.values()), "")

    @asynccontextmanager
    async def use(self, model: str | None, loading: Callable[[str], None] = lambda _: None) -> AsyncIterator[Engine]:
        """The engine of a model, loaded if it is not; it stays at least as long as the context.

        Args:
            model: its name or folder; None for the default.
            loading: told the model's name before it is loaded, which takes seconds.

        Raises:
            UnknownModelError: no such model, or none chosen.
            EngineError: it cannot be loaded.
            BusyError: what is loaded and in use leaves no room for its weights.
        """
        async with self.use_entry(await self.choose(model), loading) as engine:
            yield engine

    @asynccontextmanager
    async def use_entry(
        self, entry: ModelEntry, loading: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[Engine]:
        """As ``use``, for a model that was chosen already."""
        loaded = await self._get(entry, loading)
        try:
            yield loaded.engine
        except Exception as error:
            if isinstance(leaf_of(error), CrowdedError):
                self._end_unused_beside(loaded)
            raise
        finally:
            loaded.users -= 1
            loaded.idle_since = trio.current_time()
            loaded.changed.tell()
            if loaded.held_bytes > loaded.share_bytes and self._nursery is not None:
                # What its requests held beyond its share is for the others.
                self._nursery.start_soon(self._share)

    async def _get(self, entry: ModelEntry, loading: Callable[[str], None]) -> _Loaded:
        # Whoever asks for a model while it is being loaded waits here, and finds it loaded.
        async with self._starting:
            loaded = self._loaded.get(entry.path)
            if loaded is None or loaded.end:
                if loaded is not None:
                    await loaded.ended.wait()
                loading(entry.name)
                if entry.path not in self._loading:
                    await self._make_room(entry)
                loaded = await self._start(entry)
            loaded.users += 1
            loaded.changed.tell()
            return loaded

    async def _make_room(self, entry: ModelEntry) -> None:
        """End unused engines, the longest unused first, until the weights fit beside what those in use hold.

        Raises:
            BusyError: they do not.
        """
        while (limit_bytes := self._limit_bytes()) is not None:
            held_bytes = self._weights_bytes()
            if held_bytes + entry.size_bytes <= limit_bytes:
                await self._share(entry.size_bytes)
                held_bytes = sum(each.held_bytes for each in self._loaded.values()) + self._loading_bytes()
                if held_bytes + entry.size_bytes <= limit_bytes:
                    return
            idle = sorted(
                (loaded for loaded in self._loaded.values() if not loaded.users), key=lambda each: each.idle_since
            )
            if not idle:
                await self._share()
                raise BusyError(
                    f"the weights of {entry.name} need {format_bytes(entry.size_bytes)}; "
                    f"{format_bytes(held_bytes)} of {format_bytes(limit_bytes)} are taken by models in use "
                    f"({', '.join(self.loaded())})",
                    hint="wait until they are done",
                )
            await self._end(idle[0])

    def _limit_bytes(self) -> int | None:
        """What models may use together, as the loaded ones say; None when none is loaded."""
        return max((loaded.engine.info.memory_budget_bytes for loaded in self._loaded.values()), default=None)

    def _loading_bytes(self) -> int:
        return sum(each.weights_bytes for path, each in self._loading.items() if path not in self._loaded)

    def _weights_bytes(self) -> int:
        """Of everything loaded or on its way."""
        return sum(loaded.weights_bytes for loaded in self._loaded.values()) + self._loading_bytes()

    async def _share(self, coming_bytes: int = 0) -> None:
        """Tell each engine what it may use: its weights, and an equal part of what all weights leave.

        Nobody is told to take more before others have let go of it.

        Args:
            coming_bytes: weights that are about to be loaded beside them.
        """
        async with self._sharing:
            limit_bytes = self._limit_bytes()
            if limit_bytes is None:
                return
            n_models = len(self._loaded.keys() | self._loading.keys()) + bool(coming_bytes)
            part_bytes = max(0, limit_bytes - self._weights_bytes() - coming_bytes) // n_models
            for loaded in self._loaded.values():
                loaded.share_bytes = loaded.weights_bytes + part_bytes
            for loaded in sorted(self._loaded.values(), key=lambda each: each.share_bytes - each.held_bytes):
                others = sum(each.held_bytes for each in self._loaded.values() if each is not loaded)
                free_bytes = limit_bytes - others - self._loading_bytes() - coming_bytes
                await self._limit(loaded, max(min(loaded.share_bytes, free_bytes), loaded.weights_bytes))

    async def _limit(self, loaded: _Loaded, limit_bytes: int) -> None:
        if loaded.held_bytes == limit_bytes:
            return
        try:
            loaded.held_bytes = await loaded.engine.limit_memory(limit_bytes)
        except EngineError:
            # Its process is gone, and the next one begins with this limit.
            loaded.held_bytes = limit_bytes

    def _end_unused_beside(self, loaded: _Loaded) -> None:
        """Make room for a request that another model's memory kept from running; its client asks again."""
        for other in self._loaded.values():
            if other is not loaded and not other.users:
                other.end = True
                other.changed.tell()

    async def _end(self, loaded: _Loaded) -> None:
        loaded.end = True
        loaded.changed.tell()
        await loaded.ended.wait()

    async def _start(self, entry: ModelEntry) -> _Loaded:
        """Load a model, or wait for one that is being loaded; whoever asked first may have gone away since."""
        if self._nursery is None:
            raise RuntimeError("the engine shelf is not running")
        loading = self._loading.get(entry.path)
        if loading is None:
            loading = self._loading[entry.path] = _Loading(entry.size_bytes)
            self._nursery.start_soon(self._hold, entry, loading)
        await loading.done.wait()
        if loading.loaded is None:
            raise loading.failure
        return loading.loaded

    async def _hold(self, entry: ModelEntry, loading: _Loading) -> None:
        loaded: _Loaded | None = None
        try:
            async with self._open_engine(
                entry.path,
                digest_cache=self.digest_cache,
                work_dir=self.prepare_work_dir(),
                live_bytes=self._config.live_bytes,
            ) as engine:
                loaded = _Loaded(entry, engine, trio.current_time(), held_bytes=engine.info.weights_size_bytes)
                self._loaded[entry.path] = loaded
                await self._share()
                self._failed.clear()
                _log.info("engine started", model=entry.name)
                self._end_loading(entry, loading, loaded)
                try:
                    await self._until_unused(loaded)
                finally:
                    # From here on nobody is given it; who asks for the model waits until it is gone.
                    loaded.end = True
        except Exception as error:  # noqa: BLE001 - it is the askers', not the node's
            loading.failure = leaf_of(error)
            if loaded is None:
                self._failed[entry.path] = str(loading.failure)
            _log.warning("engine failed", model=entry.name, kind=type(loading.failure).__name__)
        finally:
            self._end_loading(entry, loading, loaded)
            if loaded is not None:
                self._loaded.pop(entry.path, None)
                loaded.ended.set()
                if self._nursery is not None:
                    self._nursery.start_soon(self._share)
                _log.info("engine ended", model=entry.name)

    def _end_loading(self, entry: ModelEntry, loading: _Loading, loaded: _Loaded | None) -> None:
        loading.loaded = loaded
        self._loading.pop(entry.path, None)
        loading.done.set()

    async def _until_unused(self, loaded: _Loaded) -> None:
        """Return when it is told to end, or was unused for as long as the settings say."""
        while not (loaded.end and not loaded.users):
            left_s = loaded.idle_since + self._config.engine_idle_unload_s - trio.current_time()
            if not loaded.users and left_s <= 0:
                return
            with trio.move_on_after(left_s if not loaded.users else float("inf")):
                await loaded.changed.wait()
