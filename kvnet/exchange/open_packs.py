"""The packs that one request's chunks are read from: opened once, read in a thread that may block."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvnet.store.interface import ChunkLocation

_TAKES_HINTS: Final = hasattr(os, "posix_fadvise")
_TELLS_WHAT_IS_IN_MEMORY: Final = hasattr(os, "RWF_NOWAIT")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's bytes lie in an open file."""

    handle: int
    offset: int
    length_bytes: int


class OpenPacks:
    """The packs of one request, open while it is answered."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        # Until a chunk is found that is not.
        self._in_memory = _TELLS_WHAT_IS_IN_MEMORY

    def __enter__(self) -> "OpenPacks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    def place(self, found: ChunkLocation | None) -> Place | None:
        """The place in an open pack; ``None`` for one that cannot be opened."""
        if found is None:
            return None
        handle = self._open.get(found.path)
        if handle is None:
            try:
                handle = self._open[found.path] = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return None
        return Place(handle, found.offset, found.length_bytes)

    def read(self, place: Place, view: memoryview, following: Place | None) -> bool:
        """Fill `view`; False when the file does not give so many bytes.

        Args:
            place: of the bytes.
            view: as long as they are.
            following: what is read next. The disk is told, but not where all has been in memory so far: the kernel
                would look at each page only to find that it is there.
        """
        filled = 0
        try:
            if self._in_memory:
                filled = self._read_from_memory(place, view)
                self._in_memory = filled == len(view)
            if filled < len(view) and following is not None:
                self._expect(following)
            while filled < len(view):
                read = os.preadv(place.handle, [view[filled:]], place.offset + filled)
                if not read:
                    return False
                filled += read
        except OSError:
            return False
        return True

    @staticmethod
    def _expect(place: Place) -> None:
        if _TAKES_HINTS:
            with suppress(OSError):
                os.posix_fadvise(place.handle, place.offset, place.length_bytes, os.POSIX_FADV_WILLNEED)

    @staticmethod
    def _read_from_memory(place: Place, view: memoryview) -> int:
        """How many bytes could be read without the disk."""
        try:
            return os.preadv(place.handle, [view], place.offset, os.RWF_NOWAIT)
        except OSError:  # none, or the file system cannot tell
            return 0
