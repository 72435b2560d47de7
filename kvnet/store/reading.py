"""What can be said about stored artifacts with a few basic reads; shared by all stores."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvnet.errors import AmbiguousHashError, IntegrityError, MalformedError, NotInStoreError, UsageError
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkSpec, decode_pages, encode_pages, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.container import ContainerReader, read_container, write_container
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
from kvnet.store.failures import storage_errors
from kvnet.store.interface import ArtifactRecord, Judge, KeysOf, Store, Verified
from kvnet.store.osfile import OsFiles
from kvnet.trust.envelope import SignedManifest, open_manifest

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


def checked_list(
    signed: SignedManifest,
    n_chunks: int,
    known: Mapping[int, ChunkEntry],
    entries: Sequence[ChunkEntry] | None,
) -> tuple[ChunkEntry, ...]:
    """The whole chunk list of a pack: as it was signed, and as what is in the pack.

    Args:
        signed: the manifest.
        n_chunks: chunks the pack was begun for.
        known: chunks written and referenced, by index.
        entries: the list, needed when some are missing.

    Raises:
        MalformedError: not a manifest of these chunks.
        IntegrityError: the list is not the one that was signed, or the pack holds other chunks.
        NotInStoreError: chunks are missing and no list says what they are.
    """
    manifest = signed.manifest
    if manifest.n_chunks != n_chunks:
        raise MalformedError(f"manifest: expected {n_chunks} chunks as in the pack, found {manifest.n_chunks}")
    if entries is None:
        missing = n_chunks - len(known)
        if missing:
            raise NotInStoreError(
                f"{missing} of {n_chunks} chunks of {short_text(signed.artifact_hash)} were neither written nor "
                "referenced"
            )
        entries = [known[index] for index in range(n_chunks)]
    listed = tuple(entries)
    if len(listed) != n_chunks or pages_root(encode_pages(listed)) != manifest.root:
        raise IntegrityError("the chunk list does not match the root in the manifest")
    manifest.check_entries(listed)
    for index, entry in known.items():
        if listed[index] != entry:
            raise IntegrityError(f"chunk {index} of the pack is not the one in the chunk list")
    return listed


def export_artifact(store: Store, files: OsFiles, record: ArtifactRecord, path: Path) -> int:
    """Write a stored artifact into a new container file, 0600; returns its size in bytes."""
    missing = [e for e in record.entries if not e.absent and not store.has_chunk(e.hash)]
    if missing:
        raise NotInStoreError(
            f"{len(missing)} of {len(record.entries)} chunks of {short_text(record.hash)} are not held here",
            hint=f"Get the rest first: kvnet fetch {artifact_text(record.hash)}",
        )
    with storage_errors(f"writing {path}"):
        handle = files.create(path)
    try:
        with storage_errors(f"writing {path}"):
            offset = 0

            def write(data: bytes) -> None:
                nonlocal offset
                files.write(handle, data, offset)
                offset += len(data)

            chunks = (store.read_chunk(entry.hash) for entry in record.entries if not entry.absent)
            size_bytes = write_container(write, record.envelope, record.pages, chunks)
            files.sync(handle)
    except BaseException:
        files.close(handle)
        files.unlink(path)
        raise
    files.close(handle)
    return size_bytes


def import_artifact(store: Store, path: Path, *, judge: Judge, keys_of: KeysOf | None, pinned: bool) -> ArtifactRecord:
    """Take a container file into a store: bounded, signed, judged, and only then read chunk by chunk."""
    with storage_errors(f"reading {path}"):
        # Not OsFiles: this file is the person's, and may be behind a link of theirs.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file, storage_errors(f"reading {path}"):
        reader = read_container(file)
        signed = open_manifest(reader.header.envelope)
        _check_list(reader, signed)
        judge(signed.manifest)
        return _take_in(store, reader, signed, keys_of=keys_of, pinned=pinned)


def _check_list(reader: ContainerReader, signed: SignedManifest) -> None:
    header = reader.header
    signed.manifest.check_entries(decode_pages(header.pages, signed.manifest.n_chunks, signed.manifest.root))


def _take_in(
    store: Store, reader: ContainerReader, signed: SignedManifest, *, keys_of: KeysOf | None, pinned: bool
) -> ArtifactRecord:
    manifest = signed.manifest
    new = {e.hash: e.length_bytes for e in reader.header.entries if not e.absent and not store.has_chunk(e.hash)}
    writer = store.begin_pack(manifest.n_chunks, expected_bytes=sum(new.values()))
    try:
        token_chunks = manifest.plan().token_chunks
        token_bytes: list[bytes] = []
        for index, data in reader:
            writer.put(index, data, reader.header.entries[index].hash)
            if index in token_chunks:
                token_bytes.append(data)
        keys: Sequence[PrefixKey] = ()
        if keys_of is not None:
            keys = checked_keys(manifest, keys_of(manifest, tokens_from_bytes(b"".join(token_bytes))))
        return writer.publish(signed.envelope, keys=keys, pinned=pinned)
    except BaseException:
        writer.abort()
        raise
