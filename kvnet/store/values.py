"""What a store hands out: records of artifacts, places of chunks, and what its longer operations found or did."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash
from kvnet.format.manifest import Manifest
from kvnet.protocol.escaping import escape_text


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """An artifact as it is stored.

    Attributes:
        hash: its artifact hash.
        envelope: the signed manifest, as received.
        manifest: its value; the signature has been checked.
        entries: the chunk list.
        pages: the same in pages, as they travel.
        complete: every chunk that its publisher did not leave out is held.
        pinned: kept until it is unpinned; otherwise it may be evicted.
        size_bytes: bytes of its chunks that are held, shared ones included.
        created_s: seconds since 1970 when it came into this store.
        last_used_s: seconds since 1970 when it was last used.
    """

    hash: ArtifactHash
    envelope: bytes
    manifest: Manifest
    entries: tuple[ChunkEntry, ...]
    pages: tuple[bytes, ...]
    complete: bool
    pinned: bool
    size_bytes: int
    created_s: float
    last_used_s: float


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where a chunk's stored bytes lie: ``length_bytes`` at ``offset`` of ``path``.

    The bytes are not checked when this is made: whoever reads them hashes what was read.
    """

    path: Path
    offset: int
    length_bytes: int
    hash: ChunkHash


@dataclass(frozen=True, slots=True)
class SignedBeginning:
    """An artifact of the beginning of a text, whose tiles lie in a pack that is still being filled for all of it.

    Attributes:
        envelope: its signed manifest.
        entries: its whole chunk list.
        chunks: stored bytes of chunks that lie nowhere yet, by index: its token ids.
        offsets: where others lie in that pack, by index; what is in neither of the two is held by the store.
        replaces: an artifact that nobody misses once this one is there, unless it is pinned by then.
    """

    envelope: bytes
    entries: tuple[ChunkEntry, ...]
    chunks: Mapping[int, bytes]
    offsets: Mapping[int, int]
    replaces: ArtifactHash | None = None


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full a store is.

    Attributes:
        artifacts: how many artifacts it lists.
        pinned: how many of them are pinned.
        chunks: distinct chunks held.
        held_bytes: everything on disk: packs, packs being written, the index, what was set aside.
        quota_bytes: the most that may be.
        free_bytes: free on the disk.
        min_free_bytes: what must stay free.
    """

    artifacts: int
    pinned: int
    chunks: int
    held_bytes: int
    quota_bytes: int
    free_bytes: int
    min_free_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the store's folders that is not used, and why.

    Attributes:
        path: where it is, or was before it was set aside.
        reason: in words.
    """

    path: Path
    reason: str

    @property
    def name(self) -> str:
        """Its file name, safe to show and to write: what is no text in it, and no letter, is escaped."""
        return escape_text(self.path.name)


@dataclass(frozen=True, slots=True)
class Verified:
    """What re-hashing an artifact found.

    Attributes:
        chunks: chunks that match.
        size_bytes: their bytes.
        bad: indices of chunks that did not match; they are not served any more.
        missing: indices of chunks that were not held.
    """

    chunks: int
    size_bytes: int
    bad: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What garbage collection removed.

    Attributes:
        removed: artifacts that were evicted.
        freed_bytes: how much less the store holds.
    """

    removed: tuple[ArtifactHash, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuilt index holds.

    Attributes:
        artifacts: artifacts listed.
        chunks: distinct chunks.
        problems: what was not taken in, and why.
    """

    artifacts: int
    chunks: int
    problems: tuple[Problem, ...]
