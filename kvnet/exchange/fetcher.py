"""Fetch an artifact, or the part of one that a prompt needs, from peers; verify it; keep it.

The order is the same for every byte: bounded, schema-checked, hash-checked, and only then read for its meaning.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from kvnet.errors import IntegrityError, KvnetError, NotFoundError, NotInStoreError
from kvnet.exchange.chunk_fetch import ChunkFetch, Manner, Sink
from kvnet.exchange.chunk_sources import ChunkSources, Tells
from kvnet.exchange.fetch_job import FetchJob, TokenIds, run_telling
from kvnet.exchange.fetch_pack import FetchPack, ProgressCallback
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.locating import Located, Locator, SessionsOf
from kvnet.exchange.provider import Delivered, Provider
from kvnet.exchange.transport import ChunkTransport
from kvnet.exchange.turns import Turns, turn_key
from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.prefix import block_keys, tokens_from_bytes
from kvnet.network.news import News
from kvnet.protocol.fetch import DropReason, FetchLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.pace import Pace, Purpose
from kvnet.protocol.scoring import PeerScores
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.policy import Refusal


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought.

    Attributes:
        record: the artifact as it is stored now.
        keys: its prefix key of each block.
        fetched_chunks: chunks that came over the network now.
        fetched_bytes: their bytes.
        seconds: from the first request to published.
        delivered: what each peer delivered.
        held_chunks: chunks of what was wanted that are here and came otherwise.
        resumed_chunks: of these, those that an earlier fetch of the artifact brought.
        meanwhile_chunks: of these, those that prompts fetched while this was under way.
    """

    record: ArtifactRecord
    keys: list[PrefixKey]
    fetched_chunks: int
    fetched_bytes: int
    seconds: float
    delivered: dict[PeerId, Delivered]
    held_chunks: int = 0
    resumed_chunks: int = 0
    meanwhile_chunks: int = 0


MAX_ROUNDS = 2
"""How often what is missing is asked for."""


class ArtifactFetcher:
    """Fetches artifacts by hash.

    Args:
        store: where they go.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        transport: how chunk bytes get here.
        sessions: whom to ask.
        limits: patience and appetite.
        download_bytes_s: what may arrive a second for all fetches together; 0 for no limit.

    Attributes:
        locator: finds whoever has an artifact.
        scores: what is remembered of peers between fetches.
        tells: whether a peer tells members that it has an artifact; nobody does where nobody listens.
        turns: copies give way to whoever waits for an answer.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        transport: ChunkTransport,
        sessions: SessionsOf,
        limits: FetchLimits | None = None,
        *,
        download_bytes_s: float = 0.0,
    ) -> None:
        self._pace = Pace(download_bytes_s)
        self._store = store
        self._lane = lane
        self._identity = identity
        self._transport = transport
        self._limits = limits
        self._under_way: set[FetchJob] = set()
        self.locator = Locator(identity, sessions)
        self.scores = PeerScores()
        self.turns = Turns()
        self.tells: Tells = lambda _namespace, _peer, _key: False
        self._news = News()

    async def locate(self, artifact: ArtifactHash) -> Located:
        """See `Locator.locate`."""
        return await self.locator.locate(artifact)

    async def chunk_list(self, located: Located) -> tuple[ChunkEntry, ...]:
        """See `Locator.chunk_list`."""
        return await self.locator.chunk_list(located)

    def providers(self, located: Located) -> list[Provider]:
        """Whom to ask for chunks, the best first by what they did before; none that sent wrong bytes of late.

        Raises:
            NotFoundError: everybody who could be asked did.
        """
        return self._sources(located, 0).begin()

    def session_opened(self) -> None:
        """A peer is there: fetches under way may ask it."""
        self._news.tell()

    def _sources(self, located: Located, n_chunks: int) -> ChunkSources:
        return ChunkSources(located, n_chunks, self.locator, self.scores, tells=self.tells, news=self._news)

    def _chunk_fetch(
        self,
        located: Located,
        entries: Sequence[ChunkEntry],
        missing: Iterable[int],
        sink: Sink,
        purpose: Purpose = Purpose.INTERACTIVE,
    ) -> ChunkFetch:
        sources = self._sources(located, len(entries))
        return ChunkFetch(
            self._transport,
            entries,
            missing,
            sources.begin(),
            sink,
            Manner(purpose, self._limits, located.signed.manifest.plan().token_chunks, self._pace),
            sources=sources,
        )

    def _judge(self, fetch: ChunkFetch, entries: Sequence[ChunkEntry], missing: Sequence[int]) -> None:
        """Remember what each peer did, for the fetches to come.

        Whoever was asked and had brought nothing when the fetch ended is no faster than one chunk in that time.
        """
        now_s = trio.current_time()
        for peer, each in fetch.delivered.items():
            if each.dropped:
                self.scores.dropped(peer, DropReason(each.dropped), now_s)
            if each.n_chunks:
                self.scores.delivered(peer, each.n_bytes, each.seconds, now_s)
        largest = max(entries[index].length_bytes for index in missing)
        for peer, seconds in fetch.waited_s().items():
            self.scores.waited(peer, largest, seconds, now_s)

    async def token_ids(self, located: Located, entries: Sequence[ChunkEntry]) -> TokenIds:
        """The artifact's token ids alone, verified and kept nowhere: what a claim of a shared prefix is checked with.

        Raises:
            NotFoundError: nobody gives them.
            IntegrityError: they do not have the prefix key that the publisher signed.
        """
        plan = located.signed.manifest.plan()
        parts: dict[int, bytes] = {}
        fetched: dict[int, bytes] = {}
        missing: list[int] = []
        for index in plan.token_chunks:
            if await self._lane.run(self._store.has_chunk, entries[index].hash):
                parts[index] = await self._lane.run(self._store.read_chunk, entries[index].hash)
            else:
                missing.append(index)

        async def keep(chunks: Sequence[VerifiedChunk], _: PeerId) -> None:
            fetched.update({chunk.index: bytes(chunk.data) for chunk in chunks})

        delivered: dict[PeerId, Delivered] = {}
        if missing:
            fetch = self._chunk_fetch(located, entries, missing, keep)
            try:
                await fetch.run()
            finally:
                self._judge(fetch, entries, missing)
            delivered = dict(fetch.delivered)
        parts |= fetched
        tokens = tokens_from_bytes(b"".join(parts[index] for index in plan.token_chunks))
        self._keys(located, tokens)
        return TokenIds(tuple(tokens), fetched, delivered)

    def _keys(self, located: Located, tokens: Sequence[int]) -> list[PrefixKey]:
        """The prefix keys of token ids, compared with the one the publisher signed."""
        manifest = located.signed.manifest
        keys = block_keys(located.namespace.prefix_root(manifest.fingerprint.hash), tokens)
        if keys[-1] != manifest.last_prefix_key:
            raise IntegrityError(
                "expected token ids with the prefix key that the manifest names, found others",
                hint="Its publisher made a broken artifact; do not use it.",
            )
        return keys

    async def fetch(
        self,
        located: Located,
        entries: Sequence[ChunkEntry],
        needed: Iterable[int] | None = None,
        *,
        token_ids: TokenIds | None = None,
        pinned: bool = False,
        progress: ProgressCallback | None = None,
        tick_s: float | None = None,
        purpose: Purpose = Purpose.INTERACTIVE,
        scope: trio.CancelScope | None = None,
    ) -> Fetched:
        """Get the needed chunks that are not held, verify each, and publish the pack.

        A caller that is cancelled leaves what has arrived in the store, when its token ids are among it.

        Args:
            located: the artifact.
            entries: its verified chunk list.
            needed: indices of the chunks to have; ``None`` for all. Token ids are always among them.
            token_ids: what :meth:`token_ids` gave before; it is not fetched again.
            pinned: keep it, once it is here, until it is unpinned.
            progress: told after each chunk.
            tick_s: told too before the first, and whenever so many seconds have passed, with what each peer brings.
            purpose: what for; peers whose rate is limited serve first whoever waits for an answer. Copies and repairs
                begin with what is rarest; a copy waits a while for peers when nobody is left to ask. Both give way to
                prompts that are looking into the same artifact (`turns`).
            scope: cancelling it ends the fetching; what has arrived by then is kept and published. An interactive fetch
                has it from the front; what others brought may have gaps, and prompts reuse it up to the first.

        Raises:
            NotFoundError: nobody is left who has what is missing, or ``scope`` ended before anything arrived.
            StoreFullError: it does not fit.
            IntegrityError: its token ids do not have the prefix key its publisher signed.
        """
        token_ids = token_ids or TokenIds((), {}, {})
        plan = located.signed.manifest.plan()
        work = FetchPack(
            self._store,
            self._lane,
            located.signed.artifact_hash,
            entries,
            token_chunks=plan.token_chunks,
            wanted=set(range(len(plan)) if needed is None else needed) | set(plan.token_chunks),
            arrived=token_ids.chunks,
            read_soon=purpose is Purpose.INTERACTIVE,
            progress=progress,
        )
        job = FetchJob(located, work, token_ids, trio.current_time(), purpose, pinned=pinned)
        self._under_way.add(job)
        try:
            get_missing = partial(self._get_missing, job, entries, scope, tick_s)
            with job.allowed:
                if purpose is Purpose.INTERACTIVE:
                    await get_missing()
                else:
                    await self.turns.copy(
                        turn_key(located.namespace.id, located.keyed), get_missing, partial(self._put_down, job)
                    )
            # Judged anew: what was to be trusted when it began may be revoked by now.
            self.locator.require_accepted(located.signed)
            return await self._publish(job)
        except BaseException as error:
            # Cancelled, alone or out of a nursery as a group; neither is an `Exception`.
            if work.n_chunks and not isinstance(error, Exception):
                # A part without a name, that its owner gave up, is nothing to keep for good.
                job.pinned = False
                with trio.CancelScope(shield=True), suppress(KvnetError):
                    await self._publish(job)
            raise
        finally:
            self._under_way.discard(job)
            work.abort()

    def judge_again(self) -> None:
        """Trust has changed: end the fetches of what may not be used any more."""
        policy = self._identity.policy()
        for job in self._under_way:
            if isinstance(policy.judge(job.located.signed.manifest), Refusal):
                job.allowed.cancel()

    async def _get_missing(
        self, job: FetchJob, entries: Sequence[ChunkEntry], scope: trio.CancelScope | None, tick_s: float | None
    ) -> None:
        """Twice when need be: making room may take a chunk that was held when the first round began."""
        job.work.gives_way = False
        with scope or trio.CancelScope() as patience:
            for _ in range(MAX_ROUNDS):
                missing = await job.work.missing()
                if not missing:
                    return
                sink = job.work.keep
                fetch = self._chunk_fetch(job.located, entries, missing, sink, job.purpose)
                try:
                    await run_telling(fetch, job, tick_s)
                finally:
                    self._judge(fetch, entries, missing)
                    job.add(fetch.delivered)
        if patience.cancelled_caught and not job.work.begun:
            raise NotFoundError("peers were slower than computing", hint="Try again when a faster peer is up.")

    async def _put_down(self, job: FetchJob) -> None:
        """Let prompts have what a copy has brought; before its token ids are here that is of no use to them."""
        job.work.gives_way = True
        await job.work.missing()
        await job.work.tell()
        if not job.work.begun:
            return
        try:
            tokens = await job.work.tokens()
        except NotInStoreError:
            return
        self.locator.require_accepted(job.located.signed)
        keys = self._keys(job.located, tokens)
        await job.work.put_down(job.located.signed.envelope, keys=keys)

    async def _publish(self, job: FetchJob) -> Fetched:
        signed, work = job.located.signed, job.work
        keys = self._keys(job.located, await work.tokens())
        record = None
        if not work.begun and not job.token_ids.chunks and not job.pinned:
            # Another fetch has brought all of it meanwhile: there is nothing to write.
            record = await self._lane.run(self._store.get, signed.artifact_hash)
        if record is None:
            record = await work.publish(signed.envelope, keys=keys, pinned=job.pinned)
        return Fetched(
            record=record,
            keys=keys,
            fetched_chunks=work.n_chunks + len(job.token_ids.chunks),
            fetched_bytes=work.n_bytes + sum(map(len, job.token_ids.chunks.values())),
            seconds=trio.current_time() - job.started_s,
            delivered=job.delivered,
            held_chunks=work.held_chunks,
            resumed_chunks=work.resumed_chunks,
            meanwhile_chunks=work.meanwhile_chunks,
        )
