"""What a pack holds that is not finished, noted beside it in case the process is killed.

A note is a signed manifest of the text's beginning, its chunk list, and where the chunks lie. It makes nothing true:
when the store opens next, each chunk is read and hashed into a pack of its own, and published as any other. The old
pack itself is not used, since an engine that outlived its node may write to it for a moment.

Notes are not synced. They are for processes that are killed; after a power failure one counts if it and all that it
names reached the medium.
"""

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvnet.errors import KvnetError, MalformedError, StoreAwayError, StoreError
from kvnet.format.chunks import ChunkEntry, decode_pages, encode_pages
from kvnet.format.hashes import ArtifactHash, short_text
from kvnet.format.limits import ENTRY_SIZE_BYTES, PAGE_ENTRIES
from kvnet.store.failures import storage_errors
from kvnet.store.interface import ArtifactRecord, PackWriter, Store
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import PARTIAL_SUFFIX, StorePaths
from kvnet.store.values import SignedBeginning
from kvnet.trust.envelope import open_manifest

_log = logging.getLogger(__name__)

NOTE_SUFFIX: Final = ".beginning"
MAX_NOTE_BYTES: Final = 64 << 20
"""Four bytes a token and some 50 a chunk: more is no note of ours."""

_PAGE_BYTES: Final = PAGE_ENTRIES * ENTRY_SIZE_BYTES


class _Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A note as it is written, in MessagePack; of this version alone."""

    version: int
    envelope: bytes
    pages: bytes
    chunks: dict[int, bytes]
    offsets: dict[int, int]
    replaces: bytes | None


VERSION: Final = 1


def encode_note(beginning: SignedBeginning) -> bytes:
    """A note's content."""
    pages = b"".join(encode_pages(beginning.entries))
    return msgspec.msgpack.encode(
        _Note(VERSION, beginning.envelope, pages, dict(beginning.chunks), dict(beginning.offsets), beginning.replaces)
    )


def decode_note(data: bytes) -> SignedBeginning:
    """What a note says, with a chunk list that is the signed one.

    Raises:
        MalformedError: no note, one of another version, or torn.
        TrustError: the signature is not the publisher's.
        IntegrityError: the chunk list is not the one that was signed.
    """
    try:
        note = msgspec.msgpack.decode(data, type=_Note)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"note of a beginning: {error}") from None
    if note.version != VERSION:
        raise MalformedError(f"note of a beginning: expected version {VERSION}, found {note.version}")
    manifest = open_manifest(note.envelope).manifest
    pages = [note.pages[start : start + _PAGE_BYTES] for start in range(0, len(note.pages), _PAGE_BYTES)]
    entries = decode_pages(pages, manifest.n_chunks, manifest.root)
    manifest.check_entries(entries)
    replaces = None if note.replaces is None else ArtifactHash(note.replaces)
    return SignedBeginning(note.envelope, entries, note.chunks, note.offsets, replaces)


def write_note(files: OsFiles, pack: Path, beginning: SignedBeginning) -> None:
    """Note what a pack in the temporary folder holds, in the place of an earlier note.

    Raises:
        StoreError: the disk failed; an earlier note stays.
    """
    new = pack.with_suffix(".new")
    with storage_errors("noting what a pack holds"):
        files.unlink(new)
        handle = files.create(new)
        try:
            files.write(handle, encode_note(beginning), 0)
        finally:
            files.close(handle)
        files.rename(new, note_of(pack))


def note_of(pack: Path) -> Path:
    """The note beside a pack."""
    return pack.with_suffix(NOTE_SUFFIX)


def noted_packs(paths: StorePaths) -> list[Path]:
    """Packs in the temporary folder that have a note."""
    packs = (note.with_suffix(PARTIAL_SUFFIX) for note in paths.temporary.glob(f"*{NOTE_SUFFIX}"))
    return sorted(pack for pack in packs if pack.is_file() and not pack.is_symlink())


def take_in_noted(store: Store, files: OsFiles, packs: Iterable[Path]) -> None:
    """Publish what notes say of packs that were never finished. For when a store has been opened, before it is used.

    What cannot be taken in is removed with a warning: whoever adds the text again computes it.
    """
    for pack in packs:
        try:
            record = _take_in(store, files, pack)
        except StoreAwayError:
            return
        except (KvnetError, OSError) as error:
            _log.warning("store: what was computed of an add that was cut off is not kept: %s", error)
            for path in (note_of(pack), pack):
                with suppress(OSError):
                    files.unlink(path)
        else:
            _log.info(
                "store: %d tokens of an add that was cut off are kept as %s",
                record.manifest.n_tokens,
                short_text(record.hash),
            )


def _take_in(store: Store, files: OsFiles, pack: Path) -> ArtifactRecord:
    """The artifact that a note describes, hashed chunk by chunk as it is copied.

    Raises:
        KvnetError: no such note, other bytes than it says, or no room.
        OSError: the disk failed.
    """
    beginning = decode_note(_content(files, note_of(pack)))
    room = sum(beginning.entries[index].length_bytes for index in beginning.offsets if index < len(beginning.entries))
    writer = store.begin_pack(len(beginning.entries), expected_bytes=room)
    try:
        handle = files.open_for_reading(pack)
        try:
            for index, entry in enumerate(beginning.entries):
                _fill(files, handle, writer, beginning, index, entry)
        finally:
            files.close(handle)
        with storage_errors("removing a pack that was never finished"):
            # Durably, and before the artifact is there: what its owner removes then must not come back from here.
            files.unlink(note_of(pack))
            files.unlink(pack)
            files.sync_directory(pack.parent)
        record = writer.publish(beginning.envelope, keys=(), pinned=False, entries=beginning.entries)
    except BaseException:
        writer.abort()
        raise
    replaced = None if beginning.replaces is None else store.get(beginning.replaces)
    if replaced is not None and not replaced.pinned:
        store.release(replaced.hash)
    return record


def _fill(
    files: OsFiles, handle: int, writer: PackWriter, beginning: SignedBeginning, index: int, entry: ChunkEntry
) -> None:
    if index in beginning.chunks:
        writer.put(index, beginning.chunks[index], entry.hash)
    elif index in beginning.offsets:
        with storage_errors("reading a pack that was never finished"):
            data = files.read(handle, entry.length_bytes, beginning.offsets[index])
        writer.put(index, data, entry.hash)
    else:
        writer.reference(index, entry)


def _content(files: OsFiles, path: Path) -> bytes:
    handle = files.open_for_reading(path)
    try:
        if files.size_bytes(handle) > MAX_NOTE_BYTES:
            raise StoreError(f"expected a note of at most {MAX_NOTE_BYTES} bytes, found more")
        return files.read(handle, MAX_NOTE_BYTES, 0)
    finally:
        files.close(handle)
