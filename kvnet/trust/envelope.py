"""Signed statements: an untagged COSE_Sign1 (RFC 9052, section 4.2) of one fixed shape.

::

    [ << {1: -8, 3: content type, 4: kid} >>, {}, payload, signature ]

Every byte but the kid, the payload and the signature follows from the statement type, so an envelope is compared with
that template; it is never decoded as CBOR in general. What is signed also covers ``external_aad``, which names the
type, so that a signature made for a statement of one type never verifies as another. The kid is the publisher id: the
32-byte Ed25519 key itself.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

from kvnet.errors import MalformedError, TrustError
from kvnet.format import cbor, limits
from kvnet.format.hashes import ArtifactHash, artifact_hash_of
from kvnet.format.manifest import Manifest, decode_manifest
from kvnet.trust.keys import PUBLIC_KEY_SIZE_BYTES, SIGNATURE_SIZE_BYTES, PublisherKey, publisher_text, verify_signature


class StatementType(Enum):
    """What a signature says; the value goes into the content type and into what is signed."""

    MANIFEST = "manifest"
    REVOCATION = "revocation"
    KEY_ROTATION = "key-rotation"
    PROVIDER = "provider"
    INVITATION = "invitation"
    MEMBERSHIP = "membership"
    REKEY = "rekey"
    REMOVAL = "removal"
    TAG = "tag"
    ATTESTATION = "attestation"

    def recognises(self, data: bytes) -> bool:
        """Whether these bytes begin as an envelope of this type does; nothing else about them is known then."""
        return data.startswith(_head(self))

    @property
    def content_type(self) -> str:
        """COSE header 3."""
        return f"application/vnd.kvnet.{self.value}+cbor"

    @property
    def external_aad(self) -> bytes:
        """The additional data that is signed and not sent."""
        return f"kvnet 2026-11 statement {self.value}".encode("ascii")


@dataclass(frozen=True, slots=True)
class Opened:
    """The content of an envelope whose signature is valid.

    Attributes:
        payload: the bytes that were signed, as received.
        signer: publisher id of the key that signed them; whether it may be believed is the policy's to say.
    """

    payload: bytes
    signer: bytes


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature is that of the publisher it names.

    Attributes:
        manifest: its value.
        manifest_bytes: as received; hashed and signed.
        artifact_hash: of those bytes.
        envelope: the whole envelope, to keep and to hand on.
    """

    manifest: Manifest
    manifest_bytes: bytes
    artifact_hash: ArtifactHash
    envelope: bytes


def seal(statement: StatementType, payload: bytes, key: PublisherKey) -> bytes:
    """The envelope of a payload, signed.

    Args:
        statement: what the signature says.
        payload: canonical bytes of the statement.
        key: the publisher key that signs.
    """
    protected = _protected(statement, key.public)
    signature = key.sign(_to_be_signed(statement, protected, payload))
    return b"\x84" + cbor.encode(protected) + b"\xa0" + cbor.encode(payload) + cbor.encode(signature)


def open_envelope(statement: StatementType, data: bytes, *, max_payload_bytes: int) -> Opened:
    """Check an envelope's size, shape and signature, in that order.

    Args:
        statement: the type that is expected.
        data: the envelope; nothing may follow it.
        max_payload_bytes: the largest payload of that type.

    Raises:
        MalformedError: it is too large, or not of the shape of this type.
        TrustError: it is a statement of another type, or the signature is not valid.
    """
    head = _head(statement)
    kid_end = len(head) + PUBLIC_KEY_SIZE_BYTES
    max_bytes = kid_end + 1 + _MAX_HEAD_BYTES + max_payload_bytes + 2 + SIGNATURE_SIZE_BYTES
    if len(data) > max_bytes:
        raise MalformedError(f"expected a signed {statement.value} of at most {max_bytes:,} bytes, found {len(data):,}")
    if not data.startswith(head):
        _refuse_other_shape(statement, data)
    signer = data[len(head) : kid_end]
    payload, signature = _payload_and_signature(statement, data, kid_end)
    if len(payload) > max_payload_bytes:
        raise MalformedError(
            f"expected a {statement.value} of at most {max_payload_bytes:,} bytes, found {len(payload):,}"
        )
    if not verify_signature(signer, _to_be_signed(statement, _protected(statement, signer), payload), signature):
        raise TrustError(
            f"expected a {statement.value} signed by {publisher_text(signer)}, found a signature that is not valid",
            hint="the bytes were changed on the way, or somebody else made them; get them from another peer",
        )
    return Opened(payload, signer)


def open_manifest(envelope: bytes) -> SignedManifest:
    """Check everything about a signed manifest that can be checked without a policy.

    The signature is checked before the manifest is decoded, and it must be that of the publisher the manifest names:
    a valid signature of anybody else says nothing about it.

    Raises:
        MalformedError: not an envelope, or not a manifest; of it UnsupportedVersionError for a later version.
        CompatibilityError: a manifest of a kind this build cannot move.
        TrustError: the signature is not valid, is of another statement type, or of another key than the publisher's.
    """
    opened = open_envelope(StatementType.MANIFEST, envelope, max_payload_bytes=limits.MAX_MANIFEST_BYTES)
    manifest = decode_manifest(opened.payload)
    if manifest.publisher != opened.signer:
        raise TrustError(
            f"expected the signature of the publisher {publisher_text(manifest.publisher)} that the manifest names, "
            f"found one of {publisher_text(opened.signer)}",
            hint="get the artifact from another peer; the one that sent this may have made it up",
        )
    return SignedManifest(manifest, opened.payload, artifact_hash_of(opened.payload), bytes(envelope))


_MAX_HEAD_BYTES = 5
"""A CBOR byte string of up to 4 GiB has a head of at most 5 bytes."""


def _protected(statement: StatementType, kid: bytes) -> bytes:
    """The protected header, byte for byte: a map of three entries in the order of their keys."""
    # a3 = map of 3; 01 27 = alg: EdDSA (-8); 03 = content type; 04 = kid.
    return b"\xa3\x01\x27\x03" + cbor.encode(statement.content_type) + b"\x04" + cbor.encode(kid)


def _to_be_signed(statement: StatementType, protected: bytes, payload: bytes) -> bytes:
    """The Sig_structure of RFC 9052, section 4.4."""
    return cbor.encode(["Signature1", protected, statement.external_aad, payload])


@cache
def _head(statement: StatementType) -> bytes:
    """Everything before the kid."""
    zeros = b"\0" * PUBLIC_KEY_SIZE_BYTES
    return b"\x84" + cbor.encode(_protected(statement, zeros))[:-PUBLIC_KEY_SIZE_BYTES]


def _refuse_other_shape(statement: StatementType, data: bytes) -> None:
    for other in StatementType:
        if data.startswith(_head(other)):
            raise TrustError(f"expected a signed {statement.value}, found a signed {other.value}")
    raise MalformedError(f"expected a COSE_Sign1 envelope of a {statement.value}, found other bytes")


def _payload_and_signature(statement: StatementType, data: bytes, kid_end: int) -> tuple[bytes, bytes]:
    """Cut the rest by the lengths it must have, rebuild it, and compare."""
    payload_head_size = 1
    if len(data) > kid_end + 1:
        # Major type 2 (byte string) is 0x40 to 0x5b; 0x58, 0x59 and 0x5a announce 1, 2 and 4 bytes of length.
        payload_head_size += {0x58: 1, 0x59: 2, 0x5A: 4}.get(data[kid_end + 1], 0)
    payload_start = kid_end + 1 + payload_head_size
    payload_end = len(data) - 2 - SIGNATURE_SIZE_BYTES
    payload, signature = data[payload_start:payload_end], data[-SIGNATURE_SIZE_BYTES:]
    if payload_end < payload_start or data[kid_end:] != b"\xa0" + cbor.encode(payload) + cbor.encode(signature):
        raise MalformedError(f"expected a COSE_Sign1 envelope of a {statement.value}, found one of another shape")
    return payload, signature
