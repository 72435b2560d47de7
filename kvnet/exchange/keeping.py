"""Keep: after an answer, store what of its conversation is worth keeping, while nobody waits."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from kvnet.exchange.admission import AdmissionPolicy
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.publisher import Publisher
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.store.interface import ArtifactRecord, Store

if TYPE_CHECKING:
    from trio_typing import TaskStatus

OnPublished = Callable[[ArtifactRecord, list[PrefixKey]], None]
"""Told of every artifact that was kept: serve and announce it (``ExchangeNode.published``)."""

OnRemoved = Callable[[ArtifactHash], None]
"""Told of every artifact that is gone: serve and announce it no longer (``ExchangeNode.removed``)."""


class Keeper:
    """Keeps conversations, one export at a time.

    Args:
        store: where artifacts are.
        lane: where blocking store work runs.
        identity: namespaces and signing key.
        publisher: turns what is kept into artifacts.
        policy: what of a conversation is kept.
        published: told of every artifact kept.
        removed: told of every artifact superseded.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        publisher: Publisher,
        *,
        policy: AdmissionPolicy | None = None,
        published: OnPublished | None = None,
        removed: OnRemoved | None = None,
    ) -> None:
        self.policy = policy or AdmissionPolicy()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Keep what is handed in, until cancelled."""
        task_status.started()
        await trio.sleep_forever()

    async def drain(self) -> None:
        """Take nothing more, and return when what is being kept is done or was given up."""
        await trio.lowlevel.checkpoint()

    def counters(self) -> dict[str, int]:
        """What happened so far, for people to read."""
        return {}
