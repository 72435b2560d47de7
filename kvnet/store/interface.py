"""What a store offers: the contract that every implementation fulfils.

A store is synchronous and safe to call from several threads. Shells call it through a lane.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash, FingerprintHash, NamespaceId, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.store.pack_writer import PackWriter, Placed
from kvnet.store.values import (
    ArtifactRecord,
    ChunkLocation,
    Collected,
    Problem,
    Rebuilt,
    SignedBeginning,
    StoreUsage,
    Verified,
)

__all__ = [
    "ArtifactRecord",
    "ChunkLocation",
    "Collected",
    "Judge",
    "KeysOf",
    "PackWriter",
    "Placed",
    "Problem",
    "Rebuilt",
    "SignedBeginning",
    "Store",
    "StoreUsage",
    "Verified",
]

KeysOf = Callable[[Manifest, list[int]], Sequence[PrefixKey]]
"""The prefix keys of an artifact's token ids, one per block; empty when its namespace's secret is not known here.

A store has no secrets, so whoever has them computes the keys."""

Judge = Callable[[Manifest], None]
"""Raises TrustError for a manifest that the policy in force does not accept."""


class Store(Protocol):
    """Artifacts and their chunks."""

    def artifacts(self) -> list[ArtifactRecord]:
        """All artifacts, the newest first."""
        ...

    def get(self, artifact: ArtifactHash) -> ArtifactRecord | None:
        """One artifact."""
        ...

    def resolve(self, text: str) -> ArtifactHash:
        """The artifact that a full or short hash means.

        Raises:
            UsageError: not the text of a hash.
            NotInStoreError: no artifact here has it.
            AmbiguousHashError: several have it.
        """
        ...

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """Whether a chunk is held."""
        ...

    def locate_all(self, chunks: Sequence[ChunkHash]) -> list[ChunkLocation | None]:
        """Where chunks lie; ``None`` for each that is not held."""
        ...

    def read_chunk(self, chunk: ChunkHash) -> bytes:
        """A chunk's stored bytes, hashed again as they were read.

        Raises:
            NotInStoreError: it is not held.
            IntegrityError: what lies there is something else; it is not held any more.
            StoreError: the disk failed.
        """
        ...

    def tokens_of(self, artifact: ArtifactHash) -> list[int]:
        """An artifact's token ids.

        Raises:
            NotInStoreError: the artifact, or a chunk of its token ids, is not held.
            IntegrityError: a chunk does not match its hash.
        """
        ...

    def context_of(self, artifact: ArtifactHash) -> bytes | None:
        """An artifact's messages and template inputs; ``None`` when it carries none.

        Raises:
            NotInStoreError: the artifact, or a chunk of its context, is not held.
            IntegrityError: a chunk does not match its hash.
        """
        ...

    def begin_pack(self, n_chunks: int, *, expected_bytes: int = 0) -> PackWriter:
        """Start filling a pack.

        Args:
            n_chunks: chunks of the artifact, absent and referenced ones included.
            expected_bytes: room to make and reserve, when it is known.

        Raises:
            StoreFullError: there is no room.
            StoreError: the disk failed.
        """
        ...

    def note_beginning(self, writer: PackWriter, beginning: SignedBeginning) -> None:
        """Note what of a pack being filled is an artifact of its own, should this process be killed.

        The next opening publishes it, after each of its chunks was read and hashed. A later note takes the place of
        this one, and the end of the writer takes it back. A store that ends with its process notes nothing.

        Args:
            writer: of this store, not ended; it was made by :meth:`begin_pack`.
            beginning: the artifact.

        Raises:
            StoreError: the writer has ended, or the disk failed.
        """
        ...

    def has_partial(self, artifact: ArtifactHash) -> bool:
        """Whether a fetch of an artifact was interrupted and can be gone on with."""
        ...

    def resume_pack(
        self,
        artifact: ArtifactHash,
        entries: Sequence[ChunkEntry],
        *,
        expected_bytes: int = 0,
        read_soon: bool = True,
    ) -> PackWriter:
        """Go on filling the pack of an artifact, or start it; it outlives this process.

        What was written before is read and hashed; what matches is in the writer's ``held``. When a pack of the same
        artifact is being filled already, this one is an ordinary one.

        Args:
            artifact: its hash.
            entries: its whole chunk list, verified.
            expected_bytes: what is to be written in all; room is made for it, less what is held.
            read_soon: whether somebody waits to read what is written. When nobody does, it need not take memory of
                the system's page cache.

        Raises:
            StoreFullError: there is no room; what was written before stays.
            StoreError: the disk failed.
        """
        ...

    def find_prefix(
        self, namespace: NamespaceId, keys_deepest_first: Sequence[PrefixKey]
    ) -> list[tuple[ArtifactHash, int]]:
        """Artifacts that have one of the keys, each with its deepest, in blocks; the deepest first."""
        ...

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """Every prefix key of a namespace with its artifact and its depth in blocks."""
        ...

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """Artifacts of one model in one namespace whose token ids are held, the last used first."""
        ...

    def count(self, namespace: NamespaceId) -> int:
        """How many artifacts belong to a namespace."""
        ...

    def touch(self, artifact: ArtifactHash) -> None:
        """Note that an artifact was used; nothing when it is not held."""
        ...

    def pin(self, artifact: ArtifactHash) -> None:
        """Keep an artifact until it is unpinned.

        Raises:
            NotInStoreError: it is not held.
        """
        ...

    def unpin(self, artifact: ArtifactHash) -> None:
        """Let an artifact be evicted when room is needed.

        Raises:
            NotInStoreError: it is not held.
        """
        ...

    def remove(self, artifact: ArtifactHash) -> int:
        """Remove an artifact, pinned or not; chunks that others use stay. Returns the bytes freed.

        This is :meth:`release`, and then :meth:`compact`, which may take long.

        Raises:
            NotInStoreError: it is not held.
        """
        ...

    def release(self, artifact: ArtifactHash) -> int:
        """Let go of an artifact, pinned or not; returns the bytes freed at once.

        What nothing uses goes at once. A pack that others use in part stays as it is until :meth:`compact`, or until
        room is needed or garbage is collected. Where another artifact held here wholly contains this one, that is soon
        enough: its text is held in any case, and writing it anew after every turn of a conversation would write
        everything twice.

        Raises:
            NotInStoreError: it is not held.
        """
        ...

    def compact(self) -> int:
        """Write packs anew that are used in part, so that nothing of a removed text stays; returns the bytes freed.

        For where nobody waits: it reads and writes what is still used of them, while all else goes on.
        """
        ...

    def collect_garbage(self, *, everything: bool = False) -> Collected:
        """Free what no artifact uses, and evict until quota and free space are kept.

        Args:
            everything: evict all that is not pinned.
        """
        ...

    def tidy(self, *, unused_s: float) -> Collected:
        """What is done now and then while nobody waits: adds go on meanwhile.

        Artifacts that are not pinned and were not used for ``unused_s`` seconds go, packs used in part are written
        anew, and when the quota is nearly reached, the least recently used go until there is some room again.
        """
        ...

    def take_evicted(self) -> list[ArtifactHash]:
        """The artifacts evicted since this was last asked: whoever offers them to peers has to stop."""
        ...

    def usage(self) -> StoreUsage:
        """How full it is."""
        ...

    def verify(self, artifact: ArtifactHash) -> Verified:
        """Read and hash every chunk of an artifact.

        Raises:
            NotInStoreError: the artifact is not held.
        """
        ...

    def index_prefixes(self, keys_of: KeysOf) -> int:
        """Compute the prefix rows of artifacts that have none; returns for how many.

        They have none when their namespace was not known here as they came in.
        """
        ...

    def export(self, artifact: ArtifactHash, path: Path) -> int:
        """Write an artifact into a new ``.kva`` file, 0600; returns its size in bytes.

        Raises:
            NotInStoreError: the artifact or some of its chunks are not held.
            StoreError: the file exists, or cannot be written.
        """
        ...

    def import_container(
        self, path: Path, *, judge: Judge, keys_of: KeysOf | None = None, pinned: bool = False
    ) -> ArtifactRecord:
        """Take in a ``.kva`` file, verified as it is read.

        Args:
            path: the file.
            judge: asked before anything is kept.
            keys_of: computes its prefix keys.
            pinned: keep it until it is unpinned.

        Raises:
            MalformedError: not such a file.
            TrustError: the signature does not hold, or ``judge`` refuses.
            IntegrityError: bytes that do not match their hash.
            StoreFullError: it does not fit.
        """
        ...

    def close(self) -> None:
        """Let go of everything; packs still open are aborted."""
        ...
