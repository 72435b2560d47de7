"""The store on disk: packs in folders, an index beside them, one lock over both."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from kvnet.errors import IntegrityError, KvnetError, NotInStoreError, StoreAwayError, StoreError, StoreFullError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import (
    ArtifactHash,
    ChunkHash,
    FingerprintHash,
    NamespaceId,
    PrefixKey,
    artifact_text,
    blake3_hash,
    short_text,
)
from kvnet.store.database import IndexUnreadableError
from kvnet.store.eviction import FRESH_S
from kvnet.store.failures import storage_errors
from kvnet.store.index import ArtifactRow, Index, PlacedChunk
from kvnet.store.interface import (
    ArtifactRecord,
    ChunkLocation,
    Collected,
    Judge,
    KeysOf,
    Problem,
    Rebuilt,
    Store,
    StoreUsage,
    Verified,
)
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import StorePaths
from kvnet.store.presence import Gate, Presence
from kvnet.store.reading import (
    checked_keys,
    export_artifact,
    import_artifact,
    not_held,
    read_context,
    read_tokens,
    require,
    resolve_text,
    verify_artifact,
)
from kvnet.store.records import RecordCache
from kvnet.store.recovery import reconcile, remove_temporary_files
from kvnet.store.resuming import ResumablePackWriter
from kvnet.store.space import INDEX_BASE_BYTES, INDEX_BYTES_PER_CHUNK, Compaction, Space
from kvnet.store.writer import DiskPackWriter, PackDraft

_log = logging.getLogger(__name__)

T = TypeVar("T")


def _reconciled(files: OsFiles, paths: StorePaths, index: Index) -> tuple[Problem, ...]:
    """Make the index say what the files say; one that contradicts itself is thrown away first."""
    try:
        return reconcile(files, paths, index)
    except IndexUnreadableError as error:
        _log.warning("store: the index is made anew: %s", error)
        index.start_anew()
        return reconcile(files, paths, index)


def _recovered(
    files: OsFiles, paths: StorePaths, *, quota_bytes: int, min_free_bytes: int
) -> tuple[Index, tuple[Problem, ...], Space]:
    """A store's folders, its index in agreement with its files, and its room."""
    with storage_errors(f"opening the store in {paths.root}"):
        for folder in paths.folders():
            files.make_directory(folder)
        remove_temporary_files(files, paths)
    index = Index.open(paths.index)
    try:
        with storage_errors(f"opening the store in {paths.root}"):
            problems = _reconciled(files, paths, index)
            space = Space(files, paths, index, quota_bytes=quota_bytes, min_free_bytes=min_free_bytes)
    except BaseException:
        index.close()
        raise
    return index, problems, space


class DiskStore(Store):
    """Artifacts in one directory; made by :meth:`open`. The caller holds the lock of the data directory."""

    def __init__(self, paths: StorePaths, files: OsFiles, index: Index, space: Space, now: Callable[[], float]) -> None:
        self._paths = paths
        self._files = files
        self._index = index
        self._space = space
        self._now = now
        self._presence = Presence(files, paths)
        self._lock = Gate(self._presence)
        # Taken before the lock above, never while holding it.
        self._compacting = threading.RLock()
        self._records = RecordCache()
        self._resuming: set[Path] = set()
        self._closed = False
        self._keys_of: KeysOf | None = None
        self.problems: tuple[Problem, ...] = ()
        """What opening or rebuilding did not take in, and why."""

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
        files = files or OsFiles()
        paths = StorePaths(directory)
        index, problems, space = _recovered(files, paths, quota_bytes=quota_bytes, min_free_bytes=min_free_bytes)
        try:
            with storage_errors(f"opening the store in {directory}"):
                store = cls(paths, files, index, space, now)
            store.problems = problems
            store._keys_of = keys_of
            store._settle(keys_of)
        except BaseException:
            index.close()
            raise
        return store

    def _settle(self, keys_of: KeysOf | None) -> None:
        """After the index agrees with the files: what was removed goes, what is missing is computed, quota is kept."""
        self._space.collect()
        self._space.expire_partial(self._now())
        for marker in self._paths.removed.iterdir():
            # Nothing is left that could bring it back.
            if not any(artifact_text(pack.artifact) == marker.name for pack in self._index.packs()):
                self._files.unlink(marker)
        if keys_of is not None:
            self.index_prefixes(keys_of)
        try:
            self._with_room(0, lambda: None)
        except StoreError as error:
            _log.warning("store: %s", error)

    def close(self) -> None:
        """See the interface."""
        self._lock.while_away(self._close)

    def _close(self) -> None:
        if self._closed:
            return
        for writer in list(self._space.leases):
            writer.abort()
        with suppress(sqlite3.Error):
            self._index.close()
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
        with suppress(sqlite3.Error):
            self._index.close()
        old = self._space
        try:
            self._index, self.problems, self._space = _recovered(
                self._files, self._paths, quota_bytes=old.quota_bytes, min_free_bytes=old.min_free_bytes
            )
        except (KvnetError, OSError) as error:
            _log.info("store: not usable yet: %s", error)
            return
        self._space.evicted = old.evicted
        self._records.clear()
        self._presence.back()
        if self._keys_of is not None:
            self.index_prefixes(self._keys_of)

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def artifacts(self) -> list[ArtifactRecord]:
        """See the interface."""
        with self._lock:
            return [self._records.record(row) for row in self._index.artifacts()]

    def get(self, artifact: ArtifactHash) -> ArtifactRecord | None:
        """See the interface."""
        with self._lock:
            row = self._index.artifact(artifact)
            return None if row is None else self._records.record(row)

    def resolve(self, text: str) -> ArtifactHash:
        """See the interface."""
        with self._lock:
            return resolve_text(text, self._index.hashes())

    def tokens_of(self, artifact: ArtifactHash) -> list[int]:
        """See the interface."""
        return read_tokens(self, require(self, artifact))

    def context_of(self, artifact: ArtifactHash) -> bytes | None:
        """See the interface."""
        return read_context(self, require(self, artifact))

    def verify(self, artifact: ArtifactHash) -> Verified:
        """See the interface."""
        return verify_artifact(self, require(self, artifact))

    # --- chunks -------------------------------------------------------------------------------------------------------

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """See the interface."""
        with suppress(StoreAwayError), self._lock:
            return self._index.has_chunk(chunk)
        return False

    def locate(self, chunk: ChunkHash) -> ChunkLocation | None:
        """See the interface."""
        places: list[tuple[int, str, PlacedChunk]] = []
        with suppress(StoreAwayError), self._lock:
            places = self._index.places_of(chunk)
        if not places:
            return None
        _, name, place = places[0]
        return ChunkLocation(self._paths.pack(name), place.offset, place.length_bytes, chunk)

    def read_chunk(self, chunk: ChunkHash) -> bytes:
        """See the interface. A damaged copy is dropped, and another is tried when there is one."""
        with self._lock:
            damaged = False
            for pack, name, place in self._index.places_of(chunk):
                data = self._read(name, place)
                if data is not None and blake3_hash(data) == chunk:
                    return data
                damaged |= data is not None
                with self._index.transaction():
                    self._index.drop_chunk(chunk, pack)
                reason = "has gone with its pack" if data is None else "does not match its hash"
                _log.warning("store: a chunk in %s %s; dropped", name, reason)
        if not damaged:
            raise NotInStoreError(f"the chunk {chunk.hex()[:16]} is not held here")
        raise IntegrityError(
            f"the chunk {chunk.hex()[:16]} does not match its hash any more and was dropped",
            hint="`kvnet fetch` gets it again from a peer; adding again computes it.",
        )

    def _read(self, name: str, place: PlacedChunk) -> bytes | None:
        """The bytes at a place; ``None`` when the pack has gone."""
        try:
            handle = self._files.open_for_reading(self._paths.pack(name))
        except FileNotFoundError:
            if not self._presence.look():
                raise self._presence.error() from None
            return None
        except OSError as error:
            raise StoreError(f"a pack cannot be opened: {error.strerror}", hint="Check the disk.") from error
        try:
            with storage_errors("reading a pack"):
                return self._files.read(handle, place.length_bytes, place.offset)
        finally:
            self._files.close(handle)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def find_prefix(
        self, namespace: NamespaceId, keys_deepest_first: Sequence[PrefixKey]
    ) -> list[tuple[ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return self._index.find_prefix(namespace, keys_deepest_first)

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return self._index.prefix_rows(namespace)

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            return self._index.artifacts_of(fingerprint, namespace)

    def count(self, namespace: NamespaceId) -> int:
        """See the interface."""
        with self._lock:
            return self._index.count(namespace)

    def index_prefixes(self, keys_of: KeysOf) -> int:
        """See the interface."""
        done = 0
        with self._lock:
            for artifact in self._index.without_prefixes():
                row = self._index.artifact(artifact)
                if row is None:
                    continue
                try:
                    record = self._records.record(row)
                    keys = checked_keys(record.manifest, keys_of(record.manifest, read_tokens(self, record)))
                except KvnetError as error:
                    _log.warning("store: no prefix leads to %s: %s", short_text(artifact), error)
                    continue
                if keys:
                    with self._index.transaction():
                        self._index.add_prefixes(row.id, record.manifest.namespace, keys)
                    done += 1
        return done

    # --- packs --------------------------------------------------------------------------------------------------------

    def begin_pack(self, n_chunks: int, *, expected_bytes: int = 0) -> DiskPackWriter:
        """See the interface."""

        def begin() -> DiskPackWriter:
            writer = DiskPackWriter(self, self._files, self._space.temporary_path(), n_chunks, expected_bytes)
            self._space.leases[writer] = set()
            return writer

        return self._with_room(expected_bytes, begin)

    def _with_room(self, need_bytes: int, then: Callable[[], T]) -> T:
        """Make room, and do what needs it before anybody else can take it.

        Only when nothing else helps are packs written anew for it, and not under the lock: others go on meanwhile.
        """
        while True:
            with self._lock:
                self._require_open()
                try:
                    self._space.make_room(need_bytes)
                except StoreFullError as error:
                    full = error
                else:
                    return then()
            if not self._compact():
                raise full

    def _compact(self) -> int:
        """Write packs anew that are used in part, none of it under the lock but the exchange; returns how many."""
        done = 0
        with self._compacting:
            with self._lock:
                self._space.begin_round()
            while True:
                with self._lock:
                    self._require_open()
                    compaction = self._space.next_compaction()
                if compaction is None:
                    return done
                placed = False
                try:
                    placed = self._exchange(compaction)
                except (KvnetError, OSError) as error:
                    with self._lock:
                        gone = not self._space.still_wanted(compaction)
                    if not gone:
                        _log.warning("store: a pack stays as large as it is: %s", error)
                finally:
                    with self._lock:
                        self._space.end_compaction(compaction, failed=not placed)
                done += placed

    def _exchange(self, compaction: Compaction) -> bool:
        """Write one pack anew and use it; whether that was of use. Whatever waits for the medium is done unlocked."""
        kept = self._space.copy(compaction)
        old = self._paths.pack(compaction.pack.name)
        with self._lock:
            self._require_open()
            new = self._space.name_copy(compaction)
        used = False
        try:
            self._files.sync_directory(new.parent)
            with self._lock:
                self._require_open()
                used = self._space.use_copy(compaction, new, kept)
        finally:
            self._files.unlink(old if used else new)
        return used

    def has_partial(self, artifact: ArtifactHash) -> bool:
        """See the interface."""
        with self._lock:
            return self._paths.partial_pack(artifact) in self._space.partial

    def resume_pack(
        self, artifact: ArtifactHash, entries: Sequence[ChunkEntry], *, expected_bytes: int = 0
    ) -> DiskPackWriter:
        """See the interface. Reading what is there goes on outside the lock: it may be much."""
        path = self._paths.partial_pack(artifact)
        with self._lock:
            self._require_open()
            taken = path in self._resuming
            if not taken:
                self._resuming.add(path)
                self._space.partial.pop(path, None)
        if taken:
            return self.begin_pack(len(entries), expected_bytes=expected_bytes)
        try:
            writer = ResumablePackWriter(self, self._files, path, artifact, entries)
        except BaseException:
            with self._lock:
                self._resuming.discard(path)
                self.suspended(path)
            raise
        with self._lock:
            self._space.leases[writer] = set()
        left_bytes = max(0, expected_bytes - sum(entries[index].length_bytes for index in writer.held))
        try:
            self._with_room(left_bytes, lambda: writer.reserve(left_bytes))
        except BaseException:
            writer.abort()
            raise
        return writer

    def suspended(self, path: Path) -> None:
        """A partial pack stays where it is, to be gone on with."""
        self._lock.while_away(lambda: self._space.count_partial(path))

    def lease(self, writer: DiskPackWriter, chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        with self._lock:
            if not self._index.has_chunk(chunk):
                return False
            leased = self._space.leases.get(writer)
            if leased is None:
                raise StoreError("the pack was being written before the store was away", hint="Start again.")
            leased.add(chunk)
            return True

    def forget(self, writer: DiskPackWriter) -> None:
        """The writer has ended: end its leases."""

        def forget() -> None:
            self._space.leases.pop(writer, None)
            self._resuming.discard(writer.path)

        self._lock.while_away(forget)

    def make_room(self, need_bytes: int) -> None:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        self._with_room(need_bytes, lambda: None)

    def place(self, writer: DiskPackWriter, draft: PackDraft) -> ArtifactRecord:
        """Give a finished pack its place: rename, then the index. A failure leaves nothing of it."""
        artifact = draft.signed.artifact_hash
        with self._lock:
            self._require_open()
            self._check_missing(draft)
            row = self._index.artifact(artifact)
            if row is None or any(not self._index.has_chunk(chunk.hash) for chunk in draft.chunks):
                self._space.make_room(INDEX_BASE_BYTES + INDEX_BYTES_PER_CHUNK * len(draft.entries))
                row = self._index.artifact(artifact)
                self._place_file(writer.path, draft, row)
            elif draft.pinned and not row.pinned:
                self.pin(artifact)
            if row is not None:
                self._note_again(row, draft)
            return require(self, artifact)

    def _check_missing(self, draft: PackDraft) -> None:
        own = {chunk.hash for chunk in draft.chunks}
        missing = [
            entry
            for entry in draft.entries
            if not entry.absent and entry.hash not in own and not self._index.has_chunk(entry.hash)
        ]
        if missing and not draft.allow_partial:
            raise NotInStoreError(
                f"{len(missing)} of {len(draft.entries)} chunks of {short_text(draft.signed.artifact_hash)} "
                "are not held here"
            )

    def _place_file(self, path: Path, draft: PackDraft, row: ArtifactRow | None) -> None:
        artifact = draft.signed.artifact_hash
        target = self._paths.pack(self._space.free_name(artifact))
        marker = self._paths.pins / artifact_text(artifact)
        new_pin = draft.pinned and (row is None or not row.pinned)
        try:
            with storage_errors("publishing a pack"):
                if new_pin:
                    self._files.write_whole(marker, b"", self._space.temporary_path())
                self._files.make_directory(target.parent)
                self._files.sync_directory(self._paths.packs)
                self._files.rename(path, target)
                self._files.sync_directory(target.parent)
                # It may have been removed before, with a pack left for others.
                self._files.unlink(self._paths.removed / artifact_text(artifact))
                self._files.sync_directory(self._paths.removed)
            self._list(draft, target, row)
        except BaseException:
            self._take_back(target, marker if new_pin else None)
            raise

    def _list(self, draft: PackDraft, target: Path, row: ArtifactRow | None) -> None:
        """The index, after the files."""
        signed = draft.signed
        with storage_errors("publishing a pack"):
            found = target.lstat()
        name = str(target.relative_to(self._paths.packs))
        with self._index.transaction():
            pack = self._index.add_pack(name, signed.artifact_hash, found.st_size, found.st_mtime_ns, draft.chunks)
            if row is None:
                number = self._index.add_artifact(
                    signed.artifact_hash,
                    signed.envelope,
                    signed.manifest,
                    draft.entries,
                    draft.pages,
                    pinned=draft.pinned,
                    created_s=self._now(),
                )
                self._index.add_prefixes(number, signed.manifest.namespace, draft.keys)
            elif draft.pinned:
                self._index.set_pinned(signed.artifact_hash, pinned=True)
            self._index.refresh(self._index.users_of_pack(pack))
            if row is None:
                self._index.refresh([number])

    def _take_back(self, target: Path, marker: Path | None) -> None:
        """Undo a placement that failed. What cannot be undone now is settled when the store opens again."""
        for path in (target, marker):
            if path is None:
                continue
            try:
                self._files.unlink(path)
                self._files.sync_directory(path.parent)
            except FileNotFoundError:
                continue  # not even its folder was made
            except OSError as error:
                _log.warning("store: %s of a failed publish stays for now: %s", path.name, error.strerror)

    def _note_again(self, row: ArtifactRow, draft: PackDraft) -> None:
        """An artifact that was here already came again."""
        with self._index.transaction():
            self._index.add_prefixes(row.id, draft.signed.manifest.namespace, draft.keys)
            self._index.touch(row.hash, self._now())

    # --- keeping and letting go ---------------------------------------------------------------------------------------

    def touch(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._index.touch(artifact, self._now())

    def pin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require_row(artifact)
            with storage_errors("pinning"):
                marker = self._paths.pins / artifact_text(artifact)
                self._files.write_whole(marker, b"", self._space.temporary_path())
            self._index.set_pinned(artifact, pinned=True)

    def unpin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require_row(artifact)
            with storage_errors("unpinning"):
                self._files.unlink(self._paths.pins / artifact_text(artifact))
                self._files.sync_directory(self._paths.pins)
            self._index.set_pinned(artifact, pinned=False)

    def remove(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        with self._lock:
            self._space.drop(self._require_row(artifact))
            freed = self._space.collect()
            before = self._index.pack_bytes()
        self._compact()
        with self._lock:
            return freed + max(0, before - self._index.pack_bytes())

    def release(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._space.drop(self._require_row(artifact))
            self._space.collect()

    def collect_garbage(self, *, everything: bool = False) -> Collected:
        """See the interface."""
        with self._lock:
            self._require_open()
            before = self._space.held_bytes()
            unpinned = [artifact for artifact, _ in self._index.unpinned()] if everything else []
        removed = self._let_go(unpinned, also_fresh=True)
        with self._lock:
            self._space.collect()
            self._space.empty_quarantine()
            self._space.expire_partial(float("inf") if everything else self._now())
        self._compact()
        with self._lock:
            removed += self._space.make_room(0)
            return Collected(tuple(removed), max(0, before - self._space.held_bytes()))

    def tidy(self, *, unused_s: float) -> Collected:
        """See the interface. The lock is held for one artifact, or one pack, at a time."""
        with self._lock:
            self._require_open()
            before = self._space.held_bytes()
            expired = self._space.unused_since(self._now() - unused_s)
            self._space.expire_partial(self._now())
        removed = self._let_go(expired)
        self._compact()
        with self._lock:
            surplus = self._space.surplus(self._now())
        removed += self._let_go(surplus)
        with self._lock:
            return Collected(tuple(removed), max(0, before - self._space.held_bytes()))

    def _let_go(self, victims: Sequence[ArtifactHash], *, also_fresh: bool = False) -> list[ArtifactHash]:
        """Evict, one after the other; whoever wants the store meanwhile comes first."""
        removed = []
        for artifact in victims:
            self._lock.give_way()
            with self._lock:
                self._require_open()
                # It may have been pinned, used or removed since it was chosen.
                row = self._index.artifact(artifact)
                fresh = row is not None and self._now() - row.last_used_s <= FRESH_S
                if (also_fresh or not fresh) and self._space.evict(artifact):
                    self._space.collect()
                    removed.append(artifact)
        if removed:
            _log.info("store: %d artifacts let go", len(removed))
        return removed

    def take_evicted(self) -> list[ArtifactHash]:
        """See the interface."""
        taken: list[ArtifactHash] = []

        def take() -> None:
            taken.extend(self._space.evicted)
            self._space.evicted.clear()

        self._lock.while_away(take)
        return taken

    def usage(self) -> StoreUsage:
        """See the interface."""
        with self._lock:
            counts = self._index.counts()
            return StoreUsage(
                artifacts=counts.artifacts,
                pinned=counts.pinned,
                chunks=self._index.chunk_count(),
                held_bytes=self._space.held_bytes(),
                quota_bytes=self._space.quota_bytes,
                free_bytes=self._space.free_bytes(),
                min_free_bytes=self._space.min_free_bytes,
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
        with self._compacting, self._lock:
            self._require_open()
            self._index.start_anew()
            self._records.clear()
            with storage_errors("rebuilding the index"):
                self.problems = reconcile(self._files, self._paths, self._index, verify_chunks=verify_chunks)
                self._space.count_others()
                self._settle(keys_of)
            return Rebuilt(len(self._index.hashes()), self._index.chunk_count(), self.problems)

    # --- files --------------------------------------------------------------------------------------------------------

    def export(self, artifact: ArtifactHash, path: Path) -> int:
        """See the interface."""
        return export_artifact(self, self._files, require(self, artifact), path)

    def import_container(
        self, path: Path, *, judge: Judge, keys_of: KeysOf | None = None, pinned: bool = False
    ) -> ArtifactRecord:
        """See the interface."""
        return import_artifact(self, path, judge=judge, keys_of=keys_of, pinned=pinned)

    def _require_row(self, artifact: ArtifactHash) -> ArtifactRow:
        row = self._index.artifact(artifact)
        if row is None:
            raise not_held(artifact)
        return row

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("expected an open store, found one that was closed")
