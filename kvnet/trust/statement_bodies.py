"""What a publisher key says about keys, artifacts, peers and members: one body for each type of statement.

A statement says one thing about one *subject*. Of the statements of one signer, one type and one subject only that
with the highest sequence counts, and sequences never go down: who has seen a later one takes no earlier one again.
Sequences are times in milliseconds, so that one from the far future, which would outrank all others, can be refused.
"""

from typing import Annotated, Final, Literal

import msgspec

from kvnet.trust.envelope import StatementType

PAGE_ARTIFACTS: Final = 16
"""Artifacts of one provider record."""
MAX_PAGES: Final = 1024
"""Provider records of one peer in one namespace: 16,384 artifacts."""
MAX_KEYS_PER_ARTIFACT: Final = 24
"""Checkpoints of an artifact: 14 powers of two reach four million tokens; the last full block; the end."""
MAX_ADDRESSES: Final = 8
"""Of one peer in a statement: a few interfaces, each with IPv4 and IPv6."""
MAX_MEMBERS: Final = 128
"""Members of one namespace; every rekeying seals a secret for each."""
SEALED_SIZE_BYTES: Final = 80
"""A 32-byte secret in a libsodium sealed box: 32 bytes of ephemeral key and 16 of tag around it."""

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
PeerBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=42)]
Address = Annotated[str, msgspec.Meta(min_length=2, max_length=255, pattern=r"\A/[A-Za-z0-9/.:_%=+-]+\Z")]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[a-z0-9][a-z0-9._-]*\Z")]
Label = Annotated[str, msgspec.Meta(max_length=64)]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all bodies have.

    Attributes:
        version: of the body's shape.
        sequence: milliseconds since 1970, higher than that of the signer's statement before it on this subject.
        issued: seconds since 1970.
        expires: seconds since 1970; 0 for never.
    """

    version: Literal[1] = 1
    sequence: Count
    issued: Seconds
    expires: Seconds

    @property
    def subject(self) -> bytes:
        """What it is about; with signer and type it says which statements outrank each other.

        Raises:
            NotImplementedError: in this class; every body has its own.
        """
        raise NotImplementedError


class Revocation(Statement, frozen=True, kw_only=True):
    """Use and serve this no more.

    Attributes:
        kind: what is revoked.
        target: an artifact hash, or a publisher id.
        reason: in words, for people.
    """

    kind: Literal["artifact", "publisher"]
    target: Bytes32
    reason: Annotated[str, msgspec.Meta(max_length=200)]

    @property
    def subject(self) -> bytes:
        """The kind and the target."""
        return self.kind.encode() + b" " + self.target


class KeyRotation(Statement, frozen=True, kw_only=True):
    """Whoever believes the signer may believe this key in its place. Signed by both.

    Attributes:
        new: the publisher id that follows.
        new_signature: by the new key, over the old key, the new one and the sequence.
    """

    new: Bytes32
    new_signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    @property
    def subject(self) -> bytes:
        """The new key. A key rotates once: who finds two rotations of it knows that one was not its owner's."""
        return b"key " + self.new


class HeldEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One artifact that a peer has, as the namespace's members name it on the wire.

    Attributes:
        artifact: artifact hash under the lookup secret.
        n_tokens: of the whole artifact.
        codec: text of its codec.
        size_bytes: of all its chunks.
        keys: its checkpoints' prefix keys under the lookup secret, the shortest first.
    """

    artifact: Bytes32
    n_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    codec: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[a-z0-9][a-z0-9._+/-]*\Z")]
    size_bytes: Count
    keys: Annotated[tuple[Bytes32, ...], msgspec.Meta(max_length=MAX_KEYS_PER_ARTIFACT)]


class ProviderRecord(Statement, frozen=True, kw_only=True):
    """This peer is here and has these: one page of what it holds in a namespace. Renewed before it expires.

    Attributes:
        namespace: id of the namespace.
        peer: raw bytes of the peer id.
        addresses: where it listens, ending in ``/p2p/<id>``.
        page: number of the page; page 0 is there even of a peer that holds nothing.
        entries: what is on this page; fewer than before means that the rest is gone.
        revocations: sequence of the signer's latest revocation there, 0 for none: who knows no such statement knows
            that one is being withheld.
        n_revocations: how many the signer has said there: who knows fewer knows that an earlier one is.
    """

    namespace: Bytes32
    peer: PeerBytes
    addresses: Addresses
    page: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PAGES)]
    entries: Annotated[tuple[HeldEntry, ...], msgspec.Meta(max_length=PAGE_ARTIFACTS)]
    revocations: Count
    n_revocations: Count

    @property
    def subject(self) -> bytes:
        """The namespace, the page and the peer."""
        return self.namespace + self.page.to_bytes(2, "big") + self.peer


class Invitation(Statement, frozen=True, kw_only=True):
    """Who has this may join. It is a secret until it is used up or has expired, and is never passed on among members.

    Attributes:
        id: names it at the inviter.
        secret: proves to the inviter, and to the guest, that the other has it.
        role: ``device``: another machine of the same person; ``colleague``: somebody else.
        swarm: name of the namespace it opens, ``mine`` for a device.
        namespace: id of that namespace.
        founder: publisher id of who made the namespace, where the chain of its members begins.
        peer: raw peer id of the inviter.
        addresses: where the inviter, or another member, listens.
        uses: how many may join with it.
    """

    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    secret: Bytes32
    role: Literal["device", "colleague"]
    swarm: Name
    namespace: Bytes32
    founder: Bytes32
    peer: PeerBytes
    addresses: Addresses
    uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]

    @property
    def subject(self) -> bytes:
        """Its id."""
        return self.id


class Membership(Statement, frozen=True, kw_only=True):
    """The signer, a member, has let this publisher in.

    Attributes:
        namespace: id of the namespace.
        member: publisher id.
        peers: raw peer ids of its machines.
        role: ``device`` or ``colleague``.
        label: what people call it.
    """

    namespace: Bytes32
    member: Bytes32
    peers: Annotated[tuple[PeerBytes, ...], msgspec.Meta(max_length=4)]
    role: Literal["device", "colleague"]
    label: Label

    @property
    def subject(self) -> bytes:
        """The namespace and the member."""
        return self.namespace + self.member


class SealedSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A secret that only one member can read: a sealed box for its publisher key turned into an X25519 key."""

    member: Bytes32
    box: Annotated[bytes, msgspec.Meta(min_length=SEALED_SIZE_BYTES, max_length=SEALED_SIZE_BYTES)]


class Rekey(Statement, frozen=True, kw_only=True):
    """A namespace gets a new lookup secret, and these are members no more.

    Attributes:
        namespace: id of the namespace.
        removed: publisher ids.
        sealed: the new lookup secret for every member that stays.
    """

    namespace: Bytes32
    removed: Annotated[tuple[Bytes32, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    sealed: Annotated[tuple[SealedSecret, ...], msgspec.Meta(max_length=MAX_MEMBERS)]

    @property
    def subject(self) -> bytes:
        """The namespace."""
        return self.namespace


class Removal(Statement, frozen=True, kw_only=True):
    """Its owner wants this artifact gone from all of the owner's machines."""

    namespace: Bytes32
    artifact: Bytes32

    @property
    def subject(self) -> bytes:
        """The namespace and the artifact."""
        return self.namespace + self.artifact


class Tag(Statement, frozen=True, kw_only=True):
    """The signer calls an artifact by this name.

    Attributes:
        namespace: id of the namespace the name is for.
        name: as in ``kvnet add --name``.
        number: of the version, from 1.
        artifact: the artifact hash.
    """

    namespace: Bytes32
    name: Name
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    artifact: Bytes32

    @property
    def subject(self) -> bytes:
        """The namespace and the name."""
        return self.namespace + self.name.encode()


class Attestation(Statement, frozen=True, kw_only=True):
    """The signer has looked into an artifact of somebody else.

    Attributes:
        namespace: id of the artifact's namespace.
        artifact: the artifact hash.
        claim: ``same``: computed the same state; ``differs``: computed another.
        max_difference: largest absolute difference seen, as text of a decimal number.
    """

    namespace: Bytes32
    artifact: Bytes32
    claim: Literal["same", "differs"]
    max_difference: Annotated[str, msgspec.Meta(max_length=32, pattern=r"\A[0-9.e+-]*\Z")]

    @property
    def subject(self) -> bytes:
        """The namespace and the artifact."""
        return self.namespace + self.artifact


AnyStatement = Revocation | KeyRotation | ProviderRecord | Invitation | Membership | Rekey | Removal | Tag | Attestation

BODIES: Final[dict[StatementType, type[AnyStatement]]] = {
    StatementType.REVOCATION: Revocation,
    StatementType.KEY_ROTATION: KeyRotation,
    StatementType.PROVIDER: ProviderRecord,
    StatementType.INVITATION: Invitation,
    StatementType.MEMBERSHIP: Membership,
    StatementType.REKEY: Rekey,
    StatementType.REMOVAL: Removal,
    StatementType.TAG: Tag,
    StatementType.ATTESTATION: Attestation,
}
"""The body of each type of statement; a manifest is none of them."""
