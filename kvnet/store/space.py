"""Room: what the store holds, what must go when more is needed, and letting it go.

A removal is durable before anything disappears: a marker file first, then the index, then the packs. A pack that
other artifacts still use is written anew with only the chunks they use, so that nothing of a removed text stays.
"""

import itertools
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvnet.errors import IntegrityError, StoreFullError
from kvnet.format.container import Placement, encode_envelope_area, encode_footer, encode_header
from kvnet.format.hashes import ArtifactHash, ChunkHash, artifact_text, blake3_hash
from kvnet.store.eviction import FRESH_S, HIGH_SHARE, LOW_SHARE, Candidate, choose_victims
from kvnet.store.failures import storage_errors
from kvnet.store.index import ArtifactRow, Index, PackRow, PlacedChunk
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import PARTIAL_SUFFIX, PackContents, StorePaths, pack_name, read_pack
from kvnet.store.resuming import PARTIAL_KEPT_S, journal_of
from kvnet.store.writer import DiskPackWriter

_log = logging.getLogger(__name__)


INDEX_BASE_BYTES: Final = 64 << 10
INDEX_BYTES_PER_CHUNK: Final = 640
"""What listing an artifact adds to the index: measured with 60,000 chunks, 270 bytes a chunk in the database and as
much again in the log beside it."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """A pack to be written anew with only some of its chunks, and where."""

    pack: PackRow
    needed: tuple[PlacedChunk, ...]
    target: Path


class Space:
    """Keeps a store within its bounds. Covered by the store's lock.

    Args:
        files: the seam to the operating system.
        paths: the store.
        index: its index.
        quota_bytes: the most that everything in the store's directory may take.
        min_free_bytes: what must stay free on the disk.
    """

    def __init__(
        self, files: OsFiles, paths: StorePaths, index: Index, *, quota_bytes: int, min_free_bytes: int
    ) -> None:
        self._files = files
        self._paths = paths
        self._index = index
        self.quota_bytes = quota_bytes
        self.min_free_bytes = min_free_bytes
        self.leases: dict[DiskPackWriter, set[ChunkHash]] = {}
        self.evicted: list[ArtifactHash] = []
        self._may_come_back: set[ArtifactHash] = set()
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(8)
        self._other_bytes = 0
        self.partial: dict[Path, int] = {}
        self._copying_bytes = 0
        self._left_as_they_are: set[str] = set()
        self.count_others()
        for path in sorted(paths.partial.glob(f"*{PARTIAL_SUFFIX}")):
            self.count_partial(path)

    # --- what is held -------------------------------------------------------------------------------------------------

    def count_others(self) -> None:
        """Count again what is neither a pack, nor being written, nor the index."""
        others = 0
        known = {pack.name for pack in self._index.packs()}
        for folder in (self._paths.quarantine, self._paths.packs):
            for path in folder.rglob("*"):
                if path.is_file() and not path.is_symlink() and str(path.relative_to(folder)) not in known:
                    others += path.lstat().st_size
        self._other_bytes = others

    def held_bytes(self) -> int:
        """Bytes of everything in the store's directory."""
        index_bytes = sum(path.stat().st_size for path in self._index.files() if path.exists())
        open_bytes = sum(writer.size_bytes for writer in self.leases)
        partial_bytes = sum(self.partial.values())
        written_bytes = open_bytes + partial_bytes + self._copying_bytes
        return self._index.pack_bytes() + written_bytes + index_bytes + self._other_bytes

    def count_partial(self, path: Path) -> None:
        """A partial pack that nobody fills counts with its journal; one that has gone does not."""
        try:
            found = path.lstat()
            self.partial[path] = found.st_size + journal_of(path).lstat().st_size
        except OSError:
            self.partial.pop(path, None)

    def expire_partial(self, now_s: float) -> None:
        """Remove partial packs that nobody went on with for `PARTIAL_KEPT_S`, and journals that have none."""
        for path in list(self.partial):
            with storage_errors("looking at a partial pack"):
                written_s = path.lstat().st_mtime if path.exists() else 0.0
            if now_s - written_s > PARTIAL_KEPT_S:
                self.remove_partial(path)
        known = self.partial.keys() | {writer.path for writer in self.leases}
        known |= {journal_of(path) for path in known}
        with storage_errors("looking at partial packs"):
            for path in self._paths.partial.iterdir():
                if path not in known and not path.is_dir():
                    self._files.unlink(path)

    def _remove_partials(self, n_bytes: int) -> None:
        """Give up interrupted fetches until so many bytes are free, those of longest ago first."""
        for path in sorted(self.partial, key=lambda path: path.lstat().st_mtime if path.exists() else 0.0):
            if n_bytes > 0:
                n_bytes -= self.partial[path]
                self.remove_partial(path)

    def remove_partial(self, path: Path) -> None:
        """Give up an interrupted fetch."""
        with storage_errors("removing a partial pack"):
            self._files.unlink(path)
            self._files.unlink(journal_of(path))
        self.partial.pop(path, None)

    def free_bytes(self) -> int:
        """Bytes free on the disk."""
        with storage_errors("asking for free space"):
            return self._files.free_bytes(self._paths.root)

    def temporary_path(self) -> Path:
        """A path in the temporary folder that nothing else uses."""
        return self._paths.temporary / f"{self._run}-{next(self._numbers)}.part"

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Let go of what may go until so many more bytes fit; returns the artifacts that were evicted.

        Nothing is copied for it: whoever adds waits for this.

        Raises:
            StoreFullError: they cannot; when that is known beforehand, nothing is evicted.
        """
        if self._lack(need_bytes) <= 0:
            return []
        self.collect()
        self._index.checkpoint()
        lack = self._lack(need_bytes)
        if lack <= 0:
            return []
        # What interrupted fetches left goes before anything that is of use.
        partial_bytes = sum(self.partial.values())
        victims = self._choose(lack - partial_bytes) if lack > partial_bytes else []
        if victims is None:
            raise self._full(need_bytes)
        self._remove_partials(lack)
        for artifact in victims:
            self.evict(artifact)
        self.collect()
        self._index.checkpoint()
        if victims:
            _log.info("store: %d artifacts evicted to make room", len(victims))
        if self._lack(need_bytes) > 0:
            raise self._full(need_bytes)
        return victims

    def surplus(self, now_s: float) -> list[ArtifactHash]:
        """Once more than `HIGH_SHARE` of the quota is held: what has to go so that `LOW_SHARE` of it is."""
        held_bytes = self.held_bytes()
        if held_bytes <= HIGH_SHARE * self.quota_bytes:
            return []
        lack_bytes = int(held_bytes - LOW_SHARE * self.quota_bytes) + 1
        # When all together would not suffice, what is pinned is the reason, and nothing else pays for it.
        victims = self._choose(lack_bytes) or []
        fresh = {artifact for artifact, used_s in self._index.unpinned() if abs(now_s - used_s) < FRESH_S}
        return [artifact for artifact in victims if artifact not in fresh]

    def unused_since(self, before_s: float) -> list[ArtifactHash]:
        """Artifacts that may go and were last used before a time, in seconds since 1970."""
        return [artifact for artifact, used_s in self._index.unpinned() if used_s < before_s]

    def _lack(self, need_bytes: int) -> int:
        """How many bytes too many there would be."""
        over_quota = self.held_bytes() + need_bytes - self.quota_bytes
        too_little_free = need_bytes + self.min_free_bytes - self.free_bytes()
        return max(over_quota, too_little_free)

    def _choose(self, lack_bytes: int) -> list[ArtifactHash] | None:
        packs = self._index.packs()
        leased = {chunk for chunks in self.leases.values() for chunk in chunks}
        kept = {pack for chunk in leased for pack, _, _ in self._index.places_of(chunk)}
        users: dict[int, set[ArtifactHash]] = {pack.id: {pack.artifact} for pack in packs}
        for pack, artifact in self._index.pack_users():
            users[pack].add(artifact)
        listed = set(self._index.hashes())
        frozen = {pack: frozenset(artifacts & listed) for pack, artifacts in users.items() if pack not in kept}
        candidates = [Candidate(artifact, last_used_s) for artifact, last_used_s in self._index.unpinned()]
        return choose_victims(candidates, frozen, {pack.id: pack.size_bytes for pack in packs}, lack_bytes)

    def _full(self, need_bytes: int) -> StoreFullError:
        held, free = self.held_bytes(), self.free_bytes()
        pinned = self._index.counts().pinned_bytes
        hints = []
        if held + need_bytes > self.quota_bytes:
            hints.append(
                "Remove or unpin something (`kvnet list`, `kvnet rm`, `kvnet unpin`), or raise store.quota_bytes."
            )
        if need_bytes + self.min_free_bytes > free:
            hints.append("Free disk space, or lower store.min_free_bytes.")
        return StoreFullError(
            f"expected room for {_size(need_bytes)} more; the store holds {_size(held)} of its quota of "
            f"{_size(self.quota_bytes)}, {_size(pinned)} of them pinned, and the disk has {_size(free)} free, of "
            f"which {_size(self.min_free_bytes)} are to stay free",
            hint=" ".join(hints),
        )

    # --- letting go ---------------------------------------------------------------------------------------------------

    def drop(self, row: ArtifactRow, *, durable: bool = True) -> None:
        """List an artifact no longer. Its packs are for :meth:`collect`.

        Args:
            row: the artifact.
            durable: wait until the medium has that; needless for what may as well come back when the power fails.
        """
        marker = self._paths.removed / artifact_text(row.hash)
        with storage_errors("removing an artifact"):
            if durable:
                self._may_come_back.discard(row.hash)
                self._files.write_whole(marker, b"", self.temporary_path())
            else:
                self._may_come_back.add(row.hash)
                self._files.unlink(marker)
                self._files.close(self._files.create(marker))
            self._files.unlink(self._paths.pins / marker.name)
        with self._index.transaction():
            self._index.drop_artifact(row.id)

    def evict(self, artifact: ArtifactHash) -> bool:
        """Let go of an artifact that is not pinned; whether it was here."""
        row = self._index.artifact(artifact)
        if row is None or row.pinned:
            return False
        self.drop(row, durable=False)
        self.evicted.append(artifact)
        return True

    def collect(self) -> int:
        """Remove packs of which nothing is used; returns the bytes freed."""
        before = self._index.pack_bytes()
        for pack in self._index.orphaned_packs():
            if not self._needed(pack):
                self._remove_pack(pack)
        return before - self._index.pack_bytes()

    def _needed(self, pack: PackRow) -> list[PlacedChunk]:
        """Chunks of an orphaned pack that must stay: used or leased, and nowhere else."""
        needed = {chunk.hash: chunk for chunk in self._index.needed_chunks(pack.id)}
        leased = {chunk for chunks in self.leases.values() for chunk in chunks}
        if leased:
            for chunk in self._index.chunks_of_pack(pack.id):
                if chunk.hash in leased and len(self._index.places_of(chunk.hash)) == 1:
                    needed[chunk.hash] = chunk
        return sorted(needed.values(), key=lambda chunk: chunk.offset)

    def _remove_pack(self, pack: PackRow) -> None:
        path = self._paths.pack(pack.name)
        with self._index.transaction():
            self._index.drop_pack(pack.id)
        with storage_errors("removing a pack"):
            self._files.unlink(path)
            if pack.artifact not in self._may_come_back:
                # The marker goes after the pack, or a power failure would bring back what somebody had removed.
                self._files.sync_directory(path.parent)
            if not self._index.packs_of(pack.artifact):
                self._files.unlink(self._paths.removed / artifact_text(pack.artifact))
                self._may_come_back.discard(pack.artifact)

    # --- writing packs anew -------------------------------------------------------------------------------------------

    def next_compaction(self) -> Compaction | None:
        """A pack that is used in part, to be written anew; its room counts until :meth:`end_compaction`."""
        for pack in self._index.orphaned_packs():
            needed = self._needed(pack)
            if pack.name in self._left_as_they_are or not needed:
                continue
            if len(needed) < len(self._index.chunks_of_pack(pack.id)):
                self._copying_bytes = sum(chunk.length_bytes for chunk in needed)
                return Compaction(pack, tuple(needed), self.temporary_path())
        return None

    def copy(self, compaction: Compaction) -> list[PlacedChunk]:
        """Write the new pack; what takes long, and needs no lock: nothing of the old one changes meanwhile.

        Raises:
            KvnetError: it cannot be read, or not be written.
            OSError: the same.
        """
        old = self._paths.pack(compaction.pack.name)
        return self._copy(old, compaction.target, read_pack(self._files, old), compaction.needed)

    def name_copy(self, compaction: Compaction) -> Path:
        """Give the new pack a name of its own among the packs: whoever has the old one open goes on reading it."""
        target = self._paths.pack(self.free_name(compaction.pack.artifact))
        self._files.rename(compaction.target, target)
        return target

    def use_copy(self, compaction: Compaction, target: Path, kept: list[PlacedChunk]) -> bool:
        """Use the new pack instead, whose name is on the medium by now; the old file is the caller's to remove.

        Returns:
            False when it is of no use, because something else of the old pack has come to be used meanwhile.

        Raises:
            OSError: the disk failed.
        """
        pack = compaction.pack
        copied = {chunk.hash for chunk in compaction.needed}
        if not self.still_wanted(compaction) or any(chunk.hash not in copied for chunk in self._needed(pack)):
            return False
        found = target.lstat()
        with self._index.transaction():
            users = self._index.users_of_pack(pack.id)
            self._index.drop_pack(pack.id)
            name = str(target.relative_to(self._paths.packs))
            self._index.add_pack(name, pack.artifact, found.st_size, found.st_mtime_ns, kept)
            self._index.refresh(users)
        return True

    def still_wanted(self, compaction: Compaction) -> bool:
        """Whether the pack is there and to be written anew; others may have let go of the rest of it meanwhile."""
        return compaction.pack in self._index.orphaned_packs()

    def end_compaction(self, compaction: Compaction, *, failed: bool) -> None:
        """Done with it; a pack that could not be written anew is left as it is by further ones of the same round."""
        self._copying_bytes = 0
        compaction.target.unlink(missing_ok=True)
        if failed:
            self._left_as_they_are.add(compaction.pack.name)

    def begin_round(self) -> None:
        """Try again what could not be written anew before."""
        self._left_as_they_are.clear()

    def _copy(
        self, source: Path, target: Path, contents: PackContents, needed: Iterable[PlacedChunk]
    ) -> list[PlacedChunk]:
        """Copy a pack with some of its chunks, each hashed on the way; a damaged one is left behind."""
        positions = {entry.hash: index for index, entry in enumerate(contents.entries)}
        head = encode_header(len(contents.entries)) + encode_envelope_area(contents.signed.envelope)
        head += b"".join(contents.pages)
        kept: list[PlacedChunk] = []
        with storage_errors("compacting a pack"):
            reading = self._files.open_for_reading(source)
            writing = -1
            try:
                writing = self._files.create(target)
                self._files.write(writing, head, 0)
                offset = len(head)
                for chunk in needed:
                    data = self._files.read(reading, chunk.length_bytes, chunk.offset)
                    if blake3_hash(data) != chunk.hash:
                        _log.warning("store: a damaged chunk was left behind while a pack was compacted")
                        continue
                    self._files.write(writing, data, offset)
                    kept.append(PlacedChunk(chunk.hash, offset, chunk.length_bytes))
                    offset += chunk.length_bytes
                if not kept:
                    raise IntegrityError("no chunk of the pack matches its hash")
                places = [Placement(positions[chunk.hash], chunk.offset, chunk.length_bytes) for chunk in kept]
                self._files.write(writing, encode_footer(places), offset)
                self._files.sync(writing)
            finally:
                self._files.close(reading)
                if writing >= 0:
                    self._files.close(writing)
        return kept

    def empty_quarantine(self) -> None:
        """Remove what was set aside; it was reported when that happened."""
        with storage_errors("emptying the quarantine"):
            for path in self._paths.quarantine.iterdir():
                if path.is_file() or path.is_symlink():
                    self._files.unlink(path)
        self.count_others()

    def free_name(self, artifact: ArtifactHash) -> str:
        """The first name for a pack of an artifact that no file has."""
        numbers = itertools.count(1)
        return next(
            name
            for name in (pack_name(artifact, number) for number in numbers)
            if not self._paths.pack(name).exists() and not self._paths.pack(name).is_symlink()
        )


_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def _size(n_bytes: int) -> str:
    """A size for a person: three digits in decimal units."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
