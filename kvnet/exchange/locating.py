"""Find whoever has an artifact: its signed manifest, judged, and its chunk list, from whichever peer sends sound ones.

Signature and policy come before the first chunk is asked for, so that nothing is fetched that could not be used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvnet.errors import (
    CompatibilityError,
    IntegrityError,
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
from kvnet.protocol.messages.artifacts import ChunkListReply, GetChunkList, GetManifest, ManifestReply
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.trust.envelope import SignedManifest, open_manifest
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal

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
    """Asks peers, one after another, for manifests and chunk lists.

    Args:
        identity: namespaces and policy.
        sessions: whom to ask.
    """

    def __init__(self, identity: Identity, sessions: SessionsOf) -> None:
        self._identity = identity
        self._sessions = sessions

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
                    signed = await self._manifest(session, slot, namespace, artifact)
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

    async def _manifest(
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
        for session in self.in_namespace(located):
            try:
                return verify_chunk_list(manifest, await self._pages(session, located))
            except (NetworkError, IntegrityError) as error:
                reasons.append(str(error))
        raise NotFoundError(
            f"the chunk list: {_nobody(reasons)}", hint="Try again when another peer that has it is up."
        )

    async def _pages(self, session: PeerSession, located: Located) -> list[bytes]:
        slot = session.slots[located.namespace]
        pages: list[bytes] = []
        for page in range(page_count(located.signed.manifest.n_chunks)):
            reply = await session.ask(GetChunkList(request_id=0, slot=slot, artifact=located.keyed, page=page))
            assert isinstance(reply, ChunkListReply)  # noqa: S101 - the session machine lets no other reply through
            pages.append(reply.page)
        return pages

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


def _nobody(reasons: Sequence[str]) -> str:
    if not reasons:
        return "expected a peer in one of this node's namespaces, found none connected"
    reasons = [_REASON_WORDS.get(reason, reason) for reason in reasons]
    counted = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    words = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in counted.items())
    asked = "the one peer asked does not have it" if len(reasons) == 1 else f"none of {len(reasons)} peers asked has it"
    return f"{asked} ({words})"
