"""Serve chunks over a bulk connection: decided on the trio loop, read and hashed in the connection's thread."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

from kvnet.errors import KvnetError, NotInStoreError
from kvnet.exchange.serving import ChunkServer
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import BytesLike, blake3_hash
from kvnet.network.bulk.sending import Answers, HeldChunk, Room
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import ChunkRefused, GetChunks, RefusalReason
from kvnet.protocol.serve import RefuseChunks, SendChunks
from kvnet.store.interface import ChunkLocation, Store

T = TypeVar("T")

_TAKES_HINTS: Final = hasattr(os, "posix_fadvise")


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
        with _Packs() as packs:
            # All places first, not one before each chunk: code that runs between megabytes of data runs slowly.
            places = self._places(plan, packs)
            coming = iter(places.values())
            next(coming, None)
            limits_rate = self._server.limits_rate
            for index in request.indices:
                data = None
                # Read from this thread: a set is replaced as a whole, never changed.
                if index in places and plan.artifact.hash not in self._server.revoked:
                    packs.expect(next(coming, None))
                    data = self._read(plan.artifact.entries[index], places[index], room, counted)
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

    def _places(self, plan: SendChunks, packs: "_Packs") -> dict[int, "_Place | None"]:
        """Where the chunks lie at this moment, in the order asked for."""
        entries = plan.artifact.entries
        return {index: packs.place(self._store.locate(entries[index].hash)) for index in plan.indices}

    def _read(self, entry: ChunkEntry, place: "_Place | None", room: Room, counted: Counter[str]) -> BytesLike | None:
        """Stored bytes that match their hash, or ``None``: damaged bytes are never sent on."""
        if place is not None and place.length_bytes == entry.length_bytes:
            view = room(entry.length_bytes)
            if place.read_into(view) and blake3_hash(view) == entry.hash:
                return view
        # Gone or damaged there: the store knows other copies, and what to do with a bad one.
        try:
            return self._store.read_chunk(entry.hash)
        except NotInStoreError:
            return None
        except KvnetError:
            counted["chunks_damaged"] += 1
            return None

    def _on_loop(self, call: Callable[..., T], *args: object) -> T:
        return trio.from_thread.run_sync(call, *args, trio_token=self._token)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk's bytes lie in an open file."""

    handle: int
    offset: int
    length_bytes: int

    def read_into(self, view: memoryview) -> bool:
        """Fill `view`; False when the file does not give so many bytes."""
        filled = 0
        try:
            while filled < len(view):
                read = os.preadv(self.handle, [view[filled:]], self.offset + filled)
                if not read:
                    return False
                filled += read
        except OSError:
            return False
        return True


class _Packs:
    """The packs of one request, open while it is answered."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Packs":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    def place(self, found: ChunkLocation | None) -> _Place | None:
        """The place in an open pack; ``None`` for one that cannot be opened."""
        if found is None:
            return None
        handle = self._open.get(found.path)
        if handle is None:
            try:
                handle = self._open[found.path] = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return None
        return _Place(handle, found.offset, found.length_bytes)

    @staticmethod
    def expect(place: _Place | None) -> None:
        """These bytes are read next: the disk may begin, where the system takes such hints."""
        if place is not None and _TAKES_HINTS:
            with suppress(OSError):
                os.posix_fadvise(place.handle, place.offset, place.length_bytes, os.POSIX_FADV_WILLNEED)
