"""What filling a pack offers: the contract that every implementation fulfils."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.format.hashes import BytesLike, ChunkHash, PrefixKey
from kvnet.store.values import ArtifactRecord


class Placed(Protocol):
    """A chunk that another process wrote into a pack."""

    @property
    def index(self) -> int:
        """Its place in the plan."""
        ...

    @property
    def offset(self) -> int:
        """Where it starts in the pack."""
        ...

    @property
    def length_bytes(self) -> int:
        """Its stored size."""
        ...

    @property
    def hash(self) -> ChunkHash:
        """What it must hash to."""
        ...


class PackWriter(Protocol):
    """A pack being filled. It is visible to nobody until :meth:`publish` returns."""

    @property
    def held(self) -> frozenset[int]:
        """Indices of the chunks that were in it when it was gone on with; each was read and hashed."""
        ...

    @property
    def path(self) -> Path:
        """The file, in which another process may write from :attr:`next_offset` on before :meth:`adopt`."""
        ...

    @property
    def next_offset(self) -> int:
        """Where the next chunk goes."""
        ...

    def read(self, index: int) -> bytes:
        """A chunk that is in the pack, hashed again as it was read.

        Raises:
            NotInStoreError: it is not in the pack itself.
            IntegrityError: what lies there is something else.
            StoreError: the disk failed.
        """
        ...

    def put(self, index: int, data: BytesLike, expected_hash: ChunkHash | None = None) -> ChunkHash:
        """Write one chunk's stored bytes; nothing is written when an equal chunk is held already.

        Raises:
            IntegrityError: not the hash that was expected.
            StoreFullError: it does not fit.
            StoreError: this chunk is there already, or the disk failed.
        """
        ...

    def put_verified(self, chunk: VerifiedChunk) -> None:
        """Write a chunk that was hashed and compared as it arrived; as :meth:`put`, without hashing it once more.

        Raises:
            StoreFullError: it does not fit.
            StoreError: this chunk is there already, or the disk failed.
        """
        ...

    def adopt(self, chunks: Iterable[Placed]) -> None:
        """Take in chunks that another process wrote into :attr:`path`; every one is read and hashed.

        Raises:
            IntegrityError: bytes that do not match.
            StoreError: places that overlap or lie outside the file, or the disk failed.
        """
        ...

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """Use a chunk that is held already; it cannot be collected while this pack is open.

        Raises:
            NotInStoreError: it is not held.
        """
        ...

    def publish(
        self,
        envelope: bytes,
        *,
        keys: Sequence[PrefixKey],
        pinned: bool,
        allow_partial: bool = False,
        entries: Sequence[ChunkEntry] | None = None,
    ) -> ArtifactRecord:
        """Make the artifact visible, all of it or nothing.

        Args:
            envelope: the signed manifest.
            keys: prefix keys, one per block; empty when they are not known here.
            pinned: keep it until it is unpinned.
            allow_partial: chunks may be missing.
            entries: the whole chunk list; needed only when chunks are missing.

        Raises:
            MalformedError: not a manifest of these chunks.
            TrustError: the signature is not the publisher's.
            IntegrityError: the chunk list or the keys are not those that were signed.
            NotInStoreError: chunks are missing.
            StoreFullError: it does not fit.
            StoreError: the disk failed.
        """
        ...

    def abort(self) -> None:
        """Leave nothing behind; also after a failed :meth:`publish`, and after a successful one it does nothing.

        What :meth:`Store.resume_pack` gave stays, to be gone on with.
        """
        ...
