"""A pack being filled in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvnet.errors import StoreError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, BytesLike, ChunkHash
from kvnet.store.filling import PackDraft, PackFilling, may_be_gone_on_with
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import ArtifactRecord
from kvnet.store.osfile import OsFiles


class MemoryHost(Protocol):
    """What a writer needs of its store."""

    def folder(self) -> Path:
        """A private folder for files that other processes read or write."""
        ...

    def lease(self, writer: "MemoryPackWriter", chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        ...

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        ...

    def take(self, draft: PackDraft, chunks: dict[ChunkHash, bytes]) -> ArtifactRecord:
        """List an artifact, all of it or nothing."""
        ...

    def suspend(self, artifact: ArtifactHash, chunks: dict[ChunkHash, bytes]) -> None:
        """Keep what an interrupted fetch of an artifact brought."""
        ...

    def forget(self, writer: "MemoryPackWriter") -> None:
        """The writer has ended: end its leases."""
        ...


class MemoryPackWriter(PackFilling):
    """See :class:`kvnet.store.interface.PackWriter`. Its file is made when it is asked for.

    Args:
        store: the store.
        n_chunks: chunks of the artifact.

    Attributes:
        artifact: what it goes on with: an abort keeps what there is of it; ``None`` for a pack that ends with it.
    """

    def __init__(self, store: MemoryHost, n_chunks: int) -> None:
        super().__init__(n_chunks)
        self._store = store
        self._chunks: dict[ChunkHash, bytes] = {}
        self._path: Path | None = None
        self._ended = False
        self.artifact: ArtifactHash | None = None

    def go_on(self, artifact: ArtifactHash, entries: Sequence[ChunkEntry], chunks: dict[ChunkHash, bytes]) -> None:
        """Outlive an abort; begin with what an earlier fetch of the artifact brought."""
        self.artifact = artifact
        self._chunks = chunks
        for index, entry in enumerate(entries):
            if entry.hash in self._own:
                self._referenced[index] = entry
            elif entry.hash in chunks:
                self._keep(index, PlacedChunk(entry.hash, self._next_offset, entry.length_bytes))
        self._held = frozenset(self._known())

    @property
    def path(self) -> Path:
        """The file, made when it is asked for."""
        if self._path is None:
            self._require_open()
            self._path = self._store.folder() / f"{id(self):x}.part"
            files = OsFiles()
            files.close(files.create(self._path))
        return self._path

    @property
    def size_bytes(self) -> int:
        """What it takes now."""
        return sum(map(len, self._chunks.values()))

    def _require_open(self) -> None:
        if self._ended:
            raise StoreError("expected a pack that is being filled, found one that has ended")

    def _lease(self, chunk: ChunkHash) -> bool:
        return self._store.lease(self, chunk)

    def _make_room(self, n_bytes: int) -> None:
        self._store.make_room(n_bytes)

    def _write(self, chunk: PlacedChunk, data: BytesLike) -> None:
        self._chunks[chunk.hash] = bytes(data)

    def _read(self, chunk: PlacedChunk) -> bytes:
        """A chunk's bytes; another process's are in the file until they are taken over."""
        data = self._chunks.get(chunk.hash)
        if data is None:
            with self.path.open("rb") as file:
                file.seek(chunk.offset)
                data = file.read(chunk.length_bytes)
        return data

    def _written_bytes(self) -> int:
        return self.path.stat().st_size

    def _keep(self, index: int, chunk: PlacedChunk) -> None:
        if chunk.hash not in self._chunks:
            self._chunks[chunk.hash] = self._read(chunk)
        super()._keep(index, chunk)

    def _place(self, draft: PackDraft) -> ArtifactRecord:
        # They count as the store's from here on, and as this pack's no more.
        chunks, self._chunks = self._chunks, {}
        try:
            return self._store.take(draft, chunks)
        except BaseException:
            self._chunks = chunks
            raise

    def _end(self, *, published: ArtifactRecord | None, failure: BaseException | None) -> None:
        self._ended = True
        keep = published is None and may_be_gone_on_with(failure)
        if keep and self.artifact is not None and self._chunks:
            self._store.suspend(self.artifact, self._chunks)
        self._chunks, self.artifact = {}, None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._store.forget(self)
