"""Partial packs: what of a fetch is on disk when the node ends in the middle of it.

Beside a partial pack lies a journal with a line for every chunk written. It is a hint and nothing more: a chunk counts
as held only after its bytes were read back and match the hash that the chunk list has for it, so that neither a torn
record nor a disk that lost its last writes can make a chunk appear that is not there. Data goes to the medium in
groups, in a thread of its own: a sync for every chunk would cost most of the disk's rate.
"""

import logging
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvnet.errors import StoreError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, blake3_hash
from kvnet.store.osfile import OsFiles

_log = logging.getLogger(__name__)

MAGIC: Final = b"kvnet partial 1\n"
_HEADER: Final = struct.Struct(">16s32sI")
"""Magic, artifact hash, number of chunks."""
_RECORD: Final = struct.Struct(">IQI")
"""Chunk index, offset in the pack, length."""

SYNC_BYTES: Final = 64 << 20
SYNC_S: Final = 2.0
"""A power failure costs at most what was written since the last sync: so many bytes, or so many seconds."""

FIRST_SYNC_BYTES: Final = 8 << 20
"""The first sync comes after so many bytes, each later one after twice as many: whoever publishes a small pack, and
waits for the medium, finds most of it there."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A chunk in a partial pack: index, offset and length in bytes."""

    index: int
    offset: int
    length_bytes: int


def encode_header(artifact: ArtifactHash, n_chunks: int) -> bytes:
    """The beginning of a journal."""
    return _HEADER.pack(MAGIC, artifact, n_chunks)


def encode_record(kept: Kept) -> bytes:
    """The line of one chunk."""
    return _RECORD.pack(kept.index, kept.offset, kept.length_bytes)


def parse_journal(data: bytes, artifact: ArtifactHash, n_chunks: int) -> list[Kept]:
    """The chunks a journal names; none when it is another artifact's, or no journal. A torn last line is left out."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (MAGIC, bytes(artifact), n_chunks):
        return []
    whole = (len(data) - _HEADER.size) // _RECORD.size * _RECORD.size
    return [Kept(*record) for record in _RECORD.iter_unpack(memoryview(data)[_HEADER.size : _HEADER.size + whole])]


def kept_chunks(
    files: OsFiles, handle: int, claimed: Sequence[Kept], entries: Sequence[ChunkEntry], data_offset: int
) -> list[Kept]:
    """Of the chunks a journal names, those whose bytes lie there and match: each read, each hashed.

    Args:
        files: the seam to the operating system.
        handle: the partial pack.
        claimed: from its journal.
        entries: the chunk list, verified.
        data_offset: where chunks begin in the pack.

    Raises:
        OSError: the disk failed.
    """
    size_bytes = files.size_bytes(handle)
    kept: dict[int, Kept] = {}
    end = data_offset
    for one in sorted(claimed, key=lambda one: one.offset):
        fits = one.index < len(entries) and entries[one.index].length_bytes == one.length_bytes > 0
        if not fits or one.index in kept or one.offset < end or one.offset + one.length_bytes > size_bytes:
            continue
        if blake3_hash(files.read(handle, one.length_bytes, one.offset)) == entries[one.index].hash:
            kept[one.index] = one
            end = one.offset + one.length_bytes
    return list(kept.values())


class GroupedSync:
    """Sees to it that what is written reaches the medium, in groups, without anybody waiting for it.

    Args:
        files: the seam to the operating system.
        data: the pack; synced first.
        journal: its journal; synced second, so that it never names more than what is there.
        size_bytes: a sync after so many bytes,
        seconds: or after so much time with anything written.
        first_bytes: the first after so many bytes; then after twice as many each time, up to `size_bytes`.
    """

    def __init__(
        self,
        files: OsFiles,
        data: int,
        journal: int,
        *,
        size_bytes: int = SYNC_BYTES,
        seconds: float = SYNC_S,
        first_bytes: int = FIRST_SYNC_BYTES,
    ) -> None:
        self._files = files
        self._handles = (data, journal)
        self._size_bytes = size_bytes
        self._due_bytes = min(first_bytes, size_bytes)
        self._seconds = seconds
        self._changed = threading.Condition()
        self._pending_bytes = 0
        self._since_s = 0.0
        self._ended = False
        self._failure: OSError | None = None
        self._thread: threading.Thread | None = None

    def wrote(self, n_bytes: int) -> None:
        """So many more bytes were written.

        Raises:
            StoreError: an earlier sync failed; what was written since the one before may be lost.
        """
        with self._changed:
            if self._failure is not None:
                reason = self._failure.strerror
                raise StoreError(f"a partial pack did not reach the disk: {reason}", hint="Check the disk.")
            if not self._pending_bytes:
                self._since_s = time.monotonic()
            self._pending_bytes += n_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store-sync", daemon=True)
                self._thread.start()
            elif self._pending_bytes >= self._due_bytes:
                self._changed.notify()

    def end(self) -> None:
        """No sync begins any more; returns once none is running."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join()

    def join(self) -> None:
        """Wait for the thread, which ends when it is told to or when a sync failed."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                for handle in self._handles:
                    self._files.sync(handle)
            except OSError as error:
                _log.warning("store: a partial pack did not reach the disk: %s", error.strerror)
                with self._changed:
                    self._failure = error
                return

    def _wait(self) -> bool:
        """Wait until a sync is due; False once there is nothing to do any more."""
        with self._changed:
            while not self._ended:
                left_s = self._since_s + self._seconds - time.monotonic() if self._pending_bytes else None
                if self._pending_bytes >= self._due_bytes or (left_s is not None and left_s <= 0):
                    self._pending_bytes = 0
                    self._due_bytes = min(2 * self._due_bytes, self._size_bytes)
                    return True
                self._changed.wait(left_s)
            return False
