"""What happens when something is revoked: it is not served, announced, fetched or continued from any more.

Whether an artifact may be used or served is judged at every use (`TrustPolicy`); a guard stops what is under way. The
bytes stay in the store, where nothing reads them: a revocation is no order to delete.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import ArtifactHash, short_text
from kvnet.format.manifest import Manifest
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.envelope import StatementType

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

MAX_SEEN: Final = 16_384
"""Artifacts remembered after they have left the store: what was restored from them may still be in memory."""

REST_S: Final = 0.25
"""Seconds from one look at everything to the next. Nothing revoked is used meanwhile: that is judged at every use."""

DropLive = Callable[[], Awaitable[None]]
"""Has every engine forget what it keeps in memory between requests."""

_WHO_COUNTS: Final = (
    StatementType.REVOCATION,
    StatementType.KEY_ROTATION,
    StatementType.MEMBERSHIP,
    StatementType.REKEY,
)


class RevocationGuard:
    """Stops what is revoked, on one node.

    Args:
        store: what this node holds.
        lane: where blocking store work runs.
        identity: whose policy counts.
        statements: what is revoked.
        node: what serves, announces and fetches; None when nothing does.
        drop_live: forgets what engines keep in memory.

    Attributes:
        revoked: the artifacts seen here that are revoked.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        statements: Statements,
        node: ExchangeNode | None,
        drop_live: DropLive,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._node = node
        self._drop_live = drop_live
        self._seen: OrderedDict[ArtifactHash, Manifest] = OrderedDict()
        self._changed = trio.Event()
        self.revoked: frozenset[ArtifactHash] = frozenset()
        for kind in _WHO_COUNTS:
            statements.subscribe(kind, self._heard)
        if node is not None:
            node.watch_published(self._remember)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Stop what is revoked, now and whenever more is, until cancelled."""
        for record in await self._lane.run(self._store.artifacts):
            self._remember(record)
        await self._stop_what_is_revoked()
        task_status.started()
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._stop_what_is_revoked()
            # Whoever says much keeps a large store busy for no more than a part of the time.
            await trio.sleep(REST_S)

    def _heard(self, _heard: Heard) -> None:
        self._changed.set()

    def _remember(self, record: ArtifactRecord) -> None:
        self._seen[record.hash] = record.manifest
        self._seen.move_to_end(record.hash)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        if not self._identity.policy().may_serve(record.manifest):
            # Known to be revoked when it came: the guard stops it as it does those that were here before.
            self._changed.set()

    async def _stop_what_is_revoked(self) -> None:
        may_serve = self._identity.policy().may_serve
        now = frozenset(artifact for artifact, manifest in self._seen.items() if not may_serve(manifest))
        more, self.revoked = now - self.revoked, now
        if self._node is not None:
            # Also when nothing held here is revoked: something that is being fetched may be.
            self._node.stop_sharing(now)
        if not more:
            return
        _log.warning("revoked, used and served no more: %s", ", ".join(sorted(map(short_text, more))))
        try:
            await self._drop_live()
        except KvnetError as error:
            _log.warning("live caches not dropped: %s", error)
