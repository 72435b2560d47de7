"""Fetch an artifact, or the part of one that a prompt needs, from peers; verify it; keep it.

The order is the same for every byte: bounded, schema-checked, hash-checked, and only then read for its meaning. The
signature and the policy come before the first chunk is asked for, so that nothing is fetched that could not be used.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import trio

from kvnet.errors import (
    CompatibilityError,
    IntegrityError,
    MalformedError,
    NetworkError,
    NotFoundError,
    PeerRefusedError,
    TrustError,
)
from kvnet.exchange.chunk_fetch import ChunkFetch, Delivered, Provider
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.exchange.transport import ChunkTransport
from kvnet.format.chunks import ChunkEntry, page_count
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.prefix import block_keys, tokens_from_bytes
from kvnet.protocol.chunklist import verify_chunk_list
from kvnet.protocol.fetch import FetchLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import ChunkListReply, GetChunkList, GetManifest, ManifestReply, RefusalReason
from kvnet.store.interface import ArtifactRecord, PackWriter, Store
from kvnet.trust.envelope import SignedManifest, open_manifest
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal

ProgressCallback = Callable[[FetchProgress], Awaitable[None]]

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
    """

    record: ArtifactRecord
    keys: list[PrefixKey]
    fetched_chunks: int
    fetched_bytes: int
    seconds: float
    delivered: dict[PeerId, Delivered]


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


class ArtifactFetcher:
    """Fetches artifacts by hash.

    Args:
        store: where they go.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        transport: how chunk bytes get here.
        sessions: whom to ask.
        limits: patience and appetite.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        transport: ChunkTransport,
        sessions: SessionsOf,
        limits: FetchLimits | None = None,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._transport = transport
        self._sessions = sessions
        self._limits = limits

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
            raise TrustError(
                f"the artifact is not used: {verdict.text}",
                hint="`kvnet key trust PUBLISHER` accepts what that key signs, if you know whose it is.",
            )

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
        """Whom to ask for chunks, the one that located it first."""
        keyed = bytes(located.namespace.keyed_artifact(located.signed.artifact_hash))
        return [
            Provider(session.peer, session.opened.session_id, session.slots[located.namespace], keyed)
            for session in self._in_namespace(located)
        ]

    async def token_ids(self, located: Located, entries: Sequence[ChunkEntry]) -> list[int]:
        """The artifact's token ids alone, verified and kept nowhere: what a claim of a shared prefix is checked with.

        Raises:
            NotFoundError: nobody gives them.
            IntegrityError: they do not have the prefix key that the publisher signed.
        """
        plan = located.signed.manifest.plan()
        parts: dict[int, bytes] = {}
        missing: list[int] = []
        for index in plan.token_chunks:
            if await self._lane.run(self._store.has_chunk, entries[index].hash):
                parts[index] = await self._lane.run(self._store.read_chunk, entries[index].hash)
            else:
                missing.append(index)

        async def keep(index: int, data: bytes, _: PeerId) -> None:
            parts[index] = data

        if missing:
            await ChunkFetch(self._transport, entries, missing, self.providers(located), keep, self._limits).run()
        tokens = tokens_from_bytes(b"".join(parts[index] for index in plan.token_chunks))
        self._keys(located, tokens)
        return tokens

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
        pinned: bool = False,
        progress: ProgressCallback | None = None,
        scope: trio.CancelScope | None = None,
    ) -> Fetched:
        """Get the needed chunks that are not held, verify each, and publish the pack.

        Args:
            located: the artifact.
            entries: its verified chunk list.
            needed: indices of the chunks to have; ``None`` for all. Token ids are always among them.
            pinned: keep it until it is unpinned.
            progress: told after each chunk.
            scope: cancelling it ends the fetching; what has arrived by then, from the front, is kept and published.

        Raises:
            NotFoundError: nobody is left who has what is missing.
            StoreFullError: it does not fit.
            IntegrityError: its token ids do not have the prefix key its publisher signed.
        """
        started_s = trio.current_time()
        manifest = located.signed.manifest
        plan = manifest.plan()
        wanted = set(range(len(plan)) if needed is None else needed) | set(plan.token_chunks)
        room = sum(entries[index].length_bytes for index in wanted)
        writer = await self._lane.run(self._store.begin_pack, len(entries), expected_bytes=room)
        try:
            work = _Work(self._store, self._lane, writer, entries, plan.token_chunks, progress)
            missing = await self._lane.run(work.reference_held, wanted)
            fetch = ChunkFetch(self._transport, entries, missing, self.providers(located), work.keep, self._limits)
            if missing:
                work.expect(missing)
                with scope or trio.CancelScope():
                    await fetch.run()
            tokens = await work.tokens()
            keys = self._keys(located, tokens)
            record = await self._lane.run(
                writer.publish, located.signed.envelope, keys=keys, pinned=pinned, allow_partial=True, entries=entries
            )
        except BaseException:
            writer.abort()
            raise
        seconds = trio.current_time() - started_s
        return Fetched(record, keys, work.n_chunks, work.n_bytes, seconds, dict(fetch.delivered))


class _Work:
    """The pack of one fetch, and what has arrived for it."""

    def __init__(
        self,
        store: Store,
        lane: Lane,
        writer: PackWriter,
        entries: Sequence[ChunkEntry],
        token_chunks: range,
        progress: ProgressCallback | None,
    ) -> None:
        self._token_chunks = token_chunks
        self._store = store
        self._lane = lane
        self._writer = writer
        self._entries = entries
        self._progress = progress
        self._heads: dict[int, bytes] = {}
        self._expected = (0, 0)
        self.n_chunks = 0
        self.n_bytes = 0

    def reference_held(self, wanted: set[int]) -> list[int]:
        """Reference every chunk that some pack here has; returns the wanted ones that none has. Blocking."""
        missing: list[int] = []
        for index, entry in enumerate(self._entries):
            if entry.absent:
                continue
            if self._store.has_chunk(entry.hash):
                self._writer.reference(index, entry)
            elif index in wanted:
                missing.append(index)
        return missing

    def expect(self, missing: Sequence[int]) -> None:
        """For progress: what is to come."""
        self._expected = (len(missing), sum(self._entries[index].length_bytes for index in missing))

    async def keep(self, index: int, data: bytes, peer: PeerId) -> None:
        """Write a verified chunk; the store hashes it once more."""
        await self._lane.run(self._writer.put, index, data, expected_hash=self._entries[index].hash)
        if index in self._token_chunks:
            self._heads[index] = data
        self.n_chunks += 1
        self.n_bytes += len(data)
        if self._progress is not None:
            chunks, total = self._expected
            await self._progress(FetchProgress(self.n_bytes, total, self.n_chunks, chunks, peer))

    async def tokens(self) -> list[int]:
        """The artifact's token ids, from chunks that are verified; they are needed before the pack is published.

        Raises:
            NotInStoreError: the fetch was ended before they came.
        """
        for index in self._token_chunks:
            if index not in self._heads:
                self._heads[index] = await self._lane.run(self._store.read_chunk, self._entries[index].hash)
        return tokens_from_bytes(b"".join(self._heads[index] for index in self._token_chunks))


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
