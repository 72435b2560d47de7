"""Removals: what the owner wants gone from all of the owner's machines is removed here, when that is said or heard.

A removal counts in ``mine`` alone, and from the owner's machines alone. What came later and is pinned stays: somebody
asked for it by name after it was removed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog
import trio

from kvnet.errors import KvnetError, NotInStoreError
from kvnet.exchange.lane import Lane
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import ArtifactHash
from kvnet.network.news import any_of
from kvnet.store.interface import Store
from kvnet.store.names import NameBook
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import Removal
from kvnet_node.identity import NodeIdentity

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

RETRY_S: Final = 60.0


class Removals:
    """Honours removals.

    Args:
        identity: own keys, and which namespace is ``mine``.
        statements: where removals are.
        store: from which it is removed.
        names: that may mean it.
        lane: where blocking work runs.
        removed: told of every artifact that is gone.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        statements: Statements,
        store: Store,
        names: NameBook,
        lane: Lane,
        *,
        removed: Callable[[ArtifactHash], None],
    ) -> None:
        self._identity = identity
        self._statements = statements
        self._store = store
        self._names = names
        self._lane = lane
        self._removed = removed
        self._heard = trio.Event()
        statements.subscribe(StatementType.REMOVAL, self._hear)

    def _hear(self, heard: Heard) -> None:
        del heard
        self._heard.set()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Remove what is asked for until cancelled."""
        task_status.started()
        while True:
            heard = self._heard = trio.Event()
            rosters = self._identity.rosters
            events = [heard] if rosters is None else [heard, rosters.next_change]
            retry_s = float("inf")
            try:
                await self.honour()
            except KvnetError as error:
                _log.warning("what another machine removed is still here", reason=str(error))
                retry_s = RETRY_S
            with trio.move_on_after(retry_s):
                await any_of(*events)

    async def honour(self) -> None:
        """Remove now what is asked for.

        Raises:
            StoreError: it could not be removed.
        """
        for artifact, asked_s in self._wanted().items():
            if await self._lane.run(self._remove, artifact, asked_s):
                self._removed(artifact)
                _log.info("removed, as another machine of the same owner asked")

    def _wanted(self) -> dict[ArtifactHash, int]:
        """What is to go, and when that was said last."""
        mine = self._identity.swarms.mine.id
        wanted: dict[ArtifactHash, int] = {}
        for statement in self._statements.all(StatementType.REMOVAL, namespace=mine):
            body = statement.body
            if isinstance(body, Removal) and body.namespace == mine and self._is_own(statement.signer):
                artifact = ArtifactHash(body.artifact)
                wanted[artifact] = max(wanted.get(artifact, 0), body.issued)
        return wanted

    def _is_own(self, signer: bytes) -> bool:
        policy = self._identity.policy()
        return signer in policy.own or (signer in policy.devices and not policy.is_revoked(signer, self._mine()))

    def _mine(self) -> bytes:
        return self._identity.swarms.mine.id

    def _remove(self, artifact: ArtifactHash, asked_s: int) -> bool:
        record = self._store.get(artifact)
        if record is None or record.manifest.namespace != self._mine():
            return False
        if record.pinned and record.created_s > asked_s:
            return False
        self._names.forget(artifact)
        try:
            # Packs that others use in part are written anew when the store is tidied: nobody is to wait for it.
            self._store.release(artifact)
        except NotInStoreError:
            return False
        return True
