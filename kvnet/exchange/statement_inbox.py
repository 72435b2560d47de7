"""Statements that wait to be checked: as many as memory is given for, and no peer more than its share."""

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

import trio

from kvnet.exchange.session import PeerSession
from kvnet.exchange.statement_talk import Talk
from kvnet.network.news import News
from kvnet.protocol.gossip import GossipLimits
from kvnet.trust.namespace import Namespace

BATCH: Final = 64
"""Statements checked and written together."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A statement that is not checked yet.

    Attributes:
        envelope: as received.
        namespace: in which it was told.
        session: by whom.
        talk: with that session, whose limits count.
        asked: this node has asked for it: then no limits count.
    """

    envelope: bytes
    namespace: Namespace
    session: PeerSession | None
    talk: Talk | None
    asked: bool = False


class Inbox:
    """What waits, in order.

    Args:
        limits: what one peer may have wait.
    """

    def __init__(self, limits: GossipLimits) -> None:
        self._limits = limits
        self._queue: deque[Waiting] = deque()
        self._queued_bytes = 0
        self._n_queued = 0
        self._n_checked = 0
        self._filled = trio.Event()
        self._checked = News()

    def put(self, waiting: Waiting) -> bool:
        """Queue a statement; whether there was room for it."""
        n_bytes, talk = len(waiting.envelope), waiting.talk
        if waiting.session is not None and not waiting.asked:
            if talk is None or not self._has_room(talk, n_bytes):
                return False
            talk.queued_bytes += n_bytes
        self._queue.append(waiting)
        self._queued_bytes += n_bytes
        self._n_queued += 1
        self._filled.set()
        return True

    def _has_room(self, talk: Talk, n_bytes: int) -> bool:
        limits = self._limits
        if self._queued_bytes + n_bytes > limits.queued_bytes or talk.queued_bytes + n_bytes > limits.peer_queued_bytes:
            return False
        return talk.told.take(1, trio.current_time()) == 1

    async def batches(self) -> AsyncGenerator[list[Waiting], None]:
        """What waits, a few at a time, for ever; a batch counts as checked when the next one is asked for."""
        while True:
            if not self._queue:
                self._filled = trio.Event()
                await self._filled.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            yield batch
            for waiting in batch:
                self._queued_bytes -= len(waiting.envelope)
                if waiting.session is not None and waiting.talk is not None:
                    waiting.talk.queued_bytes -= len(waiting.envelope)
            self._n_checked += len(batch)
            self._checked.tell()

    async def settled(self) -> None:
        """Wait until everything queued so far has been checked."""
        wanted = self._n_queued
        while self._n_checked < wanted:
            await self._checked.wait()
