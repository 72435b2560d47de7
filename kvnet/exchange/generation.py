"""Generate: reuse the longest verified prefix, compute the rest, decode.

The network may only make this faster. Whatever goes wrong with reuse - nothing found, a chunk that does not match its
hash, state the model does not take - ends in plain local prefill, and the answer says so.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import trio

from kvnet.engine.interface import (
    Engine,
    FirstToken,
    Generated,
    GenerateEvent,
    GenerateRequest,
    PrefillProgress,
    RestorePlan,
    TextDelta,
)
from kvnet.errors import (
    CompatibilityError,
    EngineCrashedError,
    EngineError,
    IntegrityError,
    KvnetError,
    StoreError,
)
from kvnet.exchange.events import PrefixFetched
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.reuse import Found, PrefixHit, Rejected, find_local, restore_plan
from kvnet.format.fingerprint import Verdict
from kvnet.format.hashes import ArtifactHash
from kvnet.protocol.ids import PeerId
from kvnet.store.interface import Store

FetchPrefix = Callable[[Engine, Sequence[int], int], Awaitable[PrefixFetched | None]]
"""Asks peers for a longer prefix than the ``n`` tokens held; what they have is in the store when it returns."""


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
class Answer:
    """A finished generation and how it came about.

    Attributes:
        text: what was generated.
        tokens: token ids generated, without the end token.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: tokens of the prompt.
        reused_tokens: of these, restored instead of computed.
        prefilled_tokens: of these, computed.
        sources: where the reused ones came from.
        ttft_s: seconds from the request to the first token, looking up and fetching included.
        prefill_s: seconds of prefill.
        restore_s: seconds of restore.
        decode_s: seconds from the first token to the end.
        verdict: how exact the reuse is; ``None`` when nothing was reused.
        policy: the trust policy in force.
        rejected: artifacts that fitted and were not used, with the reason.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    sources: tuple[Source, ...]
    ttft_s: float
    prefill_s: float
    restore_s: float
    decode_s: float
    verdict: Verdict | None
    policy: str
    rejected: tuple[Rejected, ...] = ()


REUSE_ATTEMPTS = 2
"""Restores that are tried: a second one when the first found damaged chunks, which may have come again from a peer."""

AnswerEvent = PrefillProgress | TextDelta | Answer


@dataclass(slots=True)
class _Reuse:
    """What was found to restore, and what led there."""

    plan: RestorePlan | None = None
    hit: PrefixHit | None = None
    fetched: PrefixFetched | None = None
    rejected: tuple[Rejected, ...] = ()


class Generator:
    """Answers prompts with one engine, reusing what this node or its peers hold.

    Args:
        store: where artifacts are.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        fetch_prefix: how to ask peers; ``None`` to use the store alone.
        exact_only: reuse only artifacts whose verdict is ``EXACT``.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        fetch_prefix: FetchPrefix | None,
        *,
        exact_only: bool = False,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._fetch_prefix = fetch_prefix
        self._exact_only = exact_only

    async def generate(
        self, engine: Engine, tokens: Sequence[int], *, max_tokens: int, reuse: bool
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Decode greedily after ``tokens``; the last event is the ``Answer``.

        Args:
            engine: of the model to use.
            tokens: the whole prompt's token ids, from one tokenization.
            max_tokens: most tokens to generate.
            reuse: look for stored and fetched prefixes; otherwise nothing is looked up.

        Raises:
            EngineError: the engine cannot answer, with or without reuse.
        """
        clock = _Clock(trio.current_time())
        found = await self._find(engine, tokens) if reuse else _Reuse()
        for _ in range(REUSE_ATTEMPTS):
            if found.plan is None:
                break
            emitted = False
            try:
                async with aclosing(self._run(engine, tokens, found, max_tokens, clock)) as events:
                    async for event in events:
                        emitted = emitted or isinstance(event, TextDelta)
                        yield event
                return
            except EngineCrashedError:
                raise
            except (IntegrityError, CompatibilityError, StoreError, EngineError) as error:
                if emitted:
                    raise
                found = await self._after_failure(engine, tokens, found, error)
        found = _Reuse(rejected=found.rejected)
        async with aclosing(self._run(engine, tokens, found, max_tokens, clock)) as events:
            async for event in events:
                yield event

    async def _after_failure(self, engine: Engine, tokens: Sequence[int], found: _Reuse, error: KvnetError) -> _Reuse:
        """What to try next: after damage, whatever is left here or comes from peers; after anything else, nothing."""
        rejected = (*found.rejected, Rejected(_artifact_of(found), "restore_failed", str(error)))
        if not isinstance(error, IntegrityError):
            return _Reuse(rejected=rejected)
        await self._set_aside_damage(found)
        again = await self._find(engine, tokens)
        again.rejected = (*rejected, *again.rejected)
        return again

    async def _set_aside_damage(self, found: _Reuse) -> None:
        """The engine read bytes that do not match: those chunks count as not held from now on, and can come again."""
        if found.hit is not None:
            with suppress(StoreError):
                await self._lane.run(self._store.verify, found.hit.artifact)

    async def _find(self, engine: Engine, tokens: Sequence[int]) -> _Reuse:
        """The longest prefix here; or, when peers have a longer one that they deliver in time, theirs."""
        local = await self._local(engine, tokens)
        held = local.hit.n_tokens if local.hit is not None else 0
        fetched: PrefixFetched | None = None
        if self._fetch_prefix is not None and held < len(tokens) - 1:
            fetched = await self._fetch_prefix(engine, tokens, held)
            if fetched is not None:
                local = await self._local(engine, tokens)
        if local.hit is None:
            return _Reuse(rejected=local.rejected)
        try:
            plan = await self._lane.run(restore_plan, self._store, local.hit.record, local.hit.n_tokens)
        except StoreError:
            plan = None
        if plan is None:
            return _Reuse(rejected=local.rejected)
        with suppress(StoreError):
            # On a full disk the use cannot be noted; that is no reason not to use it.
            await self._lane.run(self._store.touch, local.hit.artifact)
        return _Reuse(plan, local.hit, fetched, local.rejected)

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
            )
        except (StoreError, IntegrityError) as error:
            return Found(None, (Rejected(ArtifactHash(bytes(32)), "store", str(error)),))

    async def _run(
        self, engine: Engine, tokens: Sequence[int], found: _Reuse, max_tokens: int, clock: "_Clock"
    ) -> AsyncGenerator[AnswerEvent, None]:
        request = GenerateRequest(tokens=tokens, restore=found.plan, max_tokens=max_tokens)
        events: AsyncGenerator[GenerateEvent, None] = engine.generate(request)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, FirstToken):
                    clock.first_token()
                elif isinstance(event, Generated):
                    yield self._answer(tokens, found, event, clock)
                else:
                    yield event

    def _answer(self, tokens: Sequence[int], found: _Reuse, done: Generated, clock: "_Clock") -> Answer:
        reused = found.hit if done.restored_tokens else None
        return Answer(
            text=done.text,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            prompt_tokens=len(tokens),
            reused_tokens=done.restored_tokens,
            prefilled_tokens=done.prefilled_tokens,
            sources=_sources(found, done),
            ttft_s=clock.ttft_s,
            prefill_s=done.prefill_s,
            restore_s=done.restore_s,
            decode_s=clock.since_first_token_s(),
            verdict=reused.comparison.verdict if reused is not None else None,
            policy=self._identity.policy().name,
            rejected=found.rejected,
        )


class _Clock:
    """Seconds of one request: to the first token, and from there to the end."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None

    def first_token(self) -> None:
        if self._first_s is None:
            self._first_s = trio.current_time()

    @property
    def ttft_s(self) -> float:
        return (self._first_s if self._first_s is not None else trio.current_time()) - self._started_s

    def since_first_token_s(self) -> float:
        return trio.current_time() - self._first_s if self._first_s is not None else 0.0


def _artifact_of(found: _Reuse) -> ArtifactHash:
    return found.hit.artifact if found.hit is not None else ArtifactHash(bytes(32))


def _sources(found: _Reuse, done: Generated) -> tuple[Source, ...]:
    """Where the restored tokens came from; nothing when none were."""
    hit, plan, fetched = found.hit, found.plan, found.fetched
    if hit is None or plan is None or not done.restored_tokens:
        return ()
    signer = hit.manifest.publisher
    if fetched is not None and fetched.artifact == hit.artifact:
        return (
            Source("peer", fetched.peer, done.restored_tokens, fetched.n_bytes, fetched.seconds, signer, hit.artifact),
        )
    read = sum(chunk.length_bytes for chunk in plan.chunks)
    return (Source("disk", PeerId(b""), done.restored_tokens, read, done.restore_s, signer, hit.artifact),)
