"""What can be said about stored artifacts with a few basic reads; shared by all stores."""

import logging
from collections.abc import Iterable, Sequence

from kvnet.errors import AmbiguousHashError, IntegrityError, KvnetError, MalformedError, NotInStoreError, UsageError
from kvnet.format.chunks import ChunkKind, ChunkSpec
from kvnet.format.codecs import Codec
from kvnet.format.hashes import (
    ARTIFACT_PREFIX,
    SHORT_CHARACTERS,
    ArtifactHash,
    PrefixKey,
    artifact_text,
    looks_like_hash,
    matches_short,
    parse_artifact_text,
    short_text,
)
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import tokens_from_bytes
from kvnet.format.q8 import check_stored
from kvnet.store.interface import ArtifactRecord, KeysOf, Store, Verified

_log = logging.getLogger(__name__)

MAX_NAMED: int = 4
"""How many artifacts an ambiguous short hash is explained with."""

_FULL_CHARACTERS = 59


def resolve_text(text: str, artifacts: Iterable[ArtifactHash]) -> ArtifactHash:
    """The artifact among ``artifacts`` that a full or short hash means.

    Raises:
        UsageError: not the text of a hash.
        NotInStoreError: none has it.
        AmbiguousHashError: several have it.
    """
    if not looks_like_hash(text):
        raise UsageError(
            f"expected an artifact hash: `{ARTIFACT_PREFIX}` and at least {SHORT_CHARACTERS} more characters, or "
            f"{SHORT_CHARACTERS} or more characters of the part after it; found {text[:80]!r}",
            hint="`kvnet list` shows what is held here.",
        )
    if len(text) == _FULL_CHARACTERS:
        # Its two spare bits are checked too: one artifact has one text.
        parse_artifact_text(text)
    found = [artifact for artifact in artifacts if matches_short(text, artifact)]
    if not found:
        raise NotInStoreError(
            f"no artifact here has the hash {text}", hint="`kvnet list` shows what is held; `kvnet fetch` gets more."
        )
    if len(found) > 1:
        named = ", ".join(artifact_text(artifact) for artifact in sorted(found)[:MAX_NAMED])
        raise AmbiguousHashError(
            f"{len(found)} artifacts here have the short hash {text}: {named}", hint="Give more characters."
        )
    return found[0]


def require(store: Store, artifact: ArtifactHash) -> ArtifactRecord:
    """The record of an artifact.

    Raises:
        NotInStoreError: it is not held.
    """
    record = store.get(artifact)
    if record is None:
        raise not_held(artifact)
    return record


def not_held(artifact: ArtifactHash) -> NotInStoreError:
    """The error for an artifact that is not held."""
    return NotInStoreError(f"the artifact {short_text(artifact)} is not held here", hint="`kvnet fetch` gets it.")


def read_tokens(store: Store, record: ArtifactRecord) -> list[int]:
    """The token ids of a stored artifact."""
    chunks = record.manifest.plan().token_chunks
    return tokens_from_bytes(b"".join(store.read_chunk(record.entries[index].hash) for index in chunks))


def read_context(store: Store, record: ArtifactRecord) -> bytes | None:
    """The messages and template inputs of a stored artifact; ``None`` for none."""
    chunks = record.manifest.plan().context_chunks
    if not chunks:
        return None
    return b"".join(store.read_chunk(record.entries[index].hash) for index in chunks)


def verify_artifact(store: Store, record: ArtifactRecord) -> Verified:
    """Read and hash every chunk of a stored artifact, and see that every q8 tile is one that an encoder writes.

    A tile whose hash is right and whose content is not was published so: whoever restores it refuses it.
    """
    specs = tuple(record.manifest.plan()) if record.manifest.codec is Codec.Q8 else ()
    good, size_bytes = 0, 0
    bad: list[int] = []
    missing: list[int] = []
    for index, entry in enumerate(record.entries):
        if entry.absent:
            continue
        try:
            data = store.read_chunk(entry.hash)
            if specs and specs[index].kind is ChunkKind.TILE:
                _check_tile(record.manifest, specs[index], data)
            size_bytes += len(data)
            good += 1
        except NotInStoreError:
            missing.append(index)
        except (IntegrityError, MalformedError):
            bad.append(index)
    return Verified(good, size_bytes, tuple(bad), tuple(missing))


def _check_tile(manifest: Manifest, spec: ChunkSpec, stored: bytes) -> None:
    """A q8 tile, by its place in the plan.

    Raises:
        MalformedError: no encoder writes such bytes.
    """
    check_stored(manifest.fingerprint.layers.kind_of(spec.first_layer), spec.n_layers, spec.n_tokens, stored)


def prefix_keys(store: Store, record: ArtifactRecord, keys_of: KeysOf) -> tuple[PrefixKey, ...]:
    """The prefix keys of a stored artifact, computed from its token ids; none when they cannot be."""
    try:
        return checked_keys(record.manifest, keys_of(record.manifest, read_tokens(store, record)))
    except KvnetError as error:
        _log.warning("store: no prefix leads to %s: %s", short_text(record.hash), error)
        return ()


def checked_keys(manifest: Manifest, keys: Sequence[PrefixKey]) -> tuple[PrefixKey, ...]:
    """Prefix keys that are those of the manifest: one per block, the last as it was signed; or none.

    Raises:
        IntegrityError: others.
    """
    if keys and (len(keys) != manifest.n_blocks or keys[-1] != manifest.last_prefix_key):
        raise IntegrityError(
            "expected token ids with the prefix key that the manifest names, found others",
            hint="Its publisher made a broken artifact; do not use it.",
        )
    return tuple(keys)
