"""Serve chunks over a bulk connection: decided on the trio loop, read and hashed in the connection's thread."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

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
            # When the loop is over, nobody counts any more.
            with suppress(trio.RunFinishedError):
                self._on_loop(self._server.end_chunks, peer, counted)

    def _chunks(self, peer: PeerId, request: GetChunks, plan: SendChunks, room: Room, counted: Counter[str]) -> Answers:
        entries = plan.artifact.entries
        with _Files() as files:
            places = self._places(entries[index] for index in plan.indices)
            coming = next(places, None)
            not_held = set(plan.not_held)
            for index in request.indices:
                data = None
                if index not in not_held:
                    place, coming = coming, next(places, None)
                    files.expect(coming)
                    data = self._read(entries[index], place, room, files, counted)
                if data is None:
                    yield ChunkRefused(index=index, reason=RefusalReason.NOT_HELD)
                    continue
                spread_s = 0.0
                if self._server.limits_rate:
                    spread_s = self._on_loop(self._server.delay_s, peer, len(data), request.purpose)
                yield HeldChunk(index, data, spread_s)
                counted["chunks_served"] += 1
                counted["bytes_served"] += len(data)

    def _places(self, entries: Iterable[ChunkEntry]) -> Iterator[ChunkLocation | None]:
        for entry in entries:
            yield self._store.locate(entry.hash)

    def _read(
        self, entry: ChunkEntry, place: ChunkLocation | None, room: Room, files: "_Files", counted: Counter[str]
    ) -> BytesLike | None:
        """Stored bytes that match their hash, or ``None``: damaged bytes are never sent on."""
        if place is not None and place.length_bytes == entry.length_bytes:
            view = room(entry.length_bytes)
            if files.read_into(place.path, place.offset, view) and blake3_hash(view) == entry.hash:
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


class _Files:
    """The packs of one request, open while it is answered."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)

    def expect(self, place: ChunkLocation | None) -> None:
        """These bytes are read next: the disk may begin, where the system takes such hints."""
        if place is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                handle = self._handle(place.path)
                os.posix_fadvise(handle, place.offset, place.length_bytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, path: Path, offset: int, view: memoryview) -> bool:
        """Fill `view` from a file; False when the file does not give so many bytes."""
        try:
            handle = self._handle(path)
            filled = 0
            while filled < len(view):
                read = os.preadv(handle, [view[filled:]], offset + filled)
                if not read:
                    return False
                filled += read
        except OSError:
            return False
        return True

    def _handle(self, path: Path) -> int:
        handle = self._open.get(path)
        if handle is None:
            handle = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return handle
