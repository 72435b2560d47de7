"""Namespaces: the secrets that key prefix keys and lookups of one scope, and the file that carries them.

Whoever has the secrets can look up, fetch and read every artifact of the namespace. The file is written 0600, and its
content never goes to a terminal or a log; ``repr`` shows neither secret.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec

from kvnet.errors import IntegrityError, MalformedError, UnsupportedVersionError, UsageError, elsewhere
from kvnet.format import cbor
from kvnet.format.hashes import (
    ArtifactHash,
    FingerprintHash,
    LookupKey,
    NamespaceId,
    PrefixKey,
    derive_key,
    keyed_artifact,
    lookup_key,
    namespace_id,
)
from kvnet.format.prefix import PUBLIC_PREFIX_SECRET, prefix_root

SECRET_SIZE_BYTES = 32
"""Of prefix secret and lookup secret alike: keys of BLAKE3."""
PUBLIC_LOOKUP_SECRET: Final = derive_key("kvnet 2026-11 public lookup secret", b"")
"""No secret: everybody can compute what the public namespace's artifacts are called on the wire."""
MAX_NAMESPACE_FILE_BYTES = 4096
"""Version 1 takes less than 300 bytes; the rest is room for what a later version may add."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CHECK_CONTEXT = "kvnet 2026-11 namespace file"
_MAGIC: Final = "kvnet namespace"
_VERSION = 1
_EXPORT_HINT = f"`{elsewhere('kvnet namespace export FILE')}` on the other machine writes one"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The secrets of one scope.

    Args:
        name: what its owner calls it, such as ``mine``; says nothing to anybody else.
        prefix_secret: 32 bytes, permanent: prefix keys and the namespace id follow from it.
        lookup_secret: 32 bytes, replaced when a member is removed: what goes over the wire follows from it.
        former: the lookup secret has been replaced. Who proves it was a member once, and gets nothing but the
            statements that lead to the new one; see `kvnet.trust.roster`.

    Raises:
        UsageError: a name or a secret that cannot be one.
    """

    name: str
    prefix_secret: bytes = field(repr=False)
    lookup_secret: bytes = field(repr=False)
    former: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"expected a namespace name of 1 to 64 of a-z 0-9 . _ - that begins with a letter or digit, "
                f"found {self.name[:80]!r}"
            )
        for what, secret in (("prefix", self.prefix_secret), ("lookup", self.lookup_secret)):
            if len(secret) != SECRET_SIZE_BYTES:
                raise UsageError(f"expected a {what} secret of {SECRET_SIZE_BYTES} bytes, found {len(secret)}")
            if not any(secret):
                raise UsageError(f"expected a random {what} secret, found zeros")

    @property
    def id(self) -> NamespaceId:
        """What manifests call it; tells nothing of the secrets."""
        return namespace_id(self.prefix_secret)

    @property
    def is_public(self) -> bool:
        """Whether everybody is in it."""
        return self.prefix_secret == PUBLIC_PREFIX_SECRET

    def prefix_root(self, fingerprint: FingerprintHash) -> bytes:
        """The key under which this namespace chains the prefix keys of a model."""
        return prefix_root(self.prefix_secret, fingerprint)

    def lookup_key(self, prefix_key: PrefixKey) -> LookupKey:
        """What a prefix key is called on the wire and in the DHT."""
        return lookup_key(self.lookup_secret, prefix_key)

    def keyed_artifact(self, artifact: ArtifactHash) -> LookupKey:
        """What an artifact is called on the wire and in the DHT."""
        return keyed_artifact(self.lookup_secret, artifact)


PUBLIC: Final = Namespace("public", PUBLIC_PREFIX_SECRET, PUBLIC_LOOKUP_SECRET)
"""The namespace of what was published; a node is in it only when its owner says so."""

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a namespace file."""

    magic: Literal["kvnet namespace"]
    version: int
    name: Annotated[str, msgspec.Meta(max_length=64)]
    prefix_secret: _Bytes32
    lookup_secret: _Bytes32
    checksum: _Bytes32


def encode_namespace_file(namespace: Namespace) -> bytes:
    """The content of a namespace file. It holds the secrets: write it 0600."""
    document = _Document(
        magic=_MAGIC,
        version=_VERSION,
        name=namespace.name,
        prefix_secret=namespace.prefix_secret,
        lookup_secret=namespace.lookup_secret,
        checksum=_checksum(namespace.name, namespace.prefix_secret, namespace.lookup_secret),
    )
    return cbor.encode_struct(document)


def decode_namespace_file(data: bytes) -> Namespace:
    """The namespace in a file made by `encode_namespace_file`.

    Raises:
        MalformedError: it is no namespace file.
        UnsupportedVersionError: a version this build does not read.
        IntegrityError: a bit was changed on the way: a wrong secret would be a namespace nobody else is in.
    """
    what = "namespace file"
    value = cbor.decode(data, max_bytes=MAX_NAMESPACE_FILE_BYTES, what=what)
    if not isinstance(value, dict) or value.get("magic") != _MAGIC:
        raise MalformedError("expected a namespace file, found other content", hint=_EXPORT_HINT)
    if value.get("version") != _VERSION:
        raise UnsupportedVersionError(
            f"expected a namespace file of version {_VERSION}, found another",
            hint="update kvnet on this machine, or export the file again with this version",
        )
    document = cbor.decode_as(_Document, data, max_bytes=MAX_NAMESPACE_FILE_BYTES, what=what)
    if document.checksum != _checksum(document.name, document.prefix_secret, document.lookup_secret):
        raise IntegrityError("expected a namespace file with a fitting checksum, found one that was changed on the way")
    if document.prefix_secret == PUBLIC_PREFIX_SECRET:
        raise MalformedError("expected a private namespace in the file, found the public one's secret")
    try:
        return Namespace(document.name, document.prefix_secret, document.lookup_secret)
    except UsageError as error:
        raise MalformedError(f"a namespace file that no kvnet writes: {error}") from error


def _checksum(name: str, prefix_secret: bytes, lookup_secret: bytes) -> bytes:
    return derive_key(_CHECK_CONTEXT, prefix_secret + lookup_secret + name.encode("utf-8"))
