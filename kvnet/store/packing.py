"""Packs being filled: begun or gone on with, kept safe while they are, and given their place."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from kvnet.errors import StoreError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash
from kvnet.store.beginnings import note_of, write_note
from kvnet.store.collecting import Collector
from kvnet.store.filling import PackDraft
from kvnet.store.interface import ArtifactRecord, PackWriter, SignedBeginning, Store
from kvnet.store.opening import Parts
from kvnet.store.placing import Placing
from kvnet.store.presence import Gate
from kvnet.store.reading import require
from kvnet.store.resuming import ResumablePackWriter
from kvnet.store.writer import DiskPackWriter

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PackedStore(Store, Protocol):
    """The store that packs are filled for."""

    def require_open(self) -> None:
        """Raises StoreError once it is closed."""
        ...


class Packing:
    """What pack writers ask of a store; a :class:`kvnet.store.writer.PackHost`.

    Args:
        gate: the store's lock.
        parts: the open store.
        collector: makes room.
        placing: gives packs their place.
        store: the store.
    """

    def __init__(self, gate: Gate, parts: Parts, collector: Collector, placing: Placing, store: PackedStore) -> None:
        self._gate = gate
        self._parts = parts
        self._collector = collector
        self._placing = placing
        self._store = store
        self._noted: set[PackWriter] = set()

    def begin(self, n_chunks: int, expected_bytes: int, *, read_soon: bool = True) -> DiskPackWriter:
        """See :meth:`Store.begin_pack`; of chunks that are not read soon nothing stays in the page cache."""

        def begin() -> DiskPackWriter:
            path = self._parts.space.temporary_path()
            writer = DiskPackWriter(self, self._parts.files, path, n_chunks, expected_bytes, read_soon=read_soon)
            self._parts.space.leases[writer] = set()
            return writer

        return self._with_room(expected_bytes, begin)

    def resume(
        self, artifact: ArtifactHash, entries: Sequence[ChunkEntry], expected_bytes: int, *, read_soon: bool = True
    ) -> DiskPackWriter:
        """See :meth:`Store.resume_pack`."""
        path = self._parts.paths.partial_pack(artifact)
        with self._gate:
            self._store.require_open()
            mine = self._parts.partials.take(path)
        if not mine:
            return self.begin(len(entries), expected_bytes, read_soon=read_soon)
        writer = ResumablePackWriter(self, self._parts.files, path, artifact, entries, read_soon=read_soon)
        with self._gate:
            self._parts.space.leases[writer] = set()
        left_bytes = max(0, expected_bytes - sum(entries[index].length_bytes for index in writer.held))
        try:
            self._with_room(left_bytes, lambda: writer.reserve(left_bytes))
        except BaseException:
            writer.abort()
            raise
        return writer

    def note_beginning(self, writer: PackWriter, beginning: SignedBeginning) -> None:
        """See :meth:`Store.note_beginning`; the file is written outside the lock."""
        with self._gate:
            self._store.require_open()
            if writer not in self._parts.space.leases:
                raise StoreError("expected a pack that is being filled, found one that has ended")
            self._noted.add(writer)
        write_note(self._parts.files, writer.path, beginning)

    def _with_room(self, need_bytes: int, then: Callable[[], T]) -> T:
        def checked() -> T:
            self._store.require_open()
            return then()

        with self._gate:
            self._store.require_open()
        return self._collector.with_room(need_bytes, checked)

    # --- what a writer asks -------------------------------------------------------------------------------------------

    def lease(self, writer: DiskPackWriter, chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        with self._gate:
            if not self._parts.index.has_chunk(chunk):
                return False
            leased = self._parts.space.leases.get(writer)
            if leased is None:
                raise StoreError("the pack was being written before the store was away", hint="Start again.")
            leased.add(chunk)
            return True

    def forget(self, writer: DiskPackWriter) -> None:
        """The writer has ended: end its leases, and take back what was noted of its pack."""
        noted = False

        def forget() -> None:
            nonlocal noted
            self._parts.space.leases.pop(writer, None)
            noted = writer in self._noted
            self._noted.discard(writer)

        self._gate.while_away(forget)
        if noted:
            try:
                self._parts.files.unlink(note_of(writer.path))
            except OSError as error:
                _log.warning("store: a note of a pack stays until the store opens again: %s", error.strerror)

    def suspended(self, path: Path) -> None:
        """Nobody fills a partial pack any more; what is left of it may be gone on with."""
        self._gate.while_away(lambda: self._parts.partials.give_back(path))

    def make_room(self, need_bytes: int) -> None:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        self._with_room(need_bytes, lambda: None)

    def place(self, writer: DiskPackWriter, draft: PackDraft) -> ArtifactRecord:
        """Give a finished pack its place. A failure leaves nothing of it."""
        artifact = draft.signed.artifact_hash
        with self._gate:
            self._store.require_open()
            self._placing.check_missing(draft)
            needless = self._placing.brings_nothing_new(draft)

        def place() -> ArtifactRecord:
            self._collector.removing.wait_until_settled(artifact)
            self._placing.check_missing(draft)
            if self._placing.brings_nothing_new(draft):
                if draft.pinned:
                    self._store.pin(artifact)
                self._placing.note_again(draft)
            else:
                self._placing.place(writer.path, draft)
            return require(self._store, artifact)

        return self._with_room(0 if needless else self._placing.index_bytes(draft), place)
