"""A store in memory: the same contract without a disk; for tests, and for nodes that are to leave nothing behind.

Other processes read and write chunks through files, so :attr:`MemoryPackWriter.path` and :meth:`MemoryStore.locate`
make private temporary files, and only when they are asked.
"""

import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvnet.errors import IntegrityError, KvnetError, MalformedError, NotInStoreError, StoreError, StoreFullError
from kvnet.format.chunks import ChunkEntry, VerifiedChunk, encode_pages
from kvnet.format.container import MAX_STORED_CHUNK_BYTES, ContainerLayout
from kvnet.format.hashes import (
    ArtifactHash,
    BytesLike,
    ChunkHash,
    FingerprintHash,
    NamespaceId,
    PrefixKey,
    blake3_hash,
    short_text,
)
from kvnet.store.eviction import FRESH_S, HIGH_SHARE, LOW_SHARE, Candidate, choose_victims
from kvnet.store.interface import (
    ArtifactRecord,
    ChunkLocation,
    Collected,
    Judge,
    KeysOf,
    PackWriter,
    Placed,
    Store,
    StoreUsage,
    Verified,
)
from kvnet.store.osfile import OsFiles
from kvnet.store.reading import (
    checked_keys,
    checked_list,
    export_artifact,
    import_artifact,
    not_held,
    read_context,
    read_tokens,
    require,
    resolve_text,
    verify_artifact,
)
from kvnet.trust.envelope import SignedManifest, open_manifest


@dataclass
class _Held:
    """An artifact; ``record`` says what never changes about it."""

    record: ArtifactRecord
    keys: tuple[PrefixKey, ...]
    pinned: bool
    last_used_s: float
    chunks: frozenset[ChunkHash] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = frozenset(entry.hash for entry in self.record.entries if not entry.absent)


class MemoryStore(Store):
    """Artifacts in dictionaries.

    Args:
        quota_bytes: the most that chunks may take.
        now: seconds since 1970.
    """

    def __init__(self, *, quota_bytes: int = 1 << 40, now: Callable[[], float] = time.time) -> None:
        self._quota_bytes = quota_bytes
        self._now = now
        self._lock = threading.RLock()
        self._chunks: dict[ChunkHash, bytes] = {}
        self._artifacts: dict[ArtifactHash, _Held] = {}
        self._writers: dict[MemoryPackWriter, set[ChunkHash]] = {}
        self._evicted: list[ArtifactHash] = []
        self._partials: dict[ArtifactHash, dict[ChunkHash, bytes]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def close(self) -> None:
        """See the interface."""
        with self._lock:
            for writer in list(self._writers):
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
            return [self._record(held) for held in reversed(self._artifacts.values())]

    def get(self, artifact: ArtifactHash) -> ArtifactRecord | None:
        """See the interface."""
        with self._lock:
            held = self._artifacts.get(artifact)
            return None if held is None else self._record(held)

    def _record(self, held: _Held) -> ArtifactRecord:
        present = [e.length_bytes for e in held.record.entries if not e.absent and e.hash in self._chunks]
        return dataclasses.replace(
            held.record,
            complete=held.chunks <= self._chunks.keys(),
            pinned=held.pinned,
            size_bytes=sum(present),
            last_used_s=held.last_used_s,
        )

    def resolve(self, text: str) -> ArtifactHash:
        """See the interface."""
        with self._lock:
            return resolve_text(text, self._artifacts)

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """See the interface."""
        with self._lock:
            return chunk in self._chunks

    def read_chunk(self, chunk: ChunkHash) -> bytes:
        """See the interface."""
        with self._lock:
            data = self._chunks.get(chunk)
            if data is None:
                raise NotInStoreError(f"the chunk {chunk.hex()[:16]} is not held here")
            if blake3_hash(data) != chunk:
                del self._chunks[chunk]
                raise IntegrityError(f"the chunk {chunk.hex()[:16]} does not match its hash any more and was dropped")
            return data

    def locate(self, chunk: ChunkHash) -> ChunkLocation | None:
        """See the interface."""
        with self._lock:
            data = self._chunks.get(chunk)
            if data is None:
                return None
            path = self.folder() / f"{chunk.hex()}.chunk"
            if not path.exists():
                files = OsFiles()
                handle = files.create(path)
                try:
                    files.write(handle, data, 0)
                finally:
                    files.close(handle)
            return ChunkLocation(path, 0, len(data), chunk)

    def locate_all(self, chunks: Sequence[ChunkHash]) -> list[ChunkLocation | None]:
        """See the interface."""
        return [self.locate(chunk) for chunk in chunks]

    def tokens_of(self, artifact: ArtifactHash) -> list[int]:
        """See the interface."""
        return read_tokens(self, require(self, artifact))

    def context_of(self, artifact: ArtifactHash) -> bytes | None:
        """See the interface."""
        return read_context(self, require(self, artifact))

    def verify(self, artifact: ArtifactHash) -> Verified:
        """See the interface."""
        return verify_artifact(self, require(self, artifact))

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def _readable(self, held: _Held) -> bool:
        chunks = held.record.manifest.plan().token_chunks
        return all(held.record.entries[index].hash in self._chunks for index in chunks)

    def find_prefix(
        self, namespace: NamespaceId, keys_deepest_first: Sequence[PrefixKey]
    ) -> list[tuple[ArtifactHash, int]]:
        """See the interface."""
        wanted = set(keys_deepest_first)
        with self._lock:
            found = [
                (artifact, max((n for n, key in enumerate(held.keys, start=1) if key in wanted), default=0))
                for artifact, held in self._artifacts.items()
                if held.record.manifest.namespace == namespace and self._readable(held)
            ]
        return sorted(((a, n) for a, n in found if n), key=lambda item: (-item[1], item[0]))

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """See the interface."""
        with self._lock:
            return [
                (key, artifact, n_blocks)
                for artifact, held in self._artifacts.items()
                if held.record.manifest.namespace == namespace and self._readable(held)
                for n_blocks, key in enumerate(held.keys, start=1)
            ]

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            found = [
                held
                for held in reversed(self._artifacts.values())
                if held.record.manifest.namespace == namespace
                and held.record.manifest.fingerprint.hash == fingerprint
                and self._readable(held)
            ]
        return [held.record.hash for held in sorted(found, key=lambda held: -held.last_used_s)]

    def count(self, namespace: NamespaceId) -> int:
        """See the interface."""
        with self._lock:
            return sum(held.record.manifest.namespace == namespace for held in self._artifacts.values())

    def index_prefixes(self, keys_of: KeysOf) -> int:
        """See the interface."""
        done = 0
        with self._lock:
            for held in self._artifacts.values():
                if held.keys or not self._readable(held):
                    continue
                manifest = held.record.manifest
                try:
                    held.keys = checked_keys(manifest, keys_of(manifest, read_tokens(self, held.record)))
                except KvnetError:
                    continue
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
            self._writers[writer] = set()
            return writer

    def has_partial(self, artifact: ArtifactHash) -> bool:
        """See the interface."""
        with self._lock:
            return artifact in self._partials

    def resume_pack(
        self, artifact: ArtifactHash, entries: Sequence[ChunkEntry], *, expected_bytes: int = 0
    ) -> PackWriter:
        """See the interface."""
        with self._lock:
            if any(writer.artifact == artifact for writer in self._writers):
                return self.begin_pack(len(entries), expected_bytes=expected_bytes)
            if self._closed:
                raise StoreError("expected an open store, found one that was closed")
            writer = MemoryPackWriter(self, len(entries))
            writer.go_on(artifact, entries, self._partials.pop(artifact, {}))
            self._writers[writer] = set()
            try:
                self.make_room(max(0, expected_bytes - writer.size_bytes))
            except StoreFullError:
                writer.abort()
                raise
            return writer

    def suspend(self, artifact: ArtifactHash, chunks: dict[ChunkHash, bytes]) -> None:
        """Keep what an interrupted fetch of an artifact brought."""
        with self._lock:
            self._partials[artifact] = chunks

    def lease(self, writer: "MemoryPackWriter", chunk: ChunkHash) -> bool:
        """Keep a chunk from being collected until the writer has ended; whether it is held."""
        with self._lock:
            if chunk not in self._chunks:
                return False
            self._writers[writer].add(chunk)
            return True

    def forget(self, writer: "MemoryPackWriter") -> None:
        """The writer has ended: end its leases."""
        with self._lock:
            self._writers.pop(writer, None)

    def take(
        self,
        signed: SignedManifest,
        entries: tuple[ChunkEntry, ...],
        chunks: dict[ChunkHash, bytes],
        keys: tuple[PrefixKey, ...],
        *,
        pinned: bool,
        allow_partial: bool,
    ) -> ArtifactRecord:
        """List an artifact, all of it or nothing."""
        artifact = signed.artifact_hash
        with self._lock:
            missing = [e for e in entries if not e.absent and e.hash not in chunks and e.hash not in self._chunks]
            if missing and not allow_partial:
                raise NotInStoreError(f"{len(missing)} of {len(entries)} chunks of {short_text(artifact)} are not held")
            self.make_room(sum(map(len, chunks.values())))
            self._chunks |= chunks
            held = self._artifacts.get(artifact)
            if held is None:
                now_s = self._now()
                pages = tuple(encode_pages(entries))
                record = ArtifactRecord(
                    hash=artifact,
                    envelope=signed.envelope,
                    manifest=signed.manifest,
                    entries=entries,
                    pages=pages,
                    complete=False,
                    pinned=pinned,
                    size_bytes=0,
                    created_s=now_s,
                    last_used_s=now_s,
                )
                held = self._artifacts[artifact] = _Held(record, keys, pinned, now_s)
            else:
                held.keys = held.keys or keys
                held.pinned |= pinned
                held.last_used_s = self._now()
            return self._record(held)

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Evict until so many more bytes fit.

        Raises:
            StoreFullError: they cannot.
        """
        with self._lock:
            lack = self._held_bytes() + need_bytes - self._quota_bytes
            # What interrupted fetches left goes before anything that is of use, and for nothing that cannot fit.
            if lack <= 0:
                return []
            partial_bytes = self._partial_bytes()
            victims = self._choose(lack - partial_bytes) if lack > partial_bytes else []
            if victims is None:
                raise StoreFullError(
                    f"expected room for {need_bytes:,} more bytes; the store holds {self._held_bytes():,} of its "
                    f"quota of {self._quota_bytes:,} bytes",
                    hint="Remove or unpin something.",
                )
            while lack > 0 and self._partials:
                lack -= sum(map(len, self._partials.pop(next(iter(self._partials))).values()))
            for artifact in victims:
                del self._artifacts[artifact]
            self._evicted += victims
            self._sweep()
            return victims

    def _choose(self, lack_bytes: int) -> list[ArtifactHash] | None:
        """Artifacts to evict; none when nothing lacks, ``None`` when all together are too few."""
        numbers = {chunk: number for number, chunk in enumerate(self._chunks)}
        leased = {chunk for chunks in self._writers.values() for chunk in chunks}
        users: dict[int, set[ArtifactHash]] = {n: set() for c, n in numbers.items() if c not in leased}
        for artifact, held in self._artifacts.items():
            for chunk in held.chunks & numbers.keys() - leased:
                users[numbers[chunk]].add(artifact)
        return choose_victims(
            [Candidate(a, held.last_used_s) for a, held in self._artifacts.items() if not held.pinned],
            {number: frozenset(artifacts) for number, artifacts in users.items()},
            {number: len(self._chunks[chunk]) for chunk, number in numbers.items()},
            lack_bytes,
        )

    def _partial_bytes(self) -> int:
        return sum(len(data) for chunks in self._partials.values() for data in chunks.values())

    def _held_bytes(self) -> int:
        open_bytes = sum(writer.size_bytes for writer in self._writers)
        return open_bytes + self._partial_bytes() + sum(map(len, self._chunks.values()))

    def _sweep(self) -> int:
        """Drop chunks that nobody uses."""
        used = {chunk for held in self._artifacts.values() for chunk in held.chunks}
        used |= {chunk for chunks in self._writers.values() for chunk in chunks}
        freed = 0
        for chunk in self._chunks.keys() - used:
            freed += len(self._chunks.pop(chunk))
            if self._folder is not None:
                (Path(self._folder.name) / f"{chunk.hex()}.chunk").unlink(missing_ok=True)
        return freed

    def touch(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            if artifact in self._artifacts:
                self._artifacts[artifact].last_used_s = self._now()

    def pin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require(artifact).pinned = True

    def unpin(self, artifact: ArtifactHash) -> None:
        """See the interface."""
        with self._lock:
            self._require(artifact).pinned = False

    def remove(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        with self._lock:
            self._require(artifact)
            del self._artifacts[artifact]
            return self._sweep()

    def release(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        return self.remove(artifact)

    def compact(self) -> int:
        """See the interface. Chunks lie here one by one."""
        return 0

    def collect_garbage(self, *, everything: bool = False) -> Collected:
        """See the interface."""
        with self._lock:
            before = self._held_bytes()
            removed = [a for a, held in self._artifacts.items() if everything and not held.pinned]
            for artifact in removed:
                del self._artifacts[artifact]
            self._evicted += removed
            if everything:
                self._partials.clear()
            self._sweep()
            removed += self.make_room(0)
            return Collected(tuple(removed), before - self._held_bytes())

    def tidy(self, *, unused_s: float) -> Collected:
        """See the interface."""
        with self._lock:
            before, now_s = self._held_bytes(), self._now()
            removed = [
                artifact
                for artifact, held in self._artifacts.items()
                if not held.pinned and now_s - held.last_used_s > unused_s
            ]
            for artifact in removed:
                del self._artifacts[artifact]
            self._sweep()
            if self._held_bytes() > HIGH_SHARE * self._quota_bytes:
                victims = self._choose(int(self._held_bytes() - LOW_SHARE * self._quota_bytes) + 1) or []
                victims = [one for one in victims if now_s - self._artifacts[one].last_used_s > FRESH_S]
                for artifact in victims:
                    del self._artifacts[artifact]
                self._sweep()
                removed += victims
            self._evicted += removed
            return Collected(tuple(removed), before - self._held_bytes())

    def take_evicted(self) -> list[ArtifactHash]:
        """See the interface."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def usage(self) -> StoreUsage:
        """See the interface."""
        with self._lock:
            return StoreUsage(
                artifacts=len(self._artifacts),
                pinned=sum(held.pinned for held in self._artifacts.values()),
                chunks=len(self._chunks),
                held_bytes=self._held_bytes(),
                quota_bytes=self._quota_bytes,
                free_bytes=max(0, self._quota_bytes - self._held_bytes()),
                min_free_bytes=0,
            )

    # --- files --------------------------------------------------------------------------------------------------------

    def export(self, artifact: ArtifactHash, path: Path) -> int:
        """See the interface."""
        return export_artifact(self, OsFiles(), require(self, artifact), path)

    def import_container(
        self, path: Path, *, judge: Judge, keys_of: KeysOf | None = None, pinned: bool = False
    ) -> ArtifactRecord:
        """See the interface."""
        return import_artifact(self, path, judge=judge, keys_of=keys_of, pinned=pinned)

    def _require(self, artifact: ArtifactHash) -> _Held:
        held = self._artifacts.get(artifact)
        if held is None:
            raise not_held(artifact)
        return held


class MemoryPackWriter(PackWriter):
    """See :class:`kvnet.store.interface.PackWriter`."""

    def __init__(self, store: MemoryStore, n_chunks: int) -> None:
        self._store = store
        self._layout = ContainerLayout(n_chunks)
        self._entries: dict[int, ChunkEntry] = {}
        self._chunks: dict[ChunkHash, bytes] = {}
        self._next_offset = self._layout.data_offset
        self._path: Path | None = None
        self._ended = False
        self.artifact: ArtifactHash | None = None
        self._held: frozenset[int] = frozenset()

    def go_on(self, artifact: ArtifactHash, entries: Sequence[ChunkEntry], chunks: dict[ChunkHash, bytes]) -> None:
        """Outlive an abort; begin with what an earlier fetch of the artifact brought."""
        self.artifact = artifact
        known = {index: entry for index, entry in enumerate(entries) if entry.hash in chunks}
        self._entries |= known
        self._chunks = chunks
        self._next_offset += self.size_bytes
        self._held = frozenset(known)

    @property
    def held(self) -> frozenset[int]:
        """See the interface."""
        return self._held

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
    def next_offset(self) -> int:
        """Where the next chunk goes."""
        return self._next_offset

    @property
    def size_bytes(self) -> int:
        """What it takes now."""
        return sum(map(len, self._chunks.values()))

    def read(self, index: int) -> bytes:
        """See the interface."""
        entry = self._entries.get(index)
        if entry is None or entry.hash not in self._chunks:
            raise NotInStoreError(f"chunk {index} is not in this pack")
        return self._chunks[entry.hash]

    def put(self, index: int, data: BytesLike, expected_hash: ChunkHash | None = None) -> ChunkHash:
        """See the interface."""
        self._require_new(index, len(data))
        digest = blake3_hash(data)
        if expected_hash is not None and digest != expected_hash:
            raise IntegrityError(f"chunk {index} does not match its hash")
        self._keep(index, data, digest)
        return digest

    def put_verified(self, chunk: VerifiedChunk) -> None:
        """See the interface."""
        self._require_new(chunk.index, len(chunk.data))
        self._keep(chunk.index, chunk.data, chunk.hash)

    def _keep(self, index: int, data: BytesLike, digest: ChunkHash) -> None:
        if digest not in self._chunks and not self._store.lease(self, digest):
            self._store.make_room(len(data))
            self._chunks[digest] = bytes(data)
            self._next_offset += len(data)
        self._entries[index] = ChunkEntry(len(data), digest)

    def adopt(self, chunks: Iterable[Placed]) -> None:
        """See the interface."""
        self._require_open()
        written = memoryview(self.path.read_bytes())
        for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
            self._require_new(chunk.index, chunk.length_bytes)
            end = chunk.offset + chunk.length_bytes
            if chunk.offset < self._next_offset or end > len(written):
                raise StoreError(
                    f"chunk {chunk.index}: expected a place from byte {self._next_offset} to {len(written)}"
                )
            data = bytes(written[chunk.offset : end])
            if blake3_hash(data) != chunk.hash:
                raise IntegrityError(f"chunk {chunk.index} of the pack does not match its hash")
            self._chunks[chunk.hash] = data
            self._entries[chunk.index] = ChunkEntry(len(data), chunk.hash)
            self._next_offset = end
        self._store.make_room(0)

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """See the interface."""
        self._require_new(index, entry.length_bytes)
        if entry.hash not in self._chunks and not self._store.lease(self, entry.hash):
            raise NotInStoreError(f"chunk {index} is not held here, so it cannot be referenced")
        self._entries[index] = entry

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
        self._require_open()
        try:
            signed = open_manifest(envelope)
            listed = checked_list(signed, self._layout.n_chunks, self._entries, entries)
            good_keys = checked_keys(signed.manifest, keys)
            chunks, self._chunks = self._chunks, {}
            try:
                record = self._store.take(signed, listed, chunks, good_keys, pinned=pinned, allow_partial=allow_partial)
            except StoreError:
                self._chunks = chunks
                raise
            self.artifact = None
            return record
        except StoreError:
            raise
        except KvnetError:
            # No such manifest describes what is here.
            self.artifact = None
            raise
        finally:
            self.abort()

    def abort(self) -> None:
        """See the interface."""
        self._ended = True
        if self.artifact is not None and self._chunks:
            self._store.suspend(self.artifact, self._chunks)
        self._chunks, self.artifact = {}, None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._store.forget(self)

    def _require_new(self, index: int, length_bytes: int) -> None:
        self._require_open()
        if not 0 <= index < self._layout.n_chunks:
            raise StoreError(f"chunk: expected an index below {self._layout.n_chunks}, found {index}")
        if index in self._entries:
            raise StoreError(f"chunk {index} is in the pack already")
        if not 0 < length_bytes <= MAX_STORED_CHUNK_BYTES:
            raise MalformedError(f"chunk {index}: expected 1 to {MAX_STORED_CHUNK_BYTES} bytes, found {length_bytes}")

    def _require_open(self) -> None:
        if self._ended:
            raise StoreError("expected a pack that is being filled, found one that has ended")
