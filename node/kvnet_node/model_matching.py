"""Compares this node's models with its peers': keeps samples and findings, and makes samples when nobody waits."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from kvnet.engine.interface import Engine
from kvnet.engine.model_folder import ModelEntry
from kvnet.errors import KvnetError
from kvnet.exchange.lane import Lane
from kvnet.exchange.measured import Finding, Measurements
from kvnet.exchange.models import ModelExchange
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.session import PeerSession
from kvnet_node.engines import EngineShelf
from kvnet_node.failures import leaf_of
from kvnet_node.paths import DataPaths, write_private
from kvnet_node.samples import SampleBook

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

_log = structlog.get_logger(__name__)

LOOK_S = 5.0
"""Seconds from one look for models at rest to the next."""

REST_S = 10.0
"""Seconds a model must have been at rest before its sample is made unasked."""

RETRY_S = 300.0
"""Seconds after a failure before a sample is tried again."""

SAMPLE_S = 300.0
"""Seconds a sample may take: on a processor 512 tokens of a large model take minutes."""


class ModelMatching:
    """See the module.

    Args:
        paths: where samples and findings are kept.
        engines: models in memory, and those that can be.
        numerics: findings, which reuse goes by.
        node: among its peers; not running yet.
        lane: for files and comparisons; nobody waits behind it.
        meet: compare with every member that comes, and not only when asked to.
    """

    def __init__(
        self,
        paths: DataPaths,
        engines: EngineShelf,
        numerics: Measurements,
        node: ExchangeNode,
        lane: Lane,
        *,
        meet: bool = True,
    ) -> None:
        self._paths = paths
        self._engines = engines
        self._numerics = numerics
        self._lane = lane
        self._failed_s: dict[str, float] = {}
        self._unsaved = trio.Event()
        self.book = SampleBook(paths.samples_dir)
        self.exchange = ModelExchange(node, self.book.models, lane=lane, measured=numerics, meet=meet)
        self._node = node

    async def load(self) -> None:
        """Take up what was kept; before the node is among its peers."""
        await self._lane.run(self.book.load)
        try:
            findings = msgspec.json.decode(self._paths.measured_file.read_bytes(), type=list[Finding])
        except (FileNotFoundError, msgspec.DecodeError):
            findings = []
        self._numerics.load(findings, time.time())
        self._numerics.changed = self._unsaved.set

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Make and keep what is missing until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._save)
            nursery.start_soon(self._make)
            task_status.started()

    async def _save(self) -> None:
        while True:
            await self._unsaved.wait()
            self._unsaved = trio.Event()
            self._numerics.changed = self._unsaved.set
            await self.save()

    async def save(self) -> None:
        """Keep the findings."""
        data = msgspec.json.encode(self._numerics.all())
        try:
            await self._lane.run(write_private, self._paths.measured_file, data)
        except OSError as error:
            _log.warning("findings not kept", reason=error.strerror)

    async def _make(self) -> None:
        while True:
            await self._note()
            for entry, engine in self._engines.at_rest(REST_S) if self.exchange.unasked() else ():
                if trio.current_time() < self._failed_s.get(str(entry.path), float("-inf")) + RETRY_S:
                    continue
                try:
                    await self._sample(entry, engine)
                except (KvnetError, OSError) as error:
                    self._failed_s[str(entry.path)] = trio.current_time()
                    _log.info("no sample made", model=entry.name, reason=str(error))
            await trio.sleep(LOOK_S)

    async def _note(self) -> None:
        """Know every model that is in memory, in use or not."""
        for entry, engine in self._engines.in_memory():
            info, own = engine.info, self.book.own(entry.path)
            if own is not None and (own.here.fingerprint, own.here.producer) == (info.fingerprint, info.producer):
                continue
            try:
                if await self._lane.run(self.book.note, entry, info):
                    self.exchange.changed()
            except OSError as error:
                _log.info("a model is not known", model=entry.name, reason=error.strerror)

    async def _sample(self, entry: ModelEntry, engine: Engine) -> None:
        """Know a model that is in memory, and have its sample.

        Raises:
            KvnetError: it has none, or there is no room for it now.
            OSError: its folder has gone.
        """
        info = engine.info
        if info.fingerprint is None:
            return
        if await self._lane.run(self.book.note, entry, info):
            self.exchange.changed()
        own = self.book.own(entry.path)
        if own is None or own.sample:
            return
        with trio.move_on_after(SAMPLE_S):
            data = await engine.sample()
            await self._lane.run(self.book.put, entry, info, data)
            _log.info("sample made", model=entry.name)
            self.exchange.changed()

    async def know(
        self, entry: ModelEntry, loading: Callable[[str], None] = lambda _: None, *, sample: bool = True
    ) -> str:
        """Load a model that is not known yet, and have its sample; why that failed, "" when it did not."""
        own = self.book.own(entry.path)
        if own is not None and (own.sample or not sample):
            return ""
        try:
            async with self._engines.use_entry(entry, loading) as engine:
                if engine.info.fingerprint is None:
                    return engine.info.refusal
                await self._sample(entry, engine)
        except Exception as error:
            leaf = leaf_of(error)
            if not isinstance(leaf, KvnetError | OSError):
                raise
            return str(leaf)
        return ""

    async def refresh(self, timeout_s: float) -> None:
        """Compare anew with every member, for no longer than this; whoever does not answer stays as known before."""
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for session in self._node.sessions():
                    if self.exchange.can_ask(session):
                        nursery.start_soon(self._ask, session)

    async def _ask(self, session: PeerSession) -> None:
        try:
            await self.exchange.refresh(session)
        except KvnetError as error:
            _log.info("a peer's models are not known", reason=str(error))
