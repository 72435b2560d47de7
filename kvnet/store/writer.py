"""A pack being filled: chunks first, then the chunk list, the envelope and the footer, then its place in the store."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvnet.errors import IntegrityError, MalformedError, NotInStoreError, StoreError
from kvnet.format.chunks import ChunkEntry, VerifiedChunk, encode_pages
from kvnet.format.container import (
    MAX_STORED_CHUNK_BYTES,
    ContainerLayout,
    Placement,
    encode_envelope_area,
    encode_footer,
    encode_header,
)
from kvnet.format.hashes import BytesLike, ChunkHash, PrefixKey, blake3_hash
from kvnet.store.failures import storage_errors
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import ArtifactRecord, Placed
from kvnet.store.osfile import OsFiles
from kvnet.store.reading import checked_keys, checked_list
from kvnet.trust.envelope import SignedManifest, open_manifest

_log = logging.getLogger(__name__)

ROOM_STEP_BYTES: Final = 64 << 20
"""Quota and free space are looked at again every so many bytes: a fetch that cannot fit ends early."""


@dataclass(frozen=True, slots=True)
class PackDraft:
    """A pack whose bytes are on the medium, ready for its place.

    Attributes:
        signed: its manifest.
        entries: the chunk list.
        pages: the same in pages.
        chunks: the chunks in this file.
        keys: prefix keys, one per block, or none.
        pinned: whether to keep the artifact until it is unpinned.
        allow_partial: whether chunks may be missing.
    """

    signed: SignedManifest
    entries: tuple[ChunkEntry, ...]
    pages: tuple[bytes, ...]
    chunks: tuple[PlacedChunk, ...]
    keys: tuple[PrefixKey, ...]
    pinned: bool
    allow_partial: bool


class PackHost(Protocol):
    """What a writer needs of its store."""

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """Whether a chunk is held."""
        ...

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


class DiskPackWriter:
    """See :class:`kvnet.store.interface.PackWriter`. For one user at a time.

    Args:
        host: the store.
        files: the seam to the operating system.
        path: the file to create, in the store's temporary folder.
        n_chunks: chunks of the artifact.
        expected_bytes: bytes to reserve for chunks.
        handle: the file, when it is open already.
    """

    held: frozenset[int] = frozenset()

    def __init__(
        self,
        host: PackHost,
        files: OsFiles,
        path: Path,
        n_chunks: int,
        expected_bytes: int,
        *,
        handle: int | None = None,
    ) -> None:
        self._host = host
        self._files = files
        self._path = path
        self._layout = ContainerLayout(n_chunks)
        self._placed: dict[int, PlacedChunk] = {}
        self._own: set[ChunkHash] = set()
        self._referenced: dict[int, ChunkEntry] = {}
        self._next_offset = self._layout.data_offset
        self._room_until = self._next_offset + max(expected_bytes, ROOM_STEP_BYTES)
        with storage_errors("starting a pack"):
            self._handle: int | None = files.create(path) if handle is None else handle
        try:
            with storage_errors("reserving a pack"):
                files.preallocate(self._handle, self._next_offset + expected_bytes)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> Path:
        """The file being filled."""
        return self._path

    @property
    def next_offset(self) -> int:
        """Where the next chunk goes."""
        return self._next_offset

    @property
    def size_bytes(self) -> int:
        """What the file takes now; 0 once it has ended."""
        handle = self._handle
        return 0 if handle is None else self._files.size_bytes(handle)

    def read(self, index: int) -> bytes:
        """See the interface."""
        chunk = self._placed.get(index)
        if chunk is None:
            raise NotInStoreError(f"chunk {index} is not in this pack")
        with storage_errors("reading a pack"):
            data = self._files.read(self._open_handle(), chunk.length_bytes, chunk.offset)
        if blake3_hash(data) != chunk.hash:
            raise IntegrityError(f"chunk {index} of the pack does not match its hash")
        return data

    def put(self, index: int, data: BytesLike, expected_hash: ChunkHash | None = None) -> ChunkHash:
        """See the interface."""
        self._require_new(index, len(data))
        digest = blake3_hash(data)
        if expected_hash is not None and digest != expected_hash:
            raise IntegrityError(f"chunk {index} does not match its hash")
        self._write(index, data, digest)
        return digest

    def put_verified(self, chunk: VerifiedChunk) -> None:
        """See the interface."""
        self._require_new(chunk.index, len(chunk.data))
        self._write(chunk.index, chunk.data, chunk.hash)

    def _write(self, index: int, data: BytesLike, digest: ChunkHash) -> None:
        if digest in self._own or self._host.lease(self, digest):
            self._referenced[index] = ChunkEntry(len(data), digest)
            return
        if self._next_offset + len(data) > self._room_until:
            self._host.make_room(ROOM_STEP_BYTES)
            self._room_until = self._next_offset + len(data) + ROOM_STEP_BYTES
        with storage_errors("writing a pack"):
            self._files.write(self._open_handle(), data, self._next_offset)
        self._keep(index, PlacedChunk(digest, self._next_offset, len(data)))

    def adopt(self, chunks: Iterable[Placed]) -> None:
        """See the interface."""
        adopted = sorted(chunks, key=lambda chunk: chunk.offset)
        size_bytes = self._files.size_bytes(self._open_handle())
        for chunk in adopted:
            self._require_new(chunk.index, chunk.length_bytes)
            if chunk.offset < self._next_offset or chunk.offset + chunk.length_bytes > size_bytes:
                raise StoreError(
                    f"chunk {chunk.index}: expected a place from byte {self._next_offset} to {size_bytes} of the pack, "
                    f"found {chunk.offset}"
                )
            with storage_errors("reading a pack"):
                data = self._files.read(self._open_handle(), chunk.length_bytes, chunk.offset)
            if len(data) != chunk.length_bytes or blake3_hash(data) != chunk.hash:
                raise IntegrityError(f"chunk {chunk.index} of the pack does not match its hash")
            self._keep(chunk.index, PlacedChunk(ChunkHash(chunk.hash), chunk.offset, chunk.length_bytes))
        # What is there now counts; whether more fits is a question of its own.
        self._host.make_room(0)

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """See the interface."""
        self._require_new(index, entry.length_bytes)
        if entry.hash not in self._own and not self._host.lease(self, entry.hash):
            raise NotInStoreError(f"chunk {index} is not held here, so it cannot be referenced")
        self._referenced[index] = entry

    def publish(
        self,
        envelope: bytes,
        *,
        keys: Sequence[PrefixKey],
        pinned: bool,
        allow_partial: bool = False,
        entries: Sequence[ChunkEntry] | None = None,
    ) -> ArtifactRecord:
        """See the interface. Whatever happens, the writer has ended afterwards."""
        self._open_handle()
        try:
            signed = open_manifest(envelope)
            listed = checked_list(signed, self._layout.n_chunks, self._known(), entries)
            draft = PackDraft(
                signed=signed,
                entries=listed,
                pages=tuple(encode_pages(listed)),
                chunks=tuple(self._placed[index] for index in sorted(self._placed)),
                keys=checked_keys(signed.manifest, keys),
                pinned=pinned,
                allow_partial=allow_partial,
            )
            with storage_errors("finishing a pack"):
                self._finish_file(draft)
            record = self._host.place(self, draft)
        except BaseException as error:
            self._end(published=None, failure=error)
            raise
        self._end(published=record, failure=None)
        return record

    def abort(self) -> None:
        """See the interface."""
        self._end(published=None, failure=None)

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

    def _known(self) -> dict[int, ChunkEntry]:
        """Every chunk written or referenced, by index."""
        placed = {index: ChunkEntry(chunk.length_bytes, chunk.hash) for index, chunk in self._placed.items()}
        return placed | self._referenced

    def _require_new(self, index: int, length_bytes: int) -> None:
        self._open_handle()
        if not 0 <= index < self._layout.n_chunks:
            raise StoreError(f"chunk: expected an index below {self._layout.n_chunks}, found {index}")
        if index in self._placed or index in self._referenced:
            raise StoreError(f"chunk {index} is in the pack already")
        if not 0 < length_bytes <= MAX_STORED_CHUNK_BYTES:
            raise MalformedError(f"chunk {index}: expected 1 to {MAX_STORED_CHUNK_BYTES} bytes, found {length_bytes}")

    def _keep(self, index: int, chunk: PlacedChunk) -> None:
        self._placed[index] = chunk
        self._own.add(chunk.hash)
        self._next_offset = chunk.offset + chunk.length_bytes

    def _open_handle(self) -> int:
        if self._handle is None:
            raise StoreError("expected a pack that is being filled, found one that has ended")
        return self._handle
