"""The manifest: the signed description of an artifact, its invariants, and its encoding.

A :class:`Manifest` that exists is sound: every invariant is checked when it is made, by hand or from bytes. Only the
signature is judged elsewhere.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from kvnet.errors import CompatibilityError, MalformedError, UnsupportedVersionError
from kvnet.format import cbor, q8
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, LayerGroup, groups_from_counts
from kvnet.format.codecs import Codec, max_stored_bytes, stored_size_range
from kvnet.format.fingerprint import Fingerprint, Producer
from kvnet.format.hashes import ArtifactHash, BytesLike, NamespaceId, PrefixKey, artifact_hash_of
from kvnet.format.limits import (
    HASH_SIZE_BYTES,
    MAX_CBOR_INT,
    MAX_CHUNKS,
    MAX_CONTINUATION_TOKENS,
    MAX_DERIVED_SPANS,
    MAX_FINGERPRINT_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TOKEN_ID,
)
from kvnet.format.prefix import BLOCK_TOKENS, block_count

MANIFEST_VERSION: Final = 1
"""The version this build writes, and the only one it reads."""


class DerivedSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Blocks that the publisher took from somebody else's artifact.

    Attributes:
        artifact: the artifact they came from.
        publisher: 32-byte key that signed it.
        first_block: first of them, from 0.
        last_block: last of them, included.

    Raises:
        MalformedError: a hash or key of another length, or blocks that are no span.
    """

    artifact: ArtifactHash
    publisher: bytes
    first_block: int
    last_block: int

    def __post_init__(self) -> None:
        if len(self.artifact) != HASH_SIZE_BYTES or len(self.publisher) != HASH_SIZE_BYTES:
            raise MalformedError("derived span: expected an artifact hash and a publisher of 32 bytes each")
        if not 0 <= self.first_block <= self.last_block:
            raise MalformedError(
                f"derived span: expected first <= last, found {self.first_block} and {self.last_block}"
            )


class Manifest(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """See ``docs/format.md``. Making one checks every invariant.

    Attributes:
        version: :data:`MANIFEST_VERSION`.
        fingerprint: what the K/V is for.
        namespace: id of the namespace that keys its prefixes.
        n_tokens: tokens, all blocks together.
        block_tokens: tokens of a full block.
        groups: layer groups of the tiles.
        codec: how tiles are stored.
        n_chunks: chunks, absent ones included.
        total_size_bytes: stored bytes of all chunks.
        root: root over the chunk-list pages.
        last_prefix_key: prefix key of the final block, short or not.
        producer: what computed it.
        continuation: the producer's next greedy token ids; may be empty.
        derived_from: spans the publisher did not compute itself.
        context_size_bytes: bytes of messages and template inputs; 0 for none.
        created: seconds since 1970-01-01 UTC.
        publisher: 32-byte public key that signs.

    Raises:
        UnsupportedVersionError: another version.
        MalformedError: fields that contradict each other or exceed the limits.
        CompatibilityError: well-formed, but of a kind this version cannot move.
    """

    version: int
    fingerprint: Fingerprint
    namespace: NamespaceId
    n_tokens: int
    block_tokens: int
    groups: tuple[LayerGroup, ...]
    codec: Codec
    n_chunks: int
    total_size_bytes: int
    root: bytes
    last_prefix_key: PrefixKey
    producer: Producer
    continuation: tuple[int, ...]
    derived_from: tuple[DerivedSpan, ...]
    context_size_bytes: int
    created: int
    publisher: bytes

    def __post_init__(self) -> None:
        _check_version(self.version)
        _check_scalars(self)
        _check_sizes(self, self.plan())
        _check_spans(self.derived_from, self.n_blocks)

    def plan(self) -> ChunkPlan:
        """The chunks that make up the artifact; always the same object."""
        return self._plan

    @cached_property
    def _plan(self) -> ChunkPlan:
        return ChunkPlan(self.n_tokens, self.fingerprint.layers, self.groups, self.context_size_bytes)

    @cached_property
    def _artifact(self) -> ArtifactHash:
        return artifact_hash_of(encode_manifest(self))

    @property
    def n_blocks(self) -> int:
        """Blocks, a short last one included."""
        return block_count(self.n_tokens)

    def check_entries(self, entries: Sequence[ChunkEntry]) -> None:
        """Checks that a chunk list whose root was compared can belong to this manifest.

        Raises:
            MalformedError: a number or a sum that disagrees, a size the codec cannot have, or a chunk left out that
                has to be there. Version 1 moves only layers that keep every token, so that is every chunk.
        """
        if len(entries) != self.n_chunks or sum(entry.length_bytes for entry in entries) != self.total_size_bytes:
            raise MalformedError(f"chunk list: expected {self.n_chunks} chunks of {self.total_size_bytes} bytes in all")
        for spec, entry in zip(self.plan(), entries, strict=True):
            if entry.absent:
                raise MalformedError(
                    f"chunk {spec.index} ({spec.kind.value}) is absent and no checkpoint does without it"
                )
            least, most = spec.raw_size_bytes, spec.raw_size_bytes
            if spec.kind is ChunkKind.TILE:
                layers = self.fingerprint.layers
                least, most = stored_size_range(
                    self.codec, layers.kind_of(spec.first_layer), spec.n_layers, spec.n_tokens
                )
            if not least <= entry.length_bytes <= most:
                raise MalformedError(f"chunk {spec.index}: expected {most} stored bytes, found {entry.length_bytes}")


def _check_version(version: object) -> None:
    if version != MANIFEST_VERSION:
        raise UnsupportedVersionError(
            f"manifest: expected version {MANIFEST_VERSION}, found {str(version)[:32]}",
            hint="A newer kvnet may read it.",
        )


def _check_scalars(manifest: Manifest) -> None:
    for field in ("namespace", "root", "last_prefix_key", "publisher"):
        if len(getattr(manifest, field)) != HASH_SIZE_BYTES:
            raise MalformedError(f"manifest {field}: expected {HASH_SIZE_BYTES} bytes")
    if manifest.block_tokens != BLOCK_TOKENS:
        raise MalformedError(f"manifest: expected blocks of {BLOCK_TOKENS} tokens, found {manifest.block_tokens}")
    if not 0 <= manifest.created <= MAX_CBOR_INT:
        raise MalformedError(f"manifest: expected a creation time in seconds from 1970, found {manifest.created}")
    if len(manifest.continuation) > MAX_CONTINUATION_TOKENS:
        raise MalformedError(
            f"manifest: expected a continuation of at most {MAX_CONTINUATION_TOKENS} tokens, "
            f"found {len(manifest.continuation)}"
        )
    if any(not 0 <= token <= MAX_TOKEN_ID for token in manifest.continuation):
        raise MalformedError("manifest: expected token ids of 32 bits in the continuation")
    if manifest.fingerprint.kv.bits:
        raise CompatibilityError("K/V that its engine holds quantised cannot be moved by this build")


def _check_spans(spans: tuple[DerivedSpan, ...], n_blocks: int) -> None:
    if len(spans) > MAX_DERIVED_SPANS:
        raise MalformedError(f"manifest: expected at most {MAX_DERIVED_SPANS} derived spans, found {len(spans)}")
    reached: dict[ArtifactHash, int] = {}
    for span in sorted(spans, key=lambda span: span.first_block):
        if span.last_block >= n_blocks:
            raise MalformedError(f"derived span: expected blocks below {n_blocks}, found {span.last_block}")
        # Spans of two artifacts may overlap: what A took from B stays named when C takes both from A.
        if span.first_block <= reached.get(span.artifact, -1):
            raise MalformedError("derived span: expected spans of one artifact apart, found two that overlap")
        reached[span.artifact] = span.last_block


def _check_sizes(manifest: Manifest, plan: ChunkPlan) -> None:
    if manifest.n_chunks != len(plan):
        raise MalformedError(f"manifest: expected {len(plan)} chunks by its own layout, found {manifest.n_chunks}")
    least, most = plan.raw_size_bytes, plan.raw_size_bytes
    if manifest.codec is Codec.Q8:
        layers = manifest.fingerprint.layers
        least = plan.head_size_bytes + plan.n_tokens * sum(
            q8.bytes_per_token(layers.kind_of(layer)) for layer in range(len(layers.order))
        )
        most = least
    elif manifest.codec is not Codec.RAW:
        # Every tile takes a byte at least, and none more than its codec's bound.
        tiles = len(plan) - plan.first_tile
        tile_bytes = plan.raw_size_bytes - plan.head_size_bytes
        least = plan.head_size_bytes + tiles
        most = plan.head_size_bytes + tiles * max_stored_bytes(manifest.codec, 0) + tile_bytes + (tile_bytes >> 8)
    if not least <= manifest.total_size_bytes <= most:
        raise MalformedError(
            f"manifest: expected {least} to {most} bytes in all by its own layout, found {manifest.total_size_bytes}"
        )


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A manifest as written: layer groups by their numbers of layers alone."""

    version: int
    fingerprint: Fingerprint
    namespace: bytes
    n_tokens: int
    block_tokens: int
    groups: tuple[int, ...]
    codec: Codec
    n_chunks: int
    total_size_bytes: int
    root: bytes
    last_prefix_key: bytes
    producer: Producer
    continuation: tuple[int, ...]
    derived_from: tuple[DerivedSpan, ...]
    context_size_bytes: int
    created: int
    publisher: bytes


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's one encoding; what is hashed and signed.

    Raises:
        CompatibilityError: more than ``MAX_MANIFEST_BYTES``.
    """
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    fields["groups"] = tuple(group.n_layers for group in manifest.groups)
    data = cbor.encode_struct(_Document(**fields))
    if len(data) > MAX_MANIFEST_BYTES:
        raise CompatibilityError(
            f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found {len(data)}",
            hint="A model with very irregular layers, or an artifact derived from very many, cannot be described.",
        )
    return data


def decode_manifest(data: BytesLike) -> Manifest:
    """The manifest in ``data``, every invariant checked. The signature is not: that is for the caller.

    Raises:
        UnsupportedVersionError: another version.
        MalformedError: not a manifest, or one that contradicts itself or exceeds the limits.
        CompatibilityError: well-formed, but of a kind this version cannot move.
    """
    value = cbor.decode(data, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    if not isinstance(value, dict):
        raise MalformedError("manifest: expected a map")
    # Before the schema: a later version may have other fields, and the reader should hear that it is later.
    _check_version(value.get("version"))
    # Before anything in proportion to it.
    if not isinstance(value.get("n_chunks"), int) or value["n_chunks"] > MAX_CHUNKS:
        raise MalformedError(f"manifest: expected at most {MAX_CHUNKS} chunks")
    document = cbor.decode_as(_Document, data, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    if len(cbor.encode_struct(document.fingerprint)) > MAX_FINGERPRINT_BYTES:
        raise MalformedError(f"fingerprint: expected at most {MAX_FINGERPRINT_BYTES} bytes")
    fields: dict[str, Any] = {name: getattr(document, name) for name in document.__struct_fields__}
    fields["groups"] = groups_from_counts(document.fingerprint.layers, document.groups)
    return Manifest(**fields)


def artifact_of(manifest: Manifest) -> ArtifactHash:
    """The artifact hash of a manifest; worked out once."""
    return manifest._artifact
