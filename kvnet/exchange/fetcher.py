"""Fetch an artifact, or the part of one that a prompt needs, from peers; verify it; keep it.

The order is the same for every byte: bounded, schema-checked, hash-checked, and only then read for its meaning. The
signature and the policy come before the first chunk is asked for, so that nothing is fetched that could not be used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from kvnet.errors import (
    CompatibilityError,
    IntegrityError,
    KvnetError,
    MalformedError,
    NetworkError,
    NotFoundError,
    PeerRefusedError,
    TrustError,
)
from kvnet.exchange.chunk_fetch import ChunkFetch, Delivered, Provider, Sink
from kvnet.exchange.events import PeerPart
from kvnet.exchange.fetch_pack import FetchPack, ProgressCallback
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.exchange.transport import ChunkTransport
from kvnet.format.chunks import ChunkEntry, VerifiedChunk, page_count
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.prefix import block_keys, tokens_from_bytes
from kvnet.protocol.chunklist import verify_chunk_list
from kvnet.protocol.fetch import DropReason, FetchLimits
from kvnet.protocol.have import HeldChunks
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import (
    Capability,
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    ManifestReply,
    RefusalReason,
)
from kvnet.protocol.pace import Pace, Purpose
from kvnet.protocol.scoring import PeerScores
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.envelope import SignedManifest, open_manifest
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal

SessionsOf = Callable[[], Sequence[PeerSession]]
"""The open sessions, the best peer first."""


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
        held_chunks: chunks of what was wanted that were here before.
    """

    record: ArtifactRecord
    keys: list[PrefixKey]
    fetched_chunks: int
    fetched_bytes: int
    seconds: float
    delivered: dict[PeerId, Delivered]
    held_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """An artifact whose signed manifest is here, and a peer that says it has it.

    Attributes:
        signed: the manifest; its signature and the policy have been checked.
        namespace: it belongs to.
        session: with the peer that sent the manifest.
    """

    signed: SignedManifest
    namespace: Namespace
    session: PeerSession


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An artifact's token ids, verified.

    Attributes:
        tokens: all of them.
        chunks: those of its token chunks that were fetched for it and are in no store yet, by index.
        delivered: what each peer delivered of them.
    """

    tokens: tuple[int, ...]
    chunks: Mapping[int, bytes]
    delivered: Mapping[PeerId, Delivered]


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
        scores: what is remembered of peers between fetches.
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
        self._sessions = sessions
        self._limits = limits
        self._under_way: set[_Job] = set()
        self.scores = PeerScores()

    async def locate(self, artifact: ArtifactHash) -> Located:
        """Ask peers, one after another, for the signed manifest of an artifact.

        A signature that does not hold is the fault of whoever sent it: the next peer may have a sound one.

        Raises:
            TrustError: it exists, and the policy does not accept it, or nobody has it with a sound signature.
            CompatibilityError: nobody has it in a form that this build can use.
            NotFoundError: nobody who was asked gave a manifest that holds; the reasons are in the message.
        """
        reasons: list[str] = []
        refused: TrustError | CompatibilityError | None = None
        for session in self._sessions():
            for namespace, slot in session.slots.items():
                try:
                    signed = await self.manifest(session, slot, namespace, artifact)
                except PeerRefusedError as error:
                    reasons.append(error.reason)
                except (TrustError, CompatibilityError) as error:
                    refused = refused or error
                except (NetworkError, MalformedError, IntegrityError) as error:
                    reasons.append(str(error))
                else:
                    self.require_accepted(signed)
                    return Located(signed, namespace, session)
        if refused is not None:
            raise refused
        raise NotFoundError(_nobody(reasons), hint="`kvnet peers` shows who is reachable; `--from ADDR` names a peer.")

    async def manifest(
        self, session: PeerSession, slot: int, namespace: Namespace, artifact: ArtifactHash
    ) -> SignedManifest:
        """One peer's signed manifest of an artifact, everything about it checked but the policy.

        Raises:
            NetworkError: the peer refuses or does not answer.
            MalformedError: what it sent is no signed manifest, or of another namespace.
            IntegrityError: it is another artifact's.
            TrustError: the signature is not valid or not the named publisher's.
        """
        signed = await self.signed_manifest(session, slot, bytes(namespace.keyed_artifact(artifact)))
        if signed.artifact_hash != artifact:
            raise IntegrityError("expected the manifest of the artifact that was asked for, found another one's")
        if signed.manifest.namespace != namespace.id:
            raise MalformedError("expected a manifest of the namespace it was asked for in, found another one's")
        return signed

    async def signed_manifest(self, session: PeerSession, slot: int, keyed_artifact: bytes) -> SignedManifest:
        """One peer's envelope under a keyed name, opened; the caller compares it with what it expects."""
        reply = await session.ask(GetManifest(request_id=0, slot=slot, artifact=keyed_artifact))
        assert isinstance(reply, ManifestReply)  # noqa: S101 - the session machine lets no other reply through
        return open_manifest(reply.envelope)

    def require_accepted(self, signed: SignedManifest) -> None:
        """Ask the policy.

        Raises:
            TrustError: it refuses; the reason and the next step are in it.
        """
        verdict = self._identity.policy().judge(signed.manifest)
        if isinstance(verdict, Refusal):
            raise TrustError(f"the artifact is not used: {verdict.text}", hint=verdict.hint)

    async def chunk_list(self, located: Located) -> tuple[ChunkEntry, ...]:
        """The verified chunk list, from whichever peer sends one that matches the manifest's root.

        Raises:
            NotFoundError: nobody does.
            MalformedError: the list matches and is broken: its publisher made it so.
        """
        manifest = located.signed.manifest
        reasons: list[str] = []
        for session in self._in_namespace(located):
            try:
                return verify_chunk_list(manifest, await self._pages(session, located))
            except (NetworkError, IntegrityError) as error:
                reasons.append(str(error))
        raise NotFoundError(
            f"the chunk list: {_nobody(reasons)}", hint="Try again when another peer that has it is up."
        )

    async def _pages(self, session: PeerSession, located: Located) -> list[bytes]:
        slot = session.slots[located.namespace]
        keyed = bytes(located.namespace.keyed_artifact(located.signed.artifact_hash))
        pages: list[bytes] = []
        for page in range(page_count(located.signed.manifest.n_chunks)):
            reply = await session.ask(GetChunkList(request_id=0, slot=slot, artifact=keyed, page=page))
            assert isinstance(reply, ChunkListReply)  # noqa: S101 - the session machine lets no other reply through
            pages.append(reply.page)
        return pages

    def _in_namespace(self, located: Located) -> list[PeerSession]:
        """The peer that located it first, then everybody else in its namespace."""
        others = [
            session
            for session in self._sessions()
            if session is not located.session and located.namespace in session.slots
        ]
        return [located.session, *others]

    def providers(self, located: Located) -> list[Provider]:
        """Whom to ask for chunks, the best first by what they did before; none that sent wrong bytes of late.

        Raises:
            NotFoundError: everybody who could be asked did.
        """
        keyed = bytes(located.namespace.keyed_artifact(located.signed.artifact_hash))
        sessions = {session.peer: session for session in self._in_namespace(located)}
        allowed = self.scores.order(sessions, trio.current_time())
        if sessions and not allowed:
            raise NotFoundError(
                f"{len(sessions)} peers could be asked, and each of them sent wrong chunks before",
                hint="Try again when another peer that has it is up, or in a few minutes.",
            )
        return [
            Provider(peer, sessions[peer].opened.session_id, sessions[peer].slots[located.namespace], keyed)
            for peer in allowed
        ]

    def _chunk_fetch(
        self,
        located: Located,
        entries: Sequence[ChunkEntry],
        missing: Iterable[int],
        sink: Sink,
        purpose: Purpose = Purpose.INTERACTIVE,
    ) -> ChunkFetch:
        sessions = {session.peer: session for session in self._in_namespace(located)}

        async def have(peer: PeerId) -> HeldChunks | None:
            session = sessions[peer]
            if Capability.HAVE not in session.opened.capabilities:
                return None
            keyed = bytes(located.namespace.keyed_artifact(located.signed.artifact_hash))
            ask = GetHave(request_id=0, slot=session.slots[located.namespace], artifact=keyed)
            try:
                reply = await session.ask(ask)
                assert isinstance(reply, Have)  # noqa: S101 - the session machine lets no other reply through
                return HeldChunks(reply.runs, len(entries))
            except KvnetError:
                return None

        providers = [each for each in self.providers(located) if each.peer in sessions]
        return ChunkFetch(
            self._transport,
            entries,
            missing,
            providers,
            sink,
            self._limits,
            purpose=purpose,
            have=have,
            pace=self._pace,
        )

    def _judge(self, fetch: ChunkFetch, entries: Sequence[ChunkEntry], missing: Sequence[int], began_s: float) -> None:
        """Remember what each peer did, for the fetches to come.

        Whoever was asked and had brought nothing when the fetch ended is no faster than one chunk in that time.
        """
        now_s = trio.current_time()
        for peer, each in fetch.delivered.items():
            if each.dropped:
                self.scores.dropped(peer, DropReason(each.dropped), now_s)
            self.scores.delivered(peer, each.n_bytes, now_s - began_s, now_s)
        largest = max(entries[index].length_bytes for index in missing)
        for peer in fetch.asked - fetch.delivered.keys():
            self.scores.waited(peer, largest, now_s - began_s, now_s)

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
            began_s = trio.current_time()
            try:
                await fetch.run()
            finally:
                self._judge(fetch, entries, missing, began_s)
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
            pinned: keep it until it is unpinned.
            progress: told after each chunk.
            tick_s: told too before the first, and whenever so many seconds have passed, with what each peer brings.
            purpose: what for; peers whose rate is limited serve first whoever waits for an answer.
            scope: cancelling it ends the fetching; what has arrived by then, from the front, is kept and published.

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
            progress=progress,
        )
        job = _Job(located, work, token_ids, trio.current_time(), purpose, pinned=pinned)
        self._under_way.add(job)
        try:
            with job.allowed:
                await self._get_missing(job, entries, scope, tick_s)
            # Judged anew: what was to be trusted when it began may be revoked by now.
            self.require_accepted(located.signed)
            return await self._publish(job)
        except BaseException as error:
            # Cancelled, alone or out of a nursery as a group; neither is an `Exception`.
            if work.n_chunks and not isinstance(error, Exception):
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
        self, job: "_Job", entries: Sequence[ChunkEntry], scope: trio.CancelScope | None, tick_s: float | None
    ) -> None:
        """Twice when need be: making room may take a chunk that was held when the first round began."""
        with scope or trio.CancelScope() as patience:
            for _ in range(MAX_ROUNDS):
                missing = await job.work.missing()
                if not missing:
                    return
                sink = job.work.keep
                fetch = self._chunk_fetch(job.located, entries, missing, sink, job.purpose)
                began_s = trio.current_time()
                try:
                    await _run_telling(fetch, job, tick_s)
                finally:
                    self._judge(fetch, entries, missing, began_s)
                    job.add(fetch.delivered)
        if patience.cancelled_caught and not job.work.begun:
            raise NotFoundError("peers were slower than computing", hint="Try again when a faster peer is up.")

    async def _publish(self, job: "_Job") -> Fetched:
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
        )


class _Job:
    """One fetch under way, and what each peer has delivered for it."""

    def __init__(
        self,
        located: Located,
        work: FetchPack,
        token_ids: TokenIds,
        started_s: float,
        purpose: Purpose,
        *,
        pinned: bool,
    ) -> None:
        self.purpose = purpose
        self.located = located
        self.work = work
        self.token_ids = token_ids
        self.started_s = started_s
        self.pinned = pinned
        self.delivered: dict[PeerId, Delivered] = {}
        self.allowed = trio.CancelScope()
        self.add(token_ids.delivered)

    def parts(self, now: Sequence[PeerPart]) -> tuple[PeerPart, ...]:
        """What each peer has brought in this round and those before."""
        return tuple(
            replace(part, n_bytes=part.n_bytes + each.n_bytes, n_chunks=part.n_chunks + each.n_chunks)
            for part in now
            for each in [self.delivered.get(part.peer, Delivered())]
        )

    def add(self, delivered: Mapping[PeerId, Delivered]) -> None:
        """Count what peers delivered in one more round; why one was left is said by the last."""
        for peer, more in delivered.items():
            before = self.delivered.get(peer, Delivered())
            self.delivered[peer] = Delivered(
                before.n_bytes + more.n_bytes,
                before.n_chunks + more.n_chunks,
                more.dropped or before.dropped,
                before.seconds + more.seconds,
                more.path or before.path,
                before.surplus_bytes + more.surplus_bytes,
            )


async def _run_telling(fetch: ChunkFetch, job: _Job, tick_s: float | None) -> None:
    """Run a fetch, and with ``tick_s`` say how it goes whenever so much time has passed."""
    if tick_s is None:
        await fetch.run()
        return
    job.work.parts = lambda: job.parts(fetch.parts())

    async def tick() -> None:
        while True:
            await job.work.tell()
            await trio.sleep(tick_s)

    failure: KvnetError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        try:
            await fetch.run()
        except KvnetError as error:
            # Out of the nursery it goes as itself, not in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


_REASON_WORDS = {
    RefusalReason.UNKNOWN.value: "does not know it, or shares no namespace with this node",
    RefusalReason.BUSY.value: "has too much to do just now",
    RefusalReason.NOT_HELD.value: "knows it, but does not hold it",
    RefusalReason.NOT_SERVING.value: "serves nothing now",
}


def _nobody(reasons: Sequence[str]) -> str:
    if not reasons:
        return "expected a peer in one of this node's namespaces, found none connected"
    reasons = [_REASON_WORDS.get(reason, reason) for reason in reasons]
    counted = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    words = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in counted.items())
    asked = "the one peer asked does not have it" if len(reasons) == 1 else f"none of {len(reasons)} peers asked has it"
    return f"{asked} ({words})"
