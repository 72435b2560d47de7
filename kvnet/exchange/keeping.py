"""Keep: after an answer, store what of its conversation is worth keeping, while nobody waits.

The K/V is exported from the live cache that answered; nothing is computed for it. Each artifact references the blocks
that are held already and adds the new ones, and lets go of the artifact of the turn before, which it contains.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from kvnet.engine.interface import Engine
from kvnet.errors import IntegrityError, KvnetError, NoLiveStateError, StoreAwayError, StoreError, TrustError
from kvnet.exchange.admission import USED_UP, AdmissionPolicy, Signals
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.publisher import AddRequest, Publisher
from kvnet.exchange.reuse import Lossy, PrefixHit, find_local
from kvnet.exchange.unfinished import may_replace
from kvnet.exchange.write_budget import WriteBudget, Writing
from kvnet.format.codecs import Codec
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.prefix import block_keys
from kvnet.network.news import News
from kvnet.store.interface import ArtifactRecord, Store

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Conversations that wait to be kept; when an engine is too busy for more, the oldest is given up."""

DRAIN_S = 5.0
"""Seconds that a running export may still take when the node shuts down."""

OnPublished = Callable[[ArtifactRecord, list[PrefixKey]], None]
"""Told of every artifact that was kept: serve and announce it (``ExchangeNode.published``)."""

OnRemoved = Callable[[ArtifactHash], None]
"""Told of every artifact that is let go: serve and announce it no longer (``ExchangeNode.removed``)."""

Named = Callable[[], AbstractSet[ArtifactHash]]
"""The artifacts that people gave a name; runs in the lane."""


@dataclass(frozen=True, slots=True)
class ToKeep:
    """A finished conversation turn: the engine that holds its K/V, its token ids, and what is known about it."""

    engine: Engine
    tokens: tuple[int, ...]
    signals: Signals


@dataclass(frozen=True, slots=True)
class KeeperHooks:
    """Who is told, and asked.

    Attributes:
        published: told of every artifact kept.
        removed: told of every artifact let go.
        named: artifacts that are never let go, because they have a name.
    """

    published: OnPublished = lambda _record, _keys: None
    removed: OnRemoved = lambda _artifact: None
    named: Named = frozenset


class Keeper:
    """Keeps conversations, one export at a time.

    Args:
        store: where artifacts are.
        lane: where blocking store work runs; best one of its own, shared with ``publisher`` alone, so that no request
            waits for its lookup while what is kept is hashed and synced.
        identity: namespaces and signing key.
        publisher: turns what is kept into artifacts.
        policy: what of a conversation is kept.
        budget: what may be written in a day; ``None`` for no limit.
        hooks: who is told.
        codec: how tiles are stored when nothing of the conversation is stored yet.
        now: seconds since 1970.

    Attributes:
        lossy: whether requests reuse artifacts of a lossy codec; what extends one is stored as lossy too.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        publisher: Publisher,
        *,
        policy: AdmissionPolicy | None = None,
        budget: WriteBudget | None = None,
        hooks: KeeperHooks | None = None,
        codec: Codec = Codec.RAW,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._publisher = publisher
        self.policy = policy or AdmissionPolicy()
        self._budget = budget
        self._hooks = hooks or KeeperHooks()
        self._codec = codec
        self.lossy = Lossy.NEVER
        self._now = now
        self._waiting: list[ToKeep] = []
        self._changed = News()
        self._running: trio.CancelScope | None = None
        self._closed = False
        self._counters: Counter[str] = Counter()

    # --- what is to be kept -------------------------------------------------------------------------------------------

    def offer(self, item: ToKeep) -> None:
        """Keep this when there is time. Of one conversation only the newest turn waits; never blocks, never raises."""
        if self._closed:
            self._counters["keep_dropped"] += 1
            return
        decision = self.policy.decide(self._with_budget(item.engine, item.signals))
        if not decision.keep_tokens:
            self._count_refusal(decision.reason)
            return
        kept = replace(item, tokens=item.tokens[: decision.keep_tokens])
        if any(_contains(other, kept) for other in self._waiting):
            return
        self._waiting = [other for other in self._waiting if not _contains(kept, other)]
        self._waiting.append(kept)
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[0]
            self._counters["keep_dropped"] += 1
        self._changed.tell()

    def created_tokens(self, engine: Engine, signals: Signals, reused_tokens: int) -> int:
        """Prompt tokens that will newly be kept, as far as it is known before the engine begins."""
        return self.policy.created_tokens(self._with_budget(engine, signals), reused_tokens)

    def _with_budget(self, engine: Engine, signals: Signals) -> Signals:
        if self._budget is None:
            return signals
        return replace(
            signals,
            token_bytes=engine.info.kv_bytes_per_token,
            left_bytes=self._budget.left_bytes(self._now()),
            day_bytes=self._budget.day_bytes,
        )

    def _count_refusal(self, reason: str) -> None:
        self._counters["keep_over_budget" if reason == USED_UP else "keep_not_worth"] += 1

    def counters(self) -> dict[str, int]:
        """What happened so far, for people to read."""
        return dict(self._counters)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is being kept."""
        return self._running is None and not self._waiting

    async def wait_idle(self) -> None:
        """Return when nothing waits and nothing is being kept."""
        while not self.idle:
            await self._changed.wait()

    async def drain(self, grace_s: float = DRAIN_S) -> None:
        """Take nothing more; what is being exported may finish within ``grace_s`` seconds, or leaves nothing behind."""
        self._closed = True
        self._counters["keep_dropped"] += len(self._waiting)
        self._waiting.clear()
        with trio.move_on_after(grace_s):
            await self.wait_idle()
        if self._running is not None:
            self._running.cancel()
            await self.wait_idle()

    # --- keeping ------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Keep what is offered, until cancelled."""
        task_status.started()
        while True:
            while not self._waiting:
                await self._changed.wait()
            item = self._waiting.pop(0)
            try:
                with trio.CancelScope() as self._running:
                    await self._keep(item)
            finally:
                self._running = None
                self._changed.tell()

    async def _keep(self, item: ToKeep) -> None:
        """Whatever goes wrong is counted: the request has been answered."""
        try:
            held = await self._lane.run(self._find_held, item)
            record = await self._store_it(item, held)
            if record is not None:
                await self._let_go_of_older(record)
                if held is not None and held.record.complete and held.manifest.publisher != record.manifest.publisher:
                    # A session that moves to and fro brings one artifact a turn from the other node, too.
                    await self._let_go_of_older(held.record)
        except NoLiveStateError:
            self._counters["keep_no_live_state"] += 1
        except TrustError:
            self._counters["keep_not_allowed"] += 1
        except StoreAwayError:
            # The store has said so, once.
            self._counters["keep_failed"] += 1
        except (StoreError, IntegrityError, OSError) as error:
            self._counters["keep_failed"] += 1
            _log.warning("a conversation was not kept: %s", error)
        except KvnetError as error:
            self._counters["keep_failed"] += 1
            _log.info("a conversation was not kept: %s", error)

    async def _store_it(self, item: ToKeep, held: PrefixHit | None) -> ArtifactRecord | None:
        """What is held may have changed since the request, most of all when two had the same new prompt: ask again."""
        stored_tokens = held.n_tokens if held is not None else 0
        signals = replace(item.signals, held_tokens=len(item.tokens), stored_tokens=stored_tokens)
        decision = self.policy.decide(self._with_budget(item.engine, signals))
        if not decision.keep_tokens:
            self._count_refusal(decision.reason)
            return None
        tokens = item.tokens[: decision.keep_tokens]
        request = AddRequest(
            tokens=tokens,
            context=b"",
            # In another codec nothing could be referenced, and all of it would be written again.
            codec=held.manifest.codec if held is not None else self._codec,
            pinned=False,
            created_s=int(self._now()),
            prefill=False,
            background=True,
        )
        added = await self._publisher.add(item.engine, request)
        if added.existed:
            return None
        self._counters["kept"] += 1
        self._counters["kept_bytes"] += added.new_bytes
        if self._budget is not None:
            self._budget.spend(added.new_bytes, Writing.KEPT, self._now())
        self._hooks.published(added.record, self._keys(added.record, tokens))
        return added.record

    def _find_held(self, item: ToKeep) -> PrefixHit | None:
        limit = len(item.tokens)
        return find_local(
            self._store, item.engine.info, self._identity, item.tokens, limit_tokens=limit, lossy=self.lossy
        ).hit

    def _keys(self, record: ArtifactRecord, tokens: Sequence[int]) -> list[PrefixKey]:
        """Its prefix keys; none when this node is not in its namespace any more."""
        for namespace in self._identity.namespaces():
            if namespace.id == record.manifest.namespace:
                return block_keys(namespace.prefix_root(record.manifest.fingerprint.hash), tokens)
        return []

    # --- letting go ---------------------------------------------------------------------------------------------------

    async def _let_go_of_older(self, record: ArtifactRecord) -> None:
        for artifact in await self._lane.run(self._older, record):
            self._hooks.removed(artifact)
            await self._lane.run(self._store.release, artifact)
            self._counters["superseded"] += 1

    def _older(self, record: ArtifactRecord) -> list[ArtifactHash]:
        """Artifacts kept for earlier turns of this conversation: the new one can do all that they can."""
        tokens = self._store.tokens_of(record.hash)
        keys = self._keys(record, tokens)
        named = self._hooks.named()
        older: list[ArtifactHash] = []
        for artifact, _ in self._store.find_prefix(record.manifest.namespace, list(reversed(keys))):
            one = self._store.get(artifact)
            if one is None or artifact in named or not may_replace(record.manifest, one):
                continue
            if self._store.tokens_of(artifact) == tokens[: one.manifest.n_tokens]:
                older.append(artifact)
        return older


def _contains(longer: ToKeep, shorter: ToKeep) -> bool:
    """Whether one is a later turn of the other, or the same."""
    return longer.engine is shorter.engine and longer.tokens[: len(shorter.tokens)] == shorter.tokens
