"""A pack being filled: chunks first, then the chunk list, the envelope and the footer, then its place in the store."""

import logging
from pathlib import Path
from typing import Final, Protocol

from kvnet.errors import StoreError
from kvnet.format.container import Placement, encode_envelope_area, encode_footer, encode_header
from kvnet.format.hashes import BytesLike, ChunkHash
from kvnet.store.failures import storage_errors
from kvnet.store.filling import PackDraft, PackFilling
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import ArtifactRecord
from kvnet.store.osfile import OsFiles

_log = logging.getLogger(__name__)

ROOM_STEP_BYTES: Final = 64 << 20
"""Quota and free space are looked at again every so many bytes: a fetch that cannot fit ends early."""

LET_GO_BYTES: Final = 8 << 20
"""Bytes after which the page cache is asked to let go of a pack that nobody reads soon."""

ON_ITS_WAY_BYTES: Final = 256 << 20
"""How far back it may not have been on the medium before: more than a slow disk takes while so much arrives."""


class PackHost(Protocol):
    """What a writer needs of its store."""

    def lease(self, writer: "DiskPackWriter", chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        ...

    def make_room(self, need_bytes: int) -> None:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        ...

    def place(self, writer: "DiskPackWriter", draft: PackDraft) -> ArtifactRecord:
        """Give a finished pack its place."""
        ...

    def forget(self, writer: "DiskPackWriter") -> None:
        """The writer has ended: end its leases."""
        ...

    def suspended(self, path: Path) -> None:
        """Nobody fills a partial pack any more; what is left of it may be gone on with."""
        ...


class DiskPackWriter(PackFilling):
    """See :class:`kvnet.store.interface.PackWriter`. For one user at a time.

    Args:
        host: the store.
        files: the seam to the operating system.
        path: the file to create, in the store's temporary folder.
        n_chunks: chunks of the artifact.
        expected_bytes: bytes to reserve for chunks.
        handle: the file, when it is open already.
        read_soon: whether chunks stay in the system's page cache.
    """

    def __init__(
        self,
        host: PackHost,
        files: OsFiles,
        path: Path,
        n_chunks: int,
        expected_bytes: int,
        *,
        handle: int | None = None,
        read_soon: bool = True,
    ) -> None:
        super().__init__(n_chunks)
        self._host = host
        self._files = files
        self._path = path
        self._room_until = self._next_offset + max(expected_bytes, ROOM_STEP_BYTES)
        with storage_errors("starting a pack"):
            self._handle: int | None = files.create(path) if handle is None else handle
        self._read_soon = read_soon
        self._let_go_at = self._next_offset + LET_GO_BYTES
        try:
            with storage_errors("reserving a pack"):
                files.preallocate(self._handle, self._next_offset + expected_bytes)
            if not read_soon:
                files.let_go(self._handle)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> Path:
        """The file being filled."""
        return self._path

    @property
    def size_bytes(self) -> int:
        """What the file takes now; 0 once it has ended."""
        handle = self._handle
        return 0 if handle is None else self._files.size_bytes(handle)

    def _open_handle(self) -> int:
        if self._handle is None:
            raise StoreError("expected a pack that is being filled, found one that has ended")
        return self._handle

    def _require_open(self) -> None:
        self._open_handle()

    def _lease(self, chunk: ChunkHash) -> bool:
        return self._host.lease(self, chunk)

    def _make_room(self, n_bytes: int) -> None:
        """Quota and free space are looked at again every `ROOM_STEP_BYTES`, and whenever nothing is to be added."""
        if not n_bytes:
            self._host.make_room(0)
        elif self._next_offset + n_bytes > self._room_until:
            self._host.make_room(ROOM_STEP_BYTES)
            self._room_until = self._next_offset + n_bytes + ROOM_STEP_BYTES

    def _write(self, chunk: PlacedChunk, data: BytesLike) -> None:
        with storage_errors("writing a pack"):
            self._files.write(self._open_handle(), data, chunk.offset)
        if not self._read_soon:
            self._let_go(chunk.offset + chunk.length_bytes)

    def _let_go(self, end: int) -> None:
        """Of what was written just now, and of what was still on its way before."""
        if end >= self._let_go_at:
            start = max(0, end - ON_ITS_WAY_BYTES)
            self._files.let_go(self._open_handle(), start, end - start)
            self._let_go_at = end + LET_GO_BYTES

    def _read(self, chunk: PlacedChunk) -> bytes:
        with storage_errors("reading a pack"):
            return self._files.read(self._open_handle(), chunk.length_bytes, chunk.offset)

    def _written_bytes(self) -> int:
        return self._files.size_bytes(self._open_handle())

    def _place(self, draft: PackDraft) -> ArtifactRecord:
        with storage_errors("finishing a pack"):
            self._finish_file(draft)
        return self._host.place(self, draft)

    def _end(self, *, published: ArtifactRecord | None, failure: BaseException | None) -> None:  # noqa: ARG002
        """Close the file, and remove it unless it has its place by now."""
        handle, self._handle = self._handle, None
        # Before the file is closed: the store asks its writers for their size, under the lock that this takes.
        self._host.forget(self)
        if handle is not None:
            self._files.close(handle)
            try:
                self._files.unlink(self._path)
            except OSError as error:
                _log.warning("a temporary pack stays until the store opens again: %s", error.strerror)

    def _finish_file(self, draft: PackDraft) -> None:
        """Everything around the chunks; then all of it to the medium."""
        handle = self._open_handle()
        layout = self._layout
        self._files.write(handle, encode_header(layout.n_chunks), 0)
        self._files.write(handle, encode_envelope_area(draft.signed.envelope), layout.envelope_offset)
        self._files.write(handle, b"".join(draft.pages), layout.pages_offset)
        footer = encode_footer(
            Placement(index, chunk.offset, chunk.length_bytes) for index, chunk in self._placed.items()
        )
        self._files.write(handle, footer, self._next_offset)
        # Cuts what was reserved too much, and what another process may have left behind its last chunk.
        self._files.truncate(handle, self._next_offset + len(footer))
        self._files.sync(handle)
        if not self._read_soon:
            self._files.let_go(handle)
