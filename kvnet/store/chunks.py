"""Reading chunks from their packs: what does not match its hash, or cannot be read, is held no longer."""

import errno
import logging
from typing import Final

from kvnet.errors import IntegrityError, NotInStoreError, StoreError
from kvnet.format.hashes import ChunkHash, blake3_hash
from kvnet.store.failures import storage_errors
from kvnet.store.index import PlacedChunk
from kvnet.store.opening import Parts
from kvnet.store.presence import Presence

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""A disk that fails at a place is asked once more before it counts as unreadable."""

_UNREADABLE: Final = b""
"""In place of bytes that the disk does not give."""


class ChunkReading:
    """Reads chunks. Covered by the store's lock.

    Args:
        parts: the open store.
        presence: a drive that has gone is told from one that has a bad place.
    """

    def __init__(self, parts: Parts, presence: Presence) -> None:
        self._parts = parts
        self._presence = presence

    def read(self, chunk: ChunkHash) -> bytes:
        """A chunk's bytes, hashed as they were read. A damaged copy is dropped, and another tried where there is one.

        Raises:
            NotInStoreError: it is not held.
            IntegrityError: no copy is what it should be; none counts as held any more.
            StoreError: the disk failed.
        """
        damaged = False
        index = self._parts.index
        for pack, name, place in index.places_of(chunk):
            data = self._bytes_at(name, place)
            if data is not None and blake3_hash(data) == chunk:
                return data
            damaged |= data is not None
            with index.transaction():
                index.drop_chunk(chunk, pack)
            _log.warning("store: a chunk in %s %s; dropped", name, _what_is_wrong(data))
        if not damaged:
            raise NotInStoreError(f"the chunk {chunk.hex()[:16]} is not held here")
        raise IntegrityError(
            f"the chunk {chunk.hex()[:16]} does not match its hash any more and was dropped",
            hint="`kvnet fetch` gets it again from a peer; adding again computes it.",
        )

    def _bytes_at(self, name: str, place: PlacedChunk) -> bytes | None:
        """The bytes at a place; ``None`` when the pack has gone, `_UNREADABLE` when the disk is bad there alone."""
        files = self._parts.files
        try:
            handle = files.open_for_reading(self._parts.paths.pack(name))
        except FileNotFoundError:
            if not self._presence.look():
                raise self._presence.error() from None
            return None
        except OSError as error:
            raise StoreError(f"a pack cannot be opened: {error.strerror}", hint="Check the disk.") from error
        try:
            with storage_errors("reading a pack"):
                return self._attempted(handle, place)
        finally:
            files.close(handle)

    def _attempted(self, handle: int, place: PlacedChunk) -> bytes:
        """The bytes, or `_UNREADABLE` where the disk fails at them and at nothing else.

        Raises:
            OSError: the drive fails, not this place: nothing on it counts as lost.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._parts.files.read(handle, place.length_bytes, place.offset)
            except OSError as error:
                if error.errno != errno.EIO or (attempt == ATTEMPTS and self._presence.probe()):
                    raise
        return _UNREADABLE


def _what_is_wrong(data: bytes | None) -> str:
    if data is None:
        return "has gone with its pack"
    return "does not match its hash" if data else "cannot be read from the disk"
