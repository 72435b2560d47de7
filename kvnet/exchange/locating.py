"""Find whoever has an artifact: its signed manifest, judged, and its chunk list, from whichever peer sends sound ones.

Signature and policy come before the first chunk is asked for, so that nothing is fetched that could not be used.
"""

from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

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
from kvnet.exchange.identity import Identity
from kvnet.exchange.session import PeerSession
from kvnet.format.chunks import ChunkEntry, page_count
from kvnet.format.hashes import ArtifactHash
from kvnet.protocol.chunklist import verify_chunk_list
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import ChunkListReply, GetChunkList, GetManifest, ManifestReply
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.trust.envelope import SignedManifest, open_manifest
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal

HEAD_START_S = 1.0
"""Of each peer over the next: one that says nothing holds a fetch up for so long, and no longer."""

T = TypeVar("T")

SessionsOf = Callable[[], Sequence[PeerSession]]
"""The open sessions, the best peer first."""


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

    @property
    def keyed(self) -> bytes:
        """The artifact hash under the lookup secret of its namespace, 32 bytes: what requests name."""
        return bytes(self.namespace.keyed_artifact(self.signed.artifact_hash))


class Locator:
    """Asks peers for manifests and chunk lists.

    Args:
        identity: namespaces and policy.
        sessions: whom to ask.
    """

    def __init__(self, identity: Identity, sessions: SessionsOf) -> None:
        self._identity = identity
        self._sessions = sessions

    def asked(self) -> frozenset[PeerId]:
        """Whom `locate` would ask now."""
        return frozenset(session.peer for session in self._sessions() if session.slots)

    async def locate(self, artifact: ArtifactHash, *, besides: Container[PeerId] = ()) -> Located:
        """Ask peers, each with a head start over the next, for the signed manifest of an artifact.

        A signature that does not hold is the fault of whoever sent it: the next peer may have a sound one.

        Args:
            artifact: its hash.
            besides: peers that are not asked: they were before.

        Raises:
            TrustError: it exists, and the policy does not accept it, or nobody has it with a sound signature.
            CompatibilityError: nobody has it in a form that this build can use.
            NotFoundError: nobody who was asked gave a manifest that holds; the reasons are in the message.
        """
        asks = [
            partial(self._located, session, slot, namespace, artifact)
            for session in self._sessions()
            if session.peer not in besides
            for namespace, slot in session.slots.items()
        ]
        tolerated = (NetworkError, MalformedError, IntegrityError, TrustError, CompatibilityError)
        located, errors = await _first_of(asks, tolerated)
        if located is not None:
            self.require_accepted(located.signed)
            return located
        for error in errors:
            if isinstance(error, TrustError | CompatibilityError):
                raise error
        raise NotFoundError(_nobody(errors), hint="`kvnet peers` shows who is reachable; `--from ADDR` names a peer.")

    async def _located(self, session: PeerSession, slot: int, namespace: Namespace, artifact: ArtifactHash) -> Located:
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
        return Located(signed, namespace, session)

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
        asks = [partial(self._entries, session, located) for session in self.in_namespace(located)]
        entries, errors = await _first_of(asks, (NetworkError, IntegrityError))
        if entries is not None:
            return entries
        raise NotFoundError(f"the chunk list: {_nobody(errors)}", hint="Try again when another peer that has it is up.")

    async def _entries(self, session: PeerSession, located: Located) -> tuple[ChunkEntry, ...]:
        """One peer's chunk list, checked."""
        slot = session.slots[located.namespace]
        pages: list[bytes] = []
        for page in range(page_count(located.signed.manifest.n_chunks)):
            reply = await session.ask(GetChunkList(request_id=0, slot=slot, artifact=located.keyed, page=page))
            assert isinstance(reply, ChunkListReply)  # noqa: S101 - the session machine lets no other reply through
            pages.append(reply.page)
        return verify_chunk_list(located.signed.manifest, pages)

    def in_namespace(self, located: Located) -> list[PeerSession]:
        """Who can be asked now: the peer that located it first, then everybody else in its namespace."""
        there = (each for each in self._sessions() if located.namespace in each.slots)
        return sorted(there, key=lambda each: each.peer != located.session.peer)


_REASON_WORDS = {
    RefusalReason.UNKNOWN.value: "does not know it, or shares no namespace with this node",
    RefusalReason.BUSY.value: "has too much to do just now",
    RefusalReason.NOT_HELD.value: "knows it, but does not hold it",
    RefusalReason.NOT_SERVING.value: "serves nothing now",
}


def _nobody(errors: Sequence[KvnetError]) -> str:
    if not errors:
        return "expected a peer in one of this node's namespaces, found none connected"
    reasons = [error.reason if isinstance(error, PeerRefusedError) else str(error) for error in errors]
    reasons = [_REASON_WORDS.get(reason, reason) for reason in reasons]
    counted = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    words = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in counted.items())
    asked = "the one peer asked does not have it" if len(reasons) == 1 else f"none of {len(reasons)} peers asked has it"
    return f"{asked} ({words})"


async def _first_of(
    asks: Sequence[Callable[[], Awaitable[T]]], tolerated: tuple[type[KvnetError], ...]
) -> tuple[T | None, list[KvnetError]]:
    """The first answer, or None, and why others failed; each is asked once the one before has failed or had its time.

    Raises:
        KvnetError: one failed with something that is not tolerated.
    """
    answers: list[T] = []
    errors: list[KvnetError] = []
    async with trio.open_nursery() as nursery:

        async def ask_one(ask: Callable[[], Awaitable[T]], failed: trio.Event) -> None:
            try:
                answers.append(await ask())
            except KvnetError as error:
                errors.append(error)
                if isinstance(error, tolerated):
                    failed.set()
                    return
            nursery.cancel_scope.cancel()

        for ask in asks:
            failed = trio.Event()
            nursery.start_soon(ask_one, ask, failed)
            with trio.move_on_after(HEAD_START_S):
                await failed.wait()
    if answers:
        return answers[0], errors
    for error in errors:
        if not isinstance(error, tolerated):
            raise error
    return None, errors
