"""What filling a pack is, wherever its bytes go: which chunk may be put, where it lies, and what is published."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvnet.errors import IntegrityError, MalformedError, NotInStoreError, StoreError
from kvnet.format.chunks import ChunkEntry, VerifiedChunk, encode_pages, pages_root
from kvnet.format.container import MAX_STORED_CHUNK_BYTES, ContainerLayout
from kvnet.format.hashes import BytesLike, ChunkHash, PrefixKey, blake3_hash, short_text
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import ArtifactRecord, PackWriter, Placed
from kvnet.store.reading import checked_keys
from kvnet.trust.envelope import SignedManifest, open_manifest


@dataclass(frozen=True, slots=True)
class PackDraft:
    """A pack that is as it was signed, ready for its place.

    Attributes:
        signed: its manifest.
        entries: the chunk list.
        pages: the same in pages.
        chunks: the chunks in this pack.
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


class PackFilling(PackWriter):
    """The part of a pack writer that does not depend on where bytes lie. For one user at a time.

    Args:
        n_chunks: chunks of the artifact.
    """

    def __init__(self, n_chunks: int) -> None:
        self._layout = ContainerLayout(n_chunks)
        self._placed: dict[int, PlacedChunk] = {}
        self._own: set[ChunkHash] = set()
        self._referenced: dict[int, ChunkEntry] = {}
        self._next_offset = self._layout.data_offset
        self._held: frozenset[int] = frozenset()

    @property
    def held(self) -> frozenset[int]:
        """See the interface."""
        return self._held

    @property
    def next_offset(self) -> int:
        """Where the next chunk goes."""
        return self._next_offset

    # --- where bytes lie ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _require_open(self) -> None:
        """Raises StoreError once the pack has ended."""

    @abstractmethod
    def _lease(self, chunk: ChunkHash) -> bool:
        """Keep a chunk of the store from being collected until this has ended; whether it is held."""

    @abstractmethod
    def _make_room(self, n_bytes: int) -> None:
        """Raises StoreFullError when so many bytes more do not fit."""

    @abstractmethod
    def _write(self, chunk: PlacedChunk, data: BytesLike) -> None:
        """Write a chunk's bytes at its place."""

    @abstractmethod
    def _read(self, chunk: PlacedChunk) -> bytes:
        """A chunk's bytes; fewer where the pack ends sooner."""

    @abstractmethod
    def _written_bytes(self) -> int:
        """How far another process may have written."""

    @abstractmethod
    def _place(self, draft: PackDraft) -> ArtifactRecord:
        """Make the artifact visible."""

    @abstractmethod
    def _end(self, *, published: ArtifactRecord | None, failure: BaseException | None) -> None:
        """Let go of everything; nothing when that was done before."""

    # --- chunks -------------------------------------------------------------------------------------------------------

    def read(self, index: int) -> bytes:
        """See the interface."""
        chunk = self._placed.get(index)
        if chunk is None:
            raise NotInStoreError(f"chunk {index} is not in this pack")
        return self._checked(index, chunk)

    def put(self, index: int, data: BytesLike, expected_hash: ChunkHash | None = None) -> ChunkHash:
        """See the interface."""
        self._require_new(index, len(data))
        digest = blake3_hash(data)
        if expected_hash is not None and digest != expected_hash:
            raise IntegrityError(f"chunk {index} does not match its hash")
        self._put(index, data, digest)
        return digest

    def put_verified(self, chunk: VerifiedChunk) -> None:
        """See the interface."""
        self._require_new(chunk.index, len(chunk.data))
        self._put(chunk.index, chunk.data, chunk.hash)

    def _put(self, index: int, data: BytesLike, digest: ChunkHash) -> None:
        if digest in self._own or self._lease(digest):
            self._referenced[index] = ChunkEntry(len(data), digest)
            return
        self._make_room(len(data))
        chunk = PlacedChunk(digest, self._next_offset, len(data))
        self._write(chunk, data)
        self._keep(index, chunk)

    def adopt(self, chunks: Iterable[Placed]) -> None:
        """See the interface."""
        self._require_open()
        adopted = sorted(chunks, key=lambda chunk: chunk.offset)
        size_bytes = self._written_bytes()
        for one in adopted:
            self._require_new(one.index, one.length_bytes)
            if one.offset < self._next_offset or one.offset + one.length_bytes > size_bytes:
                raise StoreError(
                    f"chunk {one.index}: expected a place from byte {self._next_offset} to {size_bytes} of the pack, "
                    f"found {one.offset}"
                )
            chunk = PlacedChunk(ChunkHash(one.hash), one.offset, one.length_bytes)
            self._checked(one.index, chunk)
            self._keep(one.index, chunk)
        # What is there now counts; whether more fits is a question of its own.
        self._make_room(0)

    def reference(self, index: int, entry: ChunkEntry) -> None:
        """See the interface."""
        self._require_new(index, entry.length_bytes)
        if entry.hash not in self._own and not self._lease(entry.hash):
            raise NotInStoreError(f"chunk {index} is not held here, so it cannot be referenced")
        self._referenced[index] = entry

    def _checked(self, index: int, chunk: PlacedChunk) -> bytes:
        data = self._read(chunk)
        if len(data) != chunk.length_bytes or blake3_hash(data) != chunk.hash:
            raise IntegrityError(f"chunk {index} of the pack does not match its hash")
        return data

    def _require_new(self, index: int, length_bytes: int) -> None:
        self._require_open()
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

    # --- the end ------------------------------------------------------------------------------------------------------

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
            record = self._place(draft)
        except BaseException as error:
            self._end(published=None, failure=error)
            raise
        self._end(published=record, failure=None)
        return record

    def abort(self) -> None:
        """See the interface."""
        self._end(published=None, failure=None)

    def _known(self) -> dict[int, ChunkEntry]:
        """Every chunk written or referenced, by index."""
        placed = {index: ChunkEntry(chunk.length_bytes, chunk.hash) for index, chunk in self._placed.items()}
        return placed | self._referenced


def may_be_gone_on_with(failure: BaseException | None) -> bool:
    """Whether what interrupted a fetch leaves something of use: a full or failing disk does, or the end of the node.

    Anything else says that what is there belongs to no such manifest.
    """
    return failure is None or isinstance(failure, StoreError)


def checked_list(
    signed: SignedManifest,
    n_chunks: int,
    known: Mapping[int, ChunkEntry],
    entries: Sequence[ChunkEntry] | None,
) -> tuple[ChunkEntry, ...]:
    """The whole chunk list of a pack: as it was signed, and as what is in the pack.

    Args:
        signed: the manifest.
        n_chunks: chunks the pack was begun for.
        known: chunks written and referenced, by index.
        entries: the list, needed when some are missing.

    Raises:
        MalformedError: not a manifest of these chunks.
        IntegrityError: the list is not the one that was signed, or the pack holds other chunks.
        NotInStoreError: chunks are missing and no list says what they are.
    """
    manifest = signed.manifest
    if manifest.n_chunks != n_chunks:
        raise MalformedError(f"manifest: expected {n_chunks} chunks as in the pack, found {manifest.n_chunks}")
    if entries is None:
        missing = n_chunks - len(known)
        if missing:
            raise NotInStoreError(
                f"{missing} of {n_chunks} chunks of {short_text(signed.artifact_hash)} were neither written nor "
                "referenced"
            )
        entries = [known[index] for index in range(n_chunks)]
    listed = tuple(entries)
    if len(listed) != n_chunks or pages_root(encode_pages(listed)) != manifest.root:
        raise IntegrityError("the chunk list does not match the root in the manifest")
    manifest.check_entries(listed)
    for index, entry in known.items():
        if listed[index] != entry:
            raise IntegrityError(f"chunk {index} of the pack is not the one in the chunk list")
    return listed
