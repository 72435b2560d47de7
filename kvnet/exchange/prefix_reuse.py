"""The longest prefix to continue from - in RAM, on disk, at peers - and what to try when its restore fails.

Reuse may only make an answer come sooner. Whatever goes wrong with it ends in plain local prefill.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import trio

from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import RestorePlan
from kvnet.errors import (
    BusyError,
    CompatibilityError,
    EngineCrashedError,
    EngineError,
    IntegrityError,
    KvnetError,
    OverBudgetError,
    StoreError,
)
from kvnet.exchange.claims import Search
from kvnet.exchange.events import PrefixFetched
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.planning import PlanReport
from kvnet.exchange.reuse import Found, Lossy, PrefixHit, Rejected, find_local, restore_plan
from kvnet.format.hashes import ArtifactHash
from kvnet.protocol.ids import PeerId
from kvnet.store.interface import Store

E = TypeVar("E")

REUSE_ATTEMPTS = 2
"""Restores that are tried: a second one when the first found damaged chunks, which may have come again from a peer."""


FEW_TOKENS = 32
LITTLE_SHARE = 1 / 16
"""Fewer tokens than this, and a smaller share of the prompt, are no reason to read a chunk: they are computed with the
rest, in hardly more time. Prompts that have nothing in common but how their template begins have so few."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where reused K/V came from.

    Attributes:
        source: ``"disk"`` or ``"peer"``.
        peer: whom it was fetched from; empty for ``disk``.
        tokens: tokens reused from it.
        n_bytes: stored bytes fetched, or read from disk.
        seconds: seconds from the lookup to the last byte fetched; for ``disk``, of the restore.
        signer: the 32-byte publisher key that signed it.
        artifact: its artifact hash.
    """

    source: str
    peer: PeerId
    tokens: int
    n_bytes: int
    seconds: float
    signer: bytes
    artifact: ArtifactHash


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a prefix is looked for.

    Attributes:
        tokens: the whole prompt's token ids, from one tokenization.
        ends: token counts where other prompts may part from this one.
        live_tokens: of these, from the start, held in RAM by the engine.
        ask_peers: peers may be asked.
        touch: note the use of what is found, so that it is evicted later.
    """

    tokens: Sequence[int]
    ends: tuple[int, ...] = ()
    live_tokens: int = 0
    ask_peers: bool = True
    touch: bool = True


FetchPrefix = Callable[[Engine, Wanted, int], Awaitable[Search]]
"""Asks peers for a longer prefix than the ``n`` tokens held; what they have is in the store when it returns."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest prefix found, and what led there.

    Attributes:
        plan: how to restore it; ``None`` when RAM holds as much, or nothing was found.
        hit: the artifact behind the plan.
        fetched: what peers delivered for it.
        stored_tokens: tokens that usable artifacts on disk cover, whether or not they are to be restored.
        lookup_s: seconds spent looking, fetching included.
        rejected: artifacts that fitted and are not used.
        reasons: why peers brought nothing, or nothing better.
        fetch_plan: what was weighed before peers were asked for it; ``None`` when nothing was.
    """

    plan: RestorePlan | None = None
    hit: PrefixHit | None = None
    fetched: PrefixFetched | None = None
    stored_tokens: int = 0
    lookup_s: float = 0.0
    rejected: tuple[Rejected, ...] = ()
    reasons: tuple[str, ...] = ()
    fetch_plan: PlanReport | None = None

    @property
    def artifact(self) -> ArtifactHash:
        """The artifact behind the plan; zeros when there is none."""
        return self.hit.artifact if self.hit is not None else ArtifactHash(bytes(32))

    def sources(self, restored_tokens: int, restore_s: float) -> tuple[Source, ...]:
        """Where the restored tokens came from; nothing when none were."""
        hit, plan, fetched = self.hit, self.plan, self.fetched
        if hit is None or plan is None or not restored_tokens:
            return ()
        signer = hit.manifest.publisher
        if fetched is not None and fetched.artifact == hit.artifact:
            return (
                Source("peer", fetched.peer, restored_tokens, fetched.n_bytes, fetched.seconds, signer, hit.artifact),
            )
        read = sum(chunk.length_bytes for chunk in plan.chunks)
        return (Source("disk", PeerId(b""), restored_tokens, read, restore_s, signer, hit.artifact),)


class PrefixReuse:
    """Finds what to continue from.

    Args:
        store: where artifacts are.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        fetch_prefix: how to ask peers; ``None`` to use the store alone.
        exact_only: reuse only artifacts whose verdict is ``EXACT``.
        lossy: whether artifacts of a lossy codec are reused.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        fetch_prefix: FetchPrefix | None,
        *,
        exact_only: bool = False,
        lossy: Lossy = Lossy.NEVER,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._fetch_prefix = fetch_prefix
        self._exact_only = exact_only
        self._lossy = lossy

    @property
    def asks_peers(self) -> bool:
        """Whether peers are asked at all."""
        return self._fetch_prefix is not None

    async def find(self, engine: Engine, wanted: Wanted) -> Prefix:
        """The longest prefix here; or, when peers have a longer one that they deliver in time, theirs.

        Disk is read only for more than RAM holds, and peers are asked only for more than both.
        """
        began_s = trio.current_time()
        limit = len(wanted.tokens) - 1
        local = await self._local(engine, wanted.tokens)
        held = max(wanted.live_tokens, _n_tokens(local))
        search = Search()
        if self._fetch_prefix is not None and wanted.ask_peers and held < limit:
            search = await self._fetch_prefix(engine, wanted, held)
            if search.fetched is not None:
                local = await self._local(engine, wanted.tokens)
        prefix = Prefix(
            fetched=search.fetched,
            stored_tokens=_n_tokens(local),
            rejected=_merged(local.rejected, search.rejected),
            reasons=tuple(dict.fromkeys(search.reasons)),
            fetch_plan=search.plan,
        )
        if local.hit is not None and _worth_restoring(local.hit.n_tokens, wanted):
            prefix = await self._planned(prefix, local.hit, touch=wanted.touch)
        return replace(prefix, lookup_s=trio.current_time() - began_s)

    async def _planned(self, prefix: Prefix, hit: PrefixHit, *, touch: bool) -> Prefix:
        """With the plan to restore a hit; without, when one of its chunks has gone meanwhile."""
        try:
            plan = await self._lane.run(restore_plan, self._store, hit.record, hit.n_tokens)
        except StoreError:
            plan = None
        if plan is None:
            return prefix
        if touch:
            with suppress(StoreError):
                # On a full disk the use cannot be noted; that is no reason not to use it.
                await self._lane.run(self._store.touch, hit.artifact)
        return replace(prefix, plan=plan, hit=hit)

    async def _local(self, engine: Engine, tokens: Sequence[int]) -> Found:
        try:
            return await self._lane.run(
                find_local,
                self._store,
                engine.info,
                self._identity,
                tokens,
                limit_tokens=len(tokens) - 1,
                exact_only=self._exact_only,
                lossy=self._lossy,
            )
        except (StoreError, IntegrityError) as error:
            return Found(None, (Rejected(ArtifactHash(bytes(32)), "store", str(error)),))

    async def attempts(
        self,
        engine: Engine,
        wanted: Wanted,
        prefix: Prefix,
        attempt: Callable[[Prefix], AsyncGenerator[E, None]],
        *,
        has_begun: Callable[[E], bool],
    ) -> AsyncGenerator[E, None]:
        """Events of an answer that continues from a prefix, or, where that fails, from another one or from nothing.

        Args:
            engine: that answers.
            wanted: what ``prefix`` was looked for with.
            prefix: to begin with.
            attempt: answers, continuing from what it is given.
            has_begun: whether with this event the answer has begun; a failure after it goes to the caller.

        Raises:
            KvnetError: the answer failed after it had begun, or for a reason that is not the prefix.
        """
        for _ in range(REUSE_ATTEMPTS):
            if prefix.plan is None:
                break
            begun = False
            try:
                async with aclosing(attempt(prefix)) as events:
                    async for event in events:
                        begun = begun or has_begun(event)
                        yield event
                return
            except (IntegrityError, CompatibilityError, StoreError, EngineError) as error:
                if begun or not _may_be_the_prefix(error):
                    raise
                prefix = await self._after_failure(engine, wanted, prefix, error)
        async with aclosing(attempt(replace(prefix, plan=None, hit=None, fetched=None))) as events:
            async for event in events:
                yield event

    async def _after_failure(self, engine: Engine, wanted: Wanted, prefix: Prefix, error: KvnetError) -> Prefix:
        """What to try next: after damage, whatever is left here or comes from peers; after anything else, nothing."""
        rejected = (*prefix.rejected, Rejected(prefix.artifact, "restore_failed", str(error)))
        if not isinstance(error, IntegrityError):
            return replace(prefix, plan=None, hit=None, fetched=None, rejected=rejected)
        await self._set_aside_damage(prefix)
        again = await self.find(engine, wanted)
        return replace(again, rejected=_merged(rejected, again.rejected), lookup_s=prefix.lookup_s + again.lookup_s)

    async def _set_aside_damage(self, prefix: Prefix) -> None:
        """The engine read bytes that do not match: those chunks count as not held from now on, and can come again."""
        if prefix.hit is not None:
            with suppress(StoreError):
                await self._lane.run(self._store.verify, prefix.hit.artifact)


def _worth_restoring(stored_tokens: int, wanted: Wanted) -> bool:
    """Whether the store has more than RAM holds, and enough to read state from disk for."""
    enough = min(FEW_TOKENS, LITTLE_SHARE * len(wanted.tokens))
    return stored_tokens > wanted.live_tokens and stored_tokens >= enough


def _may_be_the_prefix(error: KvnetError) -> bool:
    """Whether the same request could succeed without the prefix it was to continue from."""
    return not isinstance(error, EngineCrashedError | OverBudgetError | BusyError)


def _n_tokens(found: Found) -> int:
    return found.hit.n_tokens if found.hit is not None else 0


def _merged(first: Sequence[Rejected], second: Sequence[Rejected]) -> tuple[Rejected, ...]:
    return tuple(dict.fromkeys((*first, *second)))
