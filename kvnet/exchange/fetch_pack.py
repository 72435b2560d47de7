"""The pack that a fetch fills: what is wanted, what is held, and what has arrived.

It begins with the first chunk that has arrived and been verified, so that a peer that only promises costs nobody here
an artifact: until then nothing is evicted to make room. Where an earlier fetch was interrupted, it goes on with that.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvnet.exchange.events import FetchProgress, PeerPart
from kvnet.exchange.lane import Lane
from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.prefix import tokens_from_bytes
from kvnet.protocol.ids import PeerId
from kvnet.store.interface import ArtifactRecord, PackWriter, Store

NOBODY = PeerId(b"")

ProgressCallback = Callable[[FetchProgress], Awaitable[None]]


class FetchPack:
    """For one fetch.

    Args:
        store: where it goes.
        lane: where blocking store work runs.
        artifact: what is fetched.
        entries: the whole chunk list, verified.
        token_chunks: indices of the chunks that hold the token ids.
        wanted: indices to have in the end, those of the token ids included.
        arrived: chunks that are here and verified already.
        read_soon: whether somebody waits to use it.
        progress: told after each chunk.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        artifact: ArtifactHash,
        entries: Sequence[ChunkEntry],
        *,
        token_chunks: range,
        wanted: set[int],
        arrived: Mapping[int, bytes],
        read_soon: bool = True,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._store = store
        self._lane = lane
        self._artifact = artifact
        self._entries = entries
        self._token_chunks = token_chunks
        self._wanted = wanted
        self._heads = {index: data for index, data in arrived.items() if index in token_chunks}
        self._read_soon = read_soon
        self._progress = progress
        self._writer: PackWriter | None = None
        self._in_pack: set[int] = set()
        self._arrived = set(arrived)
        self._expected = (0, 0)
        self._held: tuple[int, int] | None = None
        self._first_held_chunks = 0
        self.parts: Callable[[], tuple[PeerPart, ...]] = tuple
        self.waiting: Callable[[], bool] = bool
        self.silent_s: Callable[[], float] = float
        self.gives_way = False
        self.resumed_chunks = 0
        self.n_chunks = 0
        self.n_bytes = 0

    @property
    def begun(self) -> bool:
        """Whether there is a pack: something has arrived for it."""
        return self._writer is not None

    async def missing(self) -> list[int]:
        """The wanted chunks that are not here, ascending."""
        found = await self._lane.run(self._look)
        first = self._held is None
        self._held = self._count(self._wanted - self._arrived - set(found))
        if first:
            self._first_held_chunks = self._held[0]
        self._expected = (
            self.n_chunks + len(found),
            self.n_bytes + sum(self._entries[index].length_bytes for index in found),
        )
        return found

    def _count(self, indices: set[int]) -> tuple[int, int]:
        lengths = [self._entries[index].length_bytes for index in indices if not self._entries[index].absent]
        return len(lengths), sum(lengths)

    @property
    def held_chunks(self) -> int:
        """Chunks of what is wanted that are here without this fetch."""
        return self._held[0] if self._held is not None else 0

    @property
    def meanwhile_chunks(self) -> int:
        """Those of them that came for prompts while it was under way."""
        return max(0, self.held_chunks - self._first_held_chunks)

    def _look(self) -> list[int]:
        resumed: set[int] = set()
        if self._writer is None and self._store.has_partial(self._artifact):
            resumed = self._wanted & self._begin().held
        found = self._missing()
        if self._held is None:
            if self._store.get(self._artifact) is not None:
                resumed = self._wanted - self._arrived - set(found)
            self.resumed_chunks = self._count(resumed)[0]
        return found

    def _missing(self) -> list[int]:
        return [
            index
            for index in sorted(self._wanted - self._in_pack - set(self._heads))
            if not self._entries[index].absent and not self._store.has_chunk(self._entries[index].hash)
        ]

    def _begin(self) -> PackWriter:
        """Make room for what is to be written, then reference all that is held. Blocking."""
        entries = self._entries
        room = sum(entries[index].length_bytes for index in self._missing())
        room += sum(map(len, self._heads.values()))
        writer = self._writer = self._store.resume_pack(
            self._artifact, entries, expected_bytes=room, read_soon=self._read_soon
        )
        self._in_pack |= writer.held
        for index in writer.held.intersection(self._token_chunks):
            self._heads[index] = writer.read(index)
        for index in self._heads.keys() - self._in_pack:
            writer.put(index, self._heads[index], expected_hash=entries[index].hash)
            self._in_pack.add(index)
        for index, entry in enumerate(entries):
            if not entry.absent and index not in self._in_pack and self._store.has_chunk(entry.hash):
                writer.reference(index, entry)
                self._in_pack.add(index)
        return writer

    def _put(self, chunks: Sequence[VerifiedChunk]) -> None:
        for chunk in chunks:
            writer = self._writer or self._begin()
            if chunk.index not in self._in_pack:
                writer.put_verified(chunk)
                self._in_pack.add(chunk.index)
            if chunk.index in self._token_chunks:
                self._heads[chunk.index] = bytes(chunk.data)
            self._arrived.add(chunk.index)
            self.n_chunks += 1
            self.n_bytes += len(chunk.data)

    async def keep(self, chunks: Sequence[VerifiedChunk], peer: PeerId) -> None:
        """Write verified chunks, in one go of the lane.

        Raises:
            StoreError: one does not fit, or the disk failed; those before it are kept.
        """
        await self._lane.run(self._put, chunks)
        for chunk in chunks:
            await self.tell(peer, chunk.index)

    async def tell(self, peer: PeerId = NOBODY, index: int = -1) -> None:
        """Say how far it is: chunk ``index`` came from ``peer``, or time has passed."""
        if self._progress is None:
            return
        chunks, total = self._expected
        held_chunks, held_bytes = self._held or (0, 0)
        await self._progress(
            FetchProgress(
                self.n_bytes,
                total,
                self.n_chunks,
                chunks,
                peer,
                index,
                held_chunks=held_chunks,
                held_bytes=held_bytes,
                resumed_chunks=self.resumed_chunks,
                parts=self.parts(),
                waiting=self.waiting(),
                gives_way=self.gives_way,
                silent_s=self.silent_s(),
            )
        )

    async def tokens(self) -> list[int]:
        """The artifact's token ids, from chunks that are verified; they are needed before the pack is published.

        Raises:
            NotInStoreError: the fetch was ended before they came.
        """
        for index in self._token_chunks:
            if index not in self._heads:
                self._heads[index] = await self._lane.run(self._store.read_chunk, self._entries[index].hash)
        return tokens_from_bytes(b"".join(self._heads[index] for index in self._token_chunks))

    async def publish(self, envelope: bytes, *, keys: Sequence[PrefixKey], pinned: bool) -> ArtifactRecord:
        """Make what is here visible; chunks may be missing.

        Raises:
            StoreError: the disk failed, or it does not fit.
        """
        return await self._lane.run(self._publish, envelope, keys, pinned=pinned)

    def _publish(self, envelope: bytes, keys: Sequence[PrefixKey], *, pinned: bool) -> ArtifactRecord:
        writer = self._writer or self._begin()
        return writer.publish(envelope, keys=keys, pinned=pinned, allow_partial=True, entries=self._entries)

    async def put_down(self, envelope: bytes, *, keys: Sequence[PrefixKey]) -> None:
        """Publish what has arrived so far, and go on with another pack.

        Raises:
            StoreError: the disk failed, or it does not fit.
        """
        await self._lane.run(self._publish, envelope, keys, pinned=False)
        self._writer = None
        self._in_pack.clear()

    def abort(self) -> None:
        """End; what has arrived stays, to be gone on with. After publishing it does nothing."""
        if self._writer is not None:
            self._writer.abort()
