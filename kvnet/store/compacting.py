"""Writing packs anew: one that others use in part is copied with only the chunks they use, and exchanged.

Nothing of a removed text stays so. Copying takes long and needs no lock: nothing of a finished pack changes.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvnet.errors import IntegrityError, KvnetError
from kvnet.format.container import Placement, encode_envelope_area, encode_footer, encode_header
from kvnet.format.hashes import blake3_hash
from kvnet.store.failures import storage_errors
from kvnet.store.index import PackRow, PlacedChunk
from kvnet.store.opening import Parts
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import PackContents, read_pack
from kvnet.store.presence import Gate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compaction:
    """A pack to be written anew with only some of its chunks.

    Attributes:
        pack: the old one.
        needed: the chunks that stay, in the order in which they lie.
        copy: where the new one is written.
        name: what it is called afterwards, promised to nobody else.
    """

    pack: PackRow
    needed: tuple[PlacedChunk, ...]
    copy: Path
    name: str


class Compacting:
    """Writes packs anew that are used in part, one thread at a time.

    Args:
        gate: the store's lock.
        parts: the open store.
    """

    def __init__(self, gate: Gate, parts: Parts) -> None:
        self._gate = gate
        self._parts = parts
        self._files = parts.files
        self._paths = parts.paths
        self.turn = threading.RLock()
        """Held while packs are written anew; taken before the gate, never while holding it."""
        self._left_as_they_are: set[str] = set()

    def run(self) -> int:
        """Write anew whatever is used in part; returns how many packs were."""
        done = 0
        with self.turn:
            self._left_as_they_are.clear()
            while True:
                with self._gate:
                    compaction = self._next()
                if compaction is None:
                    return done
                placed = False
                try:
                    placed = self._exchange(compaction)
                except (KvnetError, OSError) as error:
                    with self._gate:
                        gone = not self._still_wanted(compaction)
                    if not gone:
                        _log.warning("store: a pack stays as large as it is: %s", error)
                finally:
                    self._end(compaction, failed=not placed)
                done += placed

    def _next(self) -> Compaction | None:
        """A pack that is used in part; the room of its copy counts until :meth:`_end`."""
        index, space = self._parts.index, self._parts.space
        for pack in index.orphaned_packs():
            needed = space.needed(pack)
            if pack.name in self._left_as_they_are or not needed:
                continue
            if len(needed) < len(index.chunks_of_pack(pack.id)):
                space.copying_bytes = sum(chunk.length_bytes for chunk in needed)
                return Compaction(pack, tuple(needed), space.temporary_path(), space.promise_name(pack.artifact))
        return None

    def _exchange(self, compaction: Compaction) -> bool:
        """Write one pack anew and use it; whether that was of use."""
        old, new = self._paths.pack(compaction.pack.name), self._paths.pack(compaction.name)
        kept = copy_pack(self._files, old, compaction.copy, compaction.needed)
        used = False
        try:
            # A name of its own: whoever has the old one open goes on reading it.
            self._files.rename(compaction.copy, new)
            self._files.sync_directory(new.parent)
            found = new.lstat()
            with self._gate:
                used = self._use(compaction, found.st_size, found.st_mtime_ns, kept)
        finally:
            self._files.unlink(old if used else new)
        return used

    def _use(self, compaction: Compaction, size_bytes: int, mtime_ns: int, kept: list[PlacedChunk]) -> bool:
        """List the new pack instead; False when something else of the old one has come to be used meanwhile."""
        pack, index = compaction.pack, self._parts.index
        copied = {chunk.hash for chunk in compaction.needed}
        needed = self._parts.space.needed(pack)
        if not self._still_wanted(compaction) or any(chunk.hash not in copied for chunk in needed):
            return False
        with index.transaction():
            users = index.users_of_pack(pack.id)
            index.drop_pack(pack.id)
            index.add_pack(compaction.name, pack.artifact, size_bytes, mtime_ns, kept)
            index.refresh(users)
        return True

    def _still_wanted(self, compaction: Compaction) -> bool:
        """Whether the pack is there and to be written anew; others may have let go of the rest of it meanwhile."""
        return compaction.pack in self._parts.index.orphaned_packs()

    def _end(self, compaction: Compaction, *, failed: bool) -> None:
        """Done with it; a pack that could not be written anew is left as it is for the rest of this run."""
        compaction.copy.unlink(missing_ok=True)

        def end() -> None:
            self._parts.space.copying_bytes = 0
            self._parts.space.take_promise_back(compaction.name)

        self._gate.while_away(end)
        if failed:
            self._left_as_they_are.add(compaction.pack.name)


def copy_pack(files: OsFiles, source: Path, target: Path, needed: Iterable[PlacedChunk]) -> list[PlacedChunk]:
    """Copy a pack with some of its chunks, each hashed on the way; a damaged one is left behind.

    Args:
        files: the seam to the operating system.
        source: the pack.
        target: a file to create.
        needed: chunks of the pack, in the order in which they lie.

    Returns:
        The chunks copied, and where they lie now.

    Raises:
        KvnetError: it cannot be read, or not be written.
        OSError: the same.
    """
    contents = read_pack(files, source)
    with storage_errors("compacting a pack"):
        reading = files.open_for_reading(source)
        writing = -1
        try:
            writing = files.create(target)
            return _copy(files, reading, writing, contents, needed)
        finally:
            files.close(reading)
            if writing >= 0:
                files.close(writing)


def _copy(
    files: OsFiles, reading: int, writing: int, contents: PackContents, needed: Iterable[PlacedChunk]
) -> list[PlacedChunk]:
    head = encode_header(len(contents.entries)) + encode_envelope_area(contents.signed.envelope)
    head += b"".join(contents.pages)
    files.write(writing, head, 0)
    offset = len(head)
    kept: list[PlacedChunk] = []
    for chunk in needed:
        data = files.read(reading, chunk.length_bytes, chunk.offset)
        if blake3_hash(data) != chunk.hash:
            _log.warning("store: a damaged chunk was left behind while a pack was compacted")
            continue
        files.write(writing, data, offset)
        kept.append(PlacedChunk(chunk.hash, offset, chunk.length_bytes))
        offset += chunk.length_bytes
    if not kept:
        raise IntegrityError("no chunk of the pack matches its hash")
    positions = {entry.hash: index for index, entry in enumerate(contents.entries)}
    places = [Placement(positions[chunk.hash], chunk.offset, chunk.length_bytes) for chunk in kept]
    files.write(writing, encode_footer(places), offset)
    files.sync(writing)
    return kept
