"""Artifacts out of a store into container files, and back in; the same for all stores."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvnet.errors import NotInStoreError
from kvnet.format.chunks import decode_pages
from kvnet.format.container import ContainerReader, read_container, write_container
from kvnet.format.hashes import PrefixKey, artifact_text, short_text
from kvnet.format.prefix import tokens_from_bytes
from kvnet.store.failures import storage_errors
from kvnet.store.interface import ArtifactRecord, Judge, KeysOf, Store
from kvnet.store.osfile import OsFiles
from kvnet.store.reading import checked_keys
from kvnet.trust.envelope import SignedManifest, open_manifest


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
