"""The store on disk: packs in folders, an index beside them, one lock over both."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from kvnet.errors import KvnetError, StoreAwayError, StoreError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import (
    ArtifactHash,
    ChunkHash,
    FingerprintHash,
    NamespaceId,
    PrefixKey,
    artifact_text,
)
from kvnet.store.basic import BasicStore
from kvnet.store.beginnings import take_in_noted
from kvnet.store.chunks import ChunkReading
from kvnet.store.collecting import Collector
from kvnet.store.failures import storage_errors
from kvnet.store.index import ArtifactRow, PlacedChunk
from kvnet.store.interface import (
    ArtifactRecord,
    ChunkLocation,
    Collected,
    KeysOf,
    PackWriter,
    Problem,
    Rebuilt,
    SignedBeginning,
    StoreUsage,
)
from kvnet.store.opening import Parts
from kvnet.store.osfile import OsFiles
from kvnet.store.packing import Packing
from kvnet.store.packs import StorePaths
from kvnet.store.placing import Placing
from kvnet.store.presence import Gate, Presence
from kvnet.store.reading import (
    not_held,
    prefix_keys,
    resolve_text,
)
from kvnet.store.records import RecordCache
from kvnet.store.writer import DiskPackWriter

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DiskStore(BasicStore):
    """Artifacts in one directory; made by :meth:`open`. The caller holds the lock of the data directory."""

    def __init__(self, parts: Parts, now: Callable[[], float], keys_of: KeysOf | None) -> None:
        super().__init__(parts.files)
        self._parts = parts
        self._paths = parts.paths
        self._now = now
        self._keys_of = keys_of
        self._presence = Presence(parts.files, parts.paths)
        self._lock = Gate(self._presence)
        self._reading = ChunkReading(parts, self._presence)
        self._collector = Collector(self._lock, parts, now)
        self._packing = Packing(self._lock, parts, self._collector, Placing(parts, now), self)
        self._records = RecordCache()
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        quota_bytes: int,
        min_free_bytes: int,
        keys_of: KeysOf | None = None,
        files: OsFiles | None = None,
        now: Callable[[], float] = time.time,
    ) -> Self:
        """Open a store, made when missing, and recover it: afterwards its index says what its files say.

        Args:
            directory: of the store.
            quota_bytes: the most that everything in it may take; what may be evicted is, down to it.
            min_free_bytes: what must stay free on its disk.
            keys_of: computes the prefix rows of artifacts that have none.
            files: the seam to the operating system.
            now: seconds since 1970.

        Raises:
            StoreError: the disk failed.
        """
        parts = Parts(files or OsFiles(), StorePaths(directory), quota_bytes=quota_bytes, min_free_bytes=min_free_bytes)
        try:
            with storage_errors(f"opening the store in {directory}"):
                store = cls(parts, now, keys_of)
            take_in_noted(store, parts.files, parts.unfinished)
            store._settle(keys_of)
        except BaseException:
            parts.close()
            raise
        return store

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What opening or rebuilding did not take in, and why."""
        return self._parts.problems

    def _settle(self, keys_of: KeysOf | None) -> None:
        """After the index agrees with the files: what was removed goes, what is missing is computed, quota is kept."""
        removing = self._collector.removing
        removing.collect()
        removing.remove_partials(self._parts.partials.take_expired(self._now()))
        self._parts.partials.sweep()
        removing.drop_needless_markers()
        if keys_of is not None:
            self.index_prefixes(keys_of)
        try:
            self._collector.with_room(0, lambda: None)
        except StoreError as error:
            _log.warning("store: %s", error)

    def close(self) -> None:
        """See the interface."""
        self._lock.while_away(self._close)

    def _close(self) -> None:
        if self._closed:
            return
        for writer in list(self._parts.space.leases):
            writer.abort()
        self._parts.close()
        self._closed = True

    # --- a drive that comes and goes ----------------------------------------------------------------------------------

    @property
    def away(self) -> str:
        """Why the store cannot be used at the moment, in words; "" while it can."""
        return self._presence.away

    def look(self) -> bool:
        """Whether the store can be used; one that was away is opened again when it is back."""
        self._lock.while_away(self._look)
        return not self._presence.away

    def _look(self) -> None:
        # An empty folder, such as the one under a mount point, is not the store come back.
        if self._closed or self._presence.look() or not self._paths.packs.is_dir() or self._presence.probe():
            return
        try:
            self._parts.open_again()
            self._records.clear()
            self._presence.back()
            if self._keys_of is not None:
                self.index_prefixes(self._keys_of)
        except (KvnetError, OSError) as error:
            # A loose cable: it may have gone again meanwhile.
            _log.info("store: not usable yet: %s", error)

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def artifacts(self) -> list[ArtifactRecord]:
        """See the interface."""
        with self._lock:
            return [self._records.record(row) for row in self._parts.index.artifacts()]

    def get(self, artifact: ArtifactHash) -> ArtifactRecord | None:
        """See the interface."""
        with self._lock:
            row = self._parts.index.artifact(artifact)
            return None if row is None else self._records.record(row)

    def resolve(self, text: str) -> ArtifactHash:
        """See the interface."""
        with self._lock:
            return resolve_text(text, self._parts.index.hashes())

    # --- chunks -------------------------------------------------------------------------------------------------------

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """See the interface."""
        with suppress(StoreAwayError), self._lock:
            return self._parts.index.has_chunk(chunk)
        return False

    def locate_all(self, chunks: Sequence[ChunkHash]) -> list[ChunkLocation | None]:
        """See the interface."""
        found: dict[ChunkHash, tuple[str, PlacedChunk]] = {}
        with suppress(StoreAwayError), self._lock:
            found = self._parts.index.first_places(chunks)
        paths = {name: self._paths.pack(name) for name in {name for name, _ in found.values()}}
        located = {
            chunk: ChunkLocation(paths[name], place.offset, place.length_bytes, chunk)
            for chunk, (name, place) in found.items()
        }
        return [located.get(chunk) for chunk in chunks]

    def read_chunk(self, chunk: ChunkHash) -> bytes:
        """See the interface. A damaged copy is dropped, and another is tried when there is one."""
        with self._lock:
            return self._reading.read(chunk)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def find_prefix(
        self, namespace: NamespaceId, keys_deepest_first: Sequence[PrefixKey]
    ) -> list[tuple[ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return self._parts.index.find_prefix(namespace, keys_deepest_first)

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return self._parts.index.prefix_rows(namespace)

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            return self._parts.index.artifacts_of(fingerprint, namespace)

    def count(self, namespace: NamespaceId) -> int:
        """See the interface."""
        with self._lock:
            return self._parts.index.count(namespace)

    def index_prefixes(self, keys_of: KeysOf) -> int:
        """See the interface."""
        done = 0
        with self._lock:
            for artifact in self._parts.index.without_prefixes():
                row = self._parts.index.artifact(artifact)
                if row is None:
                    continue
                record = self._records.record(row)
                keys = prefix_keys(self, record, keys_of)
                if keys:
                    with self._parts.index.transaction():
                        self._parts.index.add_prefixes(row.id, record.manifest.namespace, keys)
                    done += 1
        return done

    # --- packs --------------------------------------------------------------------------------------------------------

    def begin_pack(self, n_chunks: int, *, expected_bytes: int = 0) -> DiskPackWriter:
        """See the interface."""
        return self._packing.begin(n_chunks, expected_bytes)

    def note_beginning(self, writer: PackWriter, beginning: SignedBeginning) -> None:
        """See the interface."""
        self._packing.note_beginning(writer, beginning)

    def has_partial(self, artifact: ArtifactHash) -> bool:
        """See the interface."""
        with self._lock:
            return self._paths.partial_pack(artifact) in self._parts.partials

    def resume_pack(
        self,
        artifact: ArtifactHash,
        entries: Sequence[ChunkEntry],
        *,
        expected_bytes: int = 0,
        read_soon: bool = True,
    ) -> DiskPackWriter:
        """See the interface. Reading what is there goes on outside the lock: it may be much."""
        return self._packing.resume(artifact, entries, expected_bytes, read_soon=read_soon)

    # --- keeping and letting go ---------------------------------------------------------------------------------------

    def touch(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._parts.index.touch(artifact, self._now())

    def pin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._collector.removing.wait_until_settled(artifact)
            self._require_row(artifact)
            with storage_errors("pinning"):
                marker = self._paths.pins / artifact_text(artifact)
                self._files.write_whole(marker, b"", self._parts.space.temporary_path())
            self._parts.index.set_pinned(artifact, pinned=True)

    def unpin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require_row(artifact)
            with storage_errors("unpinning"):
                self._files.unlink(self._paths.pins / artifact_text(artifact))
                self._files.sync_directory(self._paths.pins)
            self._parts.index.set_pinned(artifact, pinned=False)

    def release(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        self._check_open()
        return self._collector.removing.remove(artifact)

    def compact(self) -> int:
        """See the interface."""
        self._check_open()
        return self._collector.compact()

    def collect_garbage(self, *, everything: bool = False) -> Collected:
        """See the interface."""
        self._check_open()
        return self._collector.collect_garbage(everything=everything)

    def tidy(self, *, unused_s: float) -> Collected:
        """See the interface. The lock is held for one artifact, or one pack, at a time."""
        self._check_open()
        return self._collector.tidy(unused_s=unused_s)

    def take_evicted(self) -> list[ArtifactHash]:
        """See the interface."""
        taken: list[ArtifactHash] = []

        def take() -> None:
            taken.extend(self._parts.space.evicted)
            self._parts.space.evicted.clear()

        self._lock.while_away(take)
        return taken

    def usage(self) -> StoreUsage:
        """See the interface."""
        with self._lock:
            counts = self._parts.index.counts()
            return StoreUsage(
                artifacts=counts.artifacts,
                pinned=counts.pinned,
                chunks=self._parts.index.chunk_count(),
                held_bytes=self._parts.space.held_bytes(),
                quota_bytes=self._parts.space.quota_bytes,
                free_bytes=self._parts.space.free_bytes(),
                min_free_bytes=self._parts.space.min_free_bytes,
            )

    def rebuild(self, keys_of: KeysOf, *, verify_chunks: bool = False) -> Rebuilt:
        """Throw the index away and make it anew from the packs and the marker files.

        When an artifact was last used is not in the files; afterwards it is when its pack was written.

        Args:
            keys_of: computes prefix keys from token ids.
            verify_chunks: also hash every chunk.

        Raises:
            StoreError: the disk failed.
        """
        collector = self._collector
        with collector.compacting.turn, collector.removing.turn, self._lock:
            self.require_open()
            self._records.clear()
            self._parts.index_anew(verify_chunks=verify_chunks)
            with storage_errors("rebuilding the index"):
                self._settle(keys_of)
            return Rebuilt(len(self._parts.index.hashes()), self._parts.index.chunk_count(), self.problems)

    def _require_row(self, artifact: ArtifactHash) -> ArtifactRow:
        row = self._parts.index.artifact(artifact)
        if row is None:
            raise not_held(artifact)
        return row

    def _check_open(self) -> None:
        with self._lock:
            self.require_open()

    def require_open(self) -> None:
        """Raises StoreError once it is closed."""
        if self._closed:
            raise StoreError("expected an open store, found one that was closed")
