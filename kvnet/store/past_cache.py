"""Writing past the system's page cache: for bytes that nobody will read soon.

A copy of gigabytes that goes through the page cache takes the memory of whatever else the machine does, and processor
time for every page. Past it the system takes whole blocks from aligned memory and hands them to the disk, so each
write here begins and ends at a block: with the bytes that lie before it in its first block, and zeros behind it.
"""

import contextlib
import errno
import mmap
from pathlib import Path
from typing import Final

from kvnet.format.hashes import BytesLike
from kvnet.store.osfile import OsFiles

BLOCK_BYTES: Final = 16 * 1024
"""A multiple of what disks and systems ask for: blocks of 512 or 4,096 bytes, and pages of macOS, 16 KiB."""


class PastCache:
    """Writes into one file. What is written is in the file when a write returns; only a sync makes it durable.

    Args:
        files: the seam to the operating system.
        path: of the file.
        handle: the file, open for reading and writing: it is used where the file system cannot write past the cache,
            and for the beginning of a block that lies there already. Its owner closes it.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, files: OsFiles, path: Path, handle: int) -> None:
        self._files = files
        self._handle = handle
        self._direct = files.open_past_cache(path)
        # Anonymous mappings begin at a page.
        self._staged = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        # Where the file goes on behind the bytes at the beginning of `_staged`; they are those of its last block.
        self._reached = 0

    @property
    def goes_through_cache(self) -> bool:
        """Whether writes go through the cache all the same, because the file system offers nothing else."""
        return self._direct is None

    def write(self, data: BytesLike, offset: int) -> None:
        """Write all of ``data`` at ``offset``, and zeros up to the end of the block: nothing may lie there that counts.

        Raises:
            OSError: the disk is full or failed.
        """
        if self._direct is None:
            self._files.write(self._handle, data, offset)
            return
        n_before = offset % BLOCK_BYTES
        end = n_before + len(data)
        padded = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        self._make_room(padded)
        if offset != self._reached:
            before = self._files.read(self._handle, n_before, offset - n_before)
            self._staged[:n_before] = before.ljust(n_before, b"\0")
        self._reached = -1
        self._staged[n_before:end] = memoryview(data).cast("B")
        self._staged[end:padded] = bytes(padded - end)
        try:
            self._files.write(self._direct, self._staged[:padded], offset - n_before)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # It can be opened so, and not written: other blocks than we know, or a file system that says so late.
            self.close()
            self._files.write(self._handle, data, offset)
            return
        n_next = end % BLOCK_BYTES
        self._staged[:n_next] = self._staged[end - n_next : end]
        self._reached = offset + len(data)

    def _make_room(self, n_bytes: int) -> None:
        if len(self._staged) < n_bytes:
            grown = memoryview(mmap.mmap(-1, n_bytes))
            grown[:BLOCK_BYTES] = self._staged[:BLOCK_BYTES]
            self._staged = grown

    def close(self) -> None:
        """Write through the cache from now on."""
        if self._direct is not None:
            direct, self._direct = self._direct, None
            with contextlib.suppress(OSError):  # what was written is in the file
                self._files.close(direct)
