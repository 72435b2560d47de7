"""A store in memory: the same contract without a disk; for tests, and for nodes that are to leave nothing behind.

Other processes read and write chunks through files, so :attr:`MemoryPackWriter.path` and :meth:`MemoryStore.locate_all`
make private temporary files, and only when they are asked.
"""

import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvnet.errors import IntegrityError, NotInStoreError, StoreError, StoreFullError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import (
    ArtifactHash,
    ChunkHash,
    FingerprintHash,
    NamespaceId,
    PrefixKey,
    blake3_hash,
    short_text,
)
from kvnet.store.basic import BasicStore
from kvnet.store.filling import PackDraft
from kvnet.store.interface import ArtifactRecord, ChunkLocation, Collected, KeysOf, PackWriter, StoreUsage
from kvnet.store.memory_holdings import Held, Holdings
from kvnet.store.memory_writer import MemoryPackWriter
from kvnet.store.osfile import OsFiles
from kvnet.store.reading import not_held, prefix_keys, resolve_text


class MemoryStore(BasicStore):
    """Artifacts in dictionaries.

    Args:
        quota_bytes: the most that chunks may take.
        now: seconds since 1970.
    """

    def __init__(self, *, quota_bytes: int = 1 << 40, now: Callable[[], float] = time.time) -> None:
        super().__init__(OsFiles())
        self._now = now
        self._lock = threading.RLock()
        self._all = Holdings(quota_bytes)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def close(self) -> None:
        """See the interface."""
        with self._lock:
            for writer in list(self._all.writers):
                writer.abort()
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None
            self._closed = True

    def folder(self) -> Path:
        """A private folder for files that other processes read or write."""
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="kvnet-")
            return Path(self._folder.name)

    # --- artifacts and chunks -----------------------------------------------------------------------------------------

    def artifacts(self) -> list[ArtifactRecord]:
        """See the interface."""
        with self._lock:
            return [self._record(held) for held in reversed(self._all.artifacts.values())]

    def get(self, artifact: ArtifactHash) -> ArtifactRecord | None:
        """See the interface."""
        with self._lock:
            held = self._all.artifacts.get(artifact)
            return None if held is None else self._record(held)

    def _record(self, held: Held) -> ArtifactRecord:
        present = [e.length_bytes for e in held.record.entries if not e.absent and e.hash in self._all.chunks]
        return dataclasses.replace(
            held.record,
            complete=held.chunks <= self._all.chunks.keys(),
            pinned=held.pinned,
            size_bytes=sum(present),
            last_used_s=held.last_used_s,
        )

    def resolve(self, text: str) -> ArtifactHash:
        """See the interface."""
        with self._lock:
            return resolve_text(text, self._all.artifacts)

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """See the interface."""
        with self._lock:
            return chunk in self._all.chunks

    def read_chunk(self, chunk: ChunkHash) -> bytes:
        """See the interface."""
        with self._lock:
            data = self._all.chunks.get(chunk)
            if data is None:
                raise NotInStoreError(f"the chunk {chunk.hex()[:16]} is not held here")
            if blake3_hash(data) != chunk:
                del self._all.chunks[chunk]
                raise IntegrityError(f"the chunk {chunk.hex()[:16]} does not match its hash any more and was dropped")
            return data

    def _locate(self, chunk: ChunkHash) -> ChunkLocation | None:
        with self._lock:
            data = self._all.chunks.get(chunk)
            if data is None:
                return None
            path = self.folder() / f"{chunk.hex()}.chunk"
            if not path.exists():
                handle = self._files.create(path)
                try:
                    self._files.write(handle, data, 0)
                finally:
                    self._files.close(handle)
            return ChunkLocation(path, 0, len(data), chunk)

    def locate_all(self, chunks: Sequence[ChunkHash]) -> list[ChunkLocation | None]:
        """See the interface."""
        return [self._locate(chunk) for chunk in chunks]

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def _readable(self, held: Held) -> bool:
        chunks = held.record.manifest.plan().token_chunks
        return all(held.record.entries[index].hash in self._all.chunks for index in chunks)

    def find_prefix(
        self, namespace: NamespaceId, keys_deepest_first: Sequence[PrefixKey]
    ) -> list[tuple[ArtifactHash, int]]:
        """See the interface."""
        wanted = set(keys_deepest_first)
        with self._lock:
            found = [
                (artifact, max((n for n, key in enumerate(held.keys, start=1) if key in wanted), default=0))
                for artifact, held in self._all.artifacts.items()
                if held.record.manifest.namespace == namespace and self._readable(held)
            ]
        return sorted(((a, n) for a, n in found if n), key=lambda item: (-item[1], item[0]))

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return [
                (key, artifact, n_blocks)
                for artifact, held in self._all.artifacts.items()
                if held.record.manifest.namespace == namespace and self._readable(held)
                for n_blocks, key in enumerate(held.keys, start=1)
            ]

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            found = [
                held
                for held in reversed(self._all.artifacts.values())
                if held.record.manifest.namespace == namespace
                and held.record.manifest.fingerprint.hash == fingerprint
                and self._readable(held)
            ]
        return [held.record.hash for held in sorted(found, key=lambda held: -held.last_used_s)]

    def count(self, namespace: NamespaceId) -> int:
        """See the interface."""
        with self._lock:
            return sum(held.record.manifest.namespace == namespace for held in self._all.artifacts.values())

    def index_prefixes(self, keys_of: KeysOf) -> int:
        """See the interface."""
        done = 0
        with self._lock:
            for held in self._all.artifacts.values():
                if held.keys or not self._readable(held):
                    continue
                held.keys = prefix_keys(self, held.record, keys_of)
                done += bool(held.keys)
        return done

    # --- packs --------------------------------------------------------------------------------------------------------

    def begin_pack(self, n_chunks: int, *, expected_bytes: int = 0) -> PackWriter:
        """See the interface."""
        with self._lock:
            if self._closed:
                raise StoreError("expected an open store, found one that was closed")
            self.make_room(expected_bytes)
            writer = MemoryPackWriter(self, n_chunks)
            self._all.writers[writer] = set()
            return writer

    def has_partial(self, artifact: ArtifactHash) -> bool:
        """See the interface."""
        with self._lock:
            return artifact in self._all.partials

    def resume_pack(
        self,
        artifact: ArtifactHash,
        entries: Sequence[ChunkEntry],
        *,
        expected_bytes: int = 0,
        read_soon: bool = True,  # noqa: ARG002 - there is no page cache here
    ) -> PackWriter:
        """See the interface."""
        with self._lock:
            if any(writer.artifact == artifact for writer in self._all.writers):
                return self.begin_pack(len(entries), expected_bytes=expected_bytes)
            if self._closed:
                raise StoreError("expected an open store, found one that was closed")
            writer = MemoryPackWriter(self, len(entries))
            writer.go_on(artifact, entries, self._all.partials.pop(artifact, {}))
            self._all.writers[writer] = set()
            try:
                self.make_room(max(0, expected_bytes - writer.size_bytes))
            except StoreFullError:
                writer.abort()
                raise
            return writer

    def suspend(self, artifact: ArtifactHash, chunks: dict[ChunkHash, bytes]) -> None:
        """Keep what an interrupted fetch of an artifact brought."""
        with self._lock:
            self._all.partials[artifact] = chunks

    def lease(self, writer: MemoryPackWriter, chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        with self._lock:
            if chunk not in self._all.chunks:
                return False
            self._all.writers[writer].add(chunk)
            return True

    def forget(self, writer: MemoryPackWriter) -> None:
        """The writer has ended: end its leases."""
        with self._lock:
            self._all.writers.pop(writer, None)

    def take(self, draft: PackDraft, chunks: dict[ChunkHash, bytes]) -> ArtifactRecord:
        """List an artifact, all of it or nothing."""
        artifact = draft.signed.artifact_hash
        with self._lock:
            missing = [
                e for e in draft.entries if not e.absent and e.hash not in chunks.keys() | self._all.chunks.keys()
            ]
            if missing and not draft.allow_partial:
                raise NotInStoreError(
                    f"{len(missing)} of {len(draft.entries)} chunks of {short_text(artifact)} are not held here"
                )
            self.make_room(sum(map(len, chunks.values())))
            self._all.chunks |= chunks
            held = self._all.artifacts.get(artifact)
            if held is None:
                held = self._all.artifacts[artifact] = self._listed(draft)
            else:
                held.keys = held.keys or draft.keys
                held.pinned |= draft.pinned
                held.last_used_s = self._now()
            return self._record(held)

    def _listed(self, draft: PackDraft) -> Held:
        now_s = self._now()
        record = ArtifactRecord(
            hash=draft.signed.artifact_hash,
            envelope=draft.signed.envelope,
            manifest=draft.signed.manifest,
            entries=draft.entries,
            pages=draft.pages,
            complete=False,
            pinned=draft.pinned,
            size_bytes=0,
            created_s=now_s,
            last_used_s=now_s,
        )
        return Held(record, draft.keys, draft.pinned, now_s)

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        with self._lock:
            victims = self._all.make_room(need_bytes)
            if victims:
                self._sweep()
            return victims

    def _evict(self, victims: Sequence[ArtifactHash]) -> None:
        self._all.evict(victims)
        self._sweep()

    def _sweep(self) -> int:
        """Drop chunks that nobody uses."""
        freed = 0
        for chunk in self._all.unused():
            freed += len(self._all.chunks.pop(chunk))
            if self._folder is not None:
                (Path(self._folder.name) / f"{chunk.hex()}.chunk").unlink(missing_ok=True)
        return freed

    def touch(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            if artifact in self._all.artifacts:
                self._all.artifacts[artifact].last_used_s = self._now()

    def pin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require(artifact).pinned = True

    def unpin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require(artifact).pinned = False

    def release(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        with self._lock:
            self._require(artifact)
            del self._all.artifacts[artifact]
            return self._sweep()

    def compact(self) -> int:
        """See the interface. Chunks lie here one by one."""
        return 0

    def collect_garbage(self, *, everything: bool = False) -> Collected:
        """See the interface."""
        with self._lock:
            before = self._all.held_bytes()
            removed = [a for a, held in self._all.artifacts.items() if everything and not held.pinned]
            if everything:
                self._all.partials.clear()
            self._evict(removed)
            removed += self.make_room(0)
            return Collected(tuple(removed), before - self._all.held_bytes())

    def tidy(self, *, unused_s: float) -> Collected:
        """See the interface."""
        with self._lock:
            before, now_s = self._all.held_bytes(), self._now()
            self._all.correct_uses(now_s)
            removed = self._all.expired(now_s - unused_s)
            self._evict(removed)
            victims = self._all.surplus(now_s)
            self._evict(victims)
            return Collected(tuple(removed + victims), before - self._all.held_bytes())

    def take_evicted(self) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            evicted, self._all.evicted = self._all.evicted, []
            return evicted

    def usage(self) -> StoreUsage:
        """See the interface."""
        with self._lock:
            return StoreUsage(
                artifacts=len(self._all.artifacts),
                pinned=sum(held.pinned for held in self._all.artifacts.values()),
                chunks=len(self._all.chunks),
                held_bytes=self._all.held_bytes(),
                quota_bytes=self._all.quota_bytes,
                free_bytes=max(0, self._all.quota_bytes - self._all.held_bytes()),
                min_free_bytes=0,
            )

    def _require(self, artifact: ArtifactHash) -> Held:
        held = self._all.artifacts.get(artifact)
        if held is None:
            raise not_held(artifact)
        return held
