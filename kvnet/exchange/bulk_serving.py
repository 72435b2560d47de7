"""Serve chunks over a bulk connection: decided on the trio loop, read and hashed in the connection's thread."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from kvnet.errors import KvnetError, NotInStoreError
from kvnet.exchange.open_packs import OpenPacks, Place
from kvnet.exchange.serving import ChunkServer
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import BytesLike, blake3_hash
from kvnet.network.bulk.sending import Answers, HeldChunk, Room
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.chunks import ChunkRefused, GetChunks
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.protocol.serve import RefuseChunks, SendChunks
from kvnet.store.interface import Store

T = TypeVar("T")


class StoreSource:
    """Answers chunk requests from the store.

    Args:
        server: decides, on the trio loop.
        store: where chunks are; asked from the connections' threads, beside its lane: it has a lock of its own.
        token: of the trio loop.
    """

    def __init__(self, server: ChunkServer, store: Store, token: trio.lowlevel.TrioToken) -> None:
        self._server = server
        self._store = store
        self._token = token

    def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
        """See `ChunkSource`. Each chunk is read and hashed again right before it goes out."""
        plan = self._on_loop(self._server.begin_chunks, peer, request)
        if isinstance(plan, RefuseChunks):
            for index in plan.indices:
                yield ChunkRefused(index=index, reason=plan.reason)
            return
        counted: Counter[str] = Counter()
        try:
            yield from self._chunks(peer, request, plan, room, counted)
        finally:
            # Nobody waits for this; and when the loop is over, nobody counts any more.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._server.end_chunks, peer, counted)

    def _chunks(self, peer: PeerId, request: GetChunks, plan: SendChunks, room: Room, counted: Counter[str]) -> Answers:
        with OpenPacks() as packs:
            # All places first, not one before each chunk: code that runs between megabytes of data runs slowly.
            places = self._places(plan, packs)
            coming = iter(places.values())
            next(coming, None)
            limits_rate = self._server.limits_rate
            for index in request.indices:
                data: BytesLike | None = None
                # Read from this thread: a set is replaced as a whole, never changed.
                if index in places and plan.artifact.hash not in self._server.revoked:
                    entry, place = plan.artifact.entries[index], places[index]
                    data = self._read(entry, packs, place, next(coming, None), room)
                    if data is None:
                        data = self._read_elsewhere(entry, counted)
                if data is None:
                    yield ChunkRefused(index=index, reason=RefusalReason.NOT_HELD)
                    continue
                spread_s = 0.0
                if limits_rate:
                    spread_s = self._on_loop(self._server.delay_s, peer, len(data), request.purpose)
                # Before it is sent: whoever has the last chunk hangs up at once, and this does not go on.
                counted["chunks_served"] += 1
                counted["bytes_served"] += len(data)
                yield HeldChunk(index, data, spread_s)

    def _places(self, plan: SendChunks, packs: OpenPacks) -> dict[int, Place | None]:
        """Where the chunks lie at this moment, in the order asked for."""
        entries = plan.artifact.entries
        found = self._store.locate_all([entries[index].hash for index in plan.indices])
        return dict(zip(plan.indices, map(packs.place, found), strict=True))

    @staticmethod
    def _read(
        entry: ChunkEntry, packs: OpenPacks, place: Place | None, following: Place | None, room: Room
    ) -> memoryview | None:
        """Stored bytes that match their hash, or ``None``."""
        if place is None or place.length_bytes != entry.length_bytes:
            return None
        view = room(entry.length_bytes)
        return view if packs.read(place, view, following) and blake3_hash(view) == entry.hash else None

    def _read_elsewhere(self, entry: ChunkEntry, counted: Counter[str]) -> bytes | None:
        """A chunk that is gone or damaged there: the store knows other copies, and what to do with a bad one."""
        try:
            return self._store.read_chunk(entry.hash)
        except NotInStoreError:
            return None
        except KvnetError:
            counted["chunks_damaged"] += 1
            return None

    def _on_loop(self, call: Callable[..., T], *args: object) -> T:
        return trio.from_thread.run_sync(call, *args, trio_token=self._token)
