"""Domain-separated BLAKE3 and the text form of artifact hashes.

All hashes are 32 bytes. In CBOR, in keyed hashes and in the DHT an artifact hash is its bare digest; its text is a CID.

Sources: BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), CIDv1 and multihash
(https://github.com/multiformats/cid, https://github.com/multiformats/multicodec).
"""

import base64
from collections.abc import Iterable
from typing import Final, NewType

from blake3 import blake3

from kvnet.errors import UsageError
from kvnet.format.limits import HASH_SIZE_BYTES

BytesLike = bytes | bytearray | memoryview
"""What can be hashed or parsed without a copy."""

ArtifactHash = NewType("ArtifactHash", bytes)
"""BLAKE3 of a manifest's bytes: which bytes."""
PrefixKey = NewType("PrefixKey", bytes)
"""Chained keyed hash over namespace, fingerprint and tokens up to a block's end: what it is."""
LookupKey = NewType("LookupKey", bytes)
"""A prefix key or artifact hash under a namespace's lookup secret: what travels and what the DHT sees."""
FingerprintHash = NewType("FingerprintHash", bytes)
"""Hash of a fingerprint document."""
NamespaceId = NewType("NamespaceId", bytes)
"""Derived from a namespace's prefix secret; names it without giving it away."""
ChunkHash = NewType("ChunkHash", bytes)
"""BLAKE3 of a chunk's stored bytes."""

# Contexts of BLAKE3's key derivation, one for each thing that is hashed; docs/format.md says of what each is used.
FINGERPRINT_CONTEXT: Final = "kvnet 2026-11 fingerprint"
NAMESPACE_CONTEXT: Final = "kvnet 2026-11 namespace id"
PREFIX_ROOT_CONTEXT: Final = "kvnet 2026-11 prefix root"
PUBLIC_NAMESPACE_CONTEXT: Final = "kvnet 2026-11 public prefix secret"
FOOTER_CONTEXT: Final = "kvnet 2026-11 container footer"

ARTIFACT_PREFIX: Final = "bafyr4i"
"""Every artifact hash's text begins so: multibase, CID version, codec and hash function."""
SHORT_CHARACTERS: Final = 8
"""Fewest characters after the prefix that count as a short hash; shown by :func:`short_text`."""

# Codes of the multicodec table: CIDv1, dag-cbor, blake3 with 32 bytes, sha2-256.
_CID_VERSION: Final = 0x01
_DAG_CBOR: Final = 0x71
BLAKE3_256: Final = 0x1E
SHA2_256: Final = 0x12
_ALPHABET: Final = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_TEXT_CHARACTERS: Final = 59
_SHOW_HINT: Final = (
    "Copy the whole artifact hash. For what is held here `bafyr4i` and at least 8 more characters will do, "
    "or 8 or more characters of the part after it."
)


def blake3_hash(data: BytesLike) -> ChunkHash:
    """Plain BLAKE3-256 of ``data``. In kvnet a plain hash names stored bytes; anything else is keyed or derived."""
    return ChunkHash(blake3(data).digest())


def blake3_hash_of(parts: Iterable[BytesLike]) -> ChunkHash:
    """As :func:`blake3_hash`, of bytes that lie in several places, one after the other."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return ChunkHash(hasher.digest())


def derive_key(context: str, material: BytesLike) -> bytes:
    """BLAKE3 in key-derivation mode: 32 bytes, separated from every other use by ``context``."""
    return blake3(material, derive_key_context=context).digest()


def keyed_hash(key: bytes, data: BytesLike) -> bytes:
    """BLAKE3 in keyed mode: 32 bytes.

    Raises:
        ValueError: the key is not 32 bytes.
    """
    return blake3(data, key=key).digest()


def artifact_hash_of(manifest_bytes: BytesLike) -> ArtifactHash:
    """The artifact hash: BLAKE3 of the manifest's bytes as received, the signature excluded."""
    return ArtifactHash(blake3(manifest_bytes).digest())


def namespace_id(prefix_secret: bytes) -> NamespaceId:
    """The id of the namespace with this prefix secret.

    Raises:
        ValueError: the secret is not 32 bytes.
    """
    _require_size("prefix secret", prefix_secret)
    return NamespaceId(derive_key(NAMESPACE_CONTEXT, prefix_secret))


def lookup_key(lookup_secret: bytes, prefix_key: PrefixKey) -> LookupKey:
    """A prefix key as it travels in this lookup epoch.

    Raises:
        ValueError: the secret or the key is not 32 bytes.
    """
    _require_size("prefix key", prefix_key)
    return LookupKey(keyed_hash(lookup_secret, prefix_key))


def keyed_artifact(lookup_secret: bytes, artifact: ArtifactHash) -> LookupKey:
    """An artifact hash as it travels in this lookup epoch.

    Raises:
        ValueError: the secret or the hash is not 32 bytes.
    """
    _require_size("artifact hash", artifact)
    return LookupKey(keyed_hash(lookup_secret, artifact))


def dht_key(keyed: bytes) -> bytes:
    """The DHT key of 32 keyed bytes: their multihash, 34 bytes.

    Raises:
        ValueError: they are not 32 bytes.
    """
    _require_size("keyed hash", keyed)
    return bytes((BLAKE3_256, HASH_SIZE_BYTES)) + keyed


def encode_cid(digest: bytes, hash_code: int = BLAKE3_256) -> str:
    """CIDv1 text (base32, dag-cbor) of a 32-byte digest made by the hash function ``hash_code``.

    Raises:
        ValueError: the digest is not 32 bytes.
    """
    _require_size("digest", digest)
    raw = bytes((_CID_VERSION, _DAG_CBOR, hash_code, HASH_SIZE_BYTES)) + digest
    return "b" + base64.b32encode(raw).decode("ascii").rstrip("=").lower()


def decode_cid(text: str) -> tuple[int, bytes]:
    """The hash function and the 32-byte digest of a dag-cbor CIDv1 in base32.

    Raises:
        UsageError: anything else, a second spelling of the same CID included.
    """
    if len(text) != _TEXT_CHARACTERS:
        raise UsageError(f"expected a hash of {_TEXT_CHARACTERS} characters, found {len(text)}", hint=_SHOW_HINT)
    if not text.startswith("b") or not _ALPHABET.issuperset(text):
        raise UsageError("expected a hash in lower-case base32 that begins with b", hint=_SHOW_HINT)
    raw = base64.b32decode(text[1:].upper() + "======")
    hash_code, digest = raw[2], raw[4:]
    # The last character carries two spare bits: only one spelling is right.
    if (
        raw[:2] != bytes((_CID_VERSION, _DAG_CBOR))
        or raw[3] != HASH_SIZE_BYTES
        or encode_cid(digest, hash_code) != text
    ):
        raise UsageError("expected a CIDv1 of dag-cbor with a hash of 32 bytes", hint=_SHOW_HINT)
    return hash_code, digest


def artifact_text(artifact: ArtifactHash) -> str:
    """The text of an artifact hash: CIDv1, dag-cbor, BLAKE3-256, base32; 59 characters that begin ``bafyr4i``."""
    return encode_cid(artifact)


def parse_artifact_text(text: str) -> ArtifactHash:
    """The artifact hash of its full text.

    Raises:
        UsageError: not the text of an artifact hash.
    """
    hash_code, digest = decode_cid(text)
    if hash_code != BLAKE3_256:
        raise UsageError(f"expected a hash that begins {ARTIFACT_PREFIX}, found {text[:7]}", hint=_SHOW_HINT)
    return ArtifactHash(digest)


def short_text(artifact: ArtifactHash, length: int = SHORT_CHARACTERS) -> str:
    """The short form for people: the common beginning and ``length`` characters after it."""
    return artifact_text(artifact)[: len(ARTIFACT_PREFIX) + length]


def looks_like_hash(text: str) -> bool:
    """Whether ``text`` can be an artifact hash or a short form of one."""
    rest = text.removeprefix(ARTIFACT_PREFIX)
    return SHORT_CHARACTERS <= len(rest) <= _TEXT_CHARACTERS - len(ARTIFACT_PREFIX) and _ALPHABET.issuperset(rest)


def matches_short(text: str, artifact: ArtifactHash) -> bool:
    """Whether ``text`` is the text of ``artifact`` or a short form of it, with or without ``bafyr4i``."""
    if not looks_like_hash(text):
        return False
    return artifact_text(artifact).startswith(ARTIFACT_PREFIX + text.removeprefix(ARTIFACT_PREFIX))


def _require_size(what: str, value: bytes) -> None:
    if len(value) != HASH_SIZE_BYTES:
        raise ValueError(f"{what}: expected {HASH_SIZE_BYTES} bytes, found {len(value)}")
