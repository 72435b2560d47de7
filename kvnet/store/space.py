"""Room: what the store holds, how much that is too much, and what has to go for it."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kvnet.errors import StoreFullError
from kvnet.format.hashes import ArtifactHash, ChunkHash
from kvnet.store.eviction import Candidate, choose_victims, surplus_bytes
from kvnet.store.failures import storage_errors
from kvnet.store.index import Index, PackRow, PlacedChunk
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import StorePaths, pack_name
from kvnet.store.partials import Partials
from kvnet.store.writer import DiskPackWriter

INDEX_BASE_BYTES: Final = 64 << 10
INDEX_BYTES_PER_CHUNK: Final = 640
"""What listing an artifact adds to the index: measured with 60,000 chunks, 270 bytes a chunk in the database and as
much again in the log beside it."""


class Space:
    """Keeps count of a store. Covered by the store's lock; it only counts and chooses, and changes no file.

    Args:
        files: the seam to the operating system.
        paths: the store.
        index: its index.
        partials: packs of interrupted fetches.
        quota_bytes: the most that everything in the store's directory may take.
        min_free_bytes: what must stay free on the disk.

    Attributes:
        leases: chunks that a pack being filled refers to: they must stay until it has ended.
        evicted: artifacts that went for want of room or of use, for whoever offers them to peers.
        copying_bytes: what a pack that is being written anew will take.
        leaving_bytes: what packs take that nothing lists any more and that are still there.
    """

    def __init__(
        self,
        files: OsFiles,
        paths: StorePaths,
        index: Index,
        partials: Partials,
        *,
        quota_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self._files = files
        self._paths = paths
        self._index = index
        self._partials = partials
        self.quota_bytes = quota_bytes
        self.min_free_bytes = min_free_bytes
        self.leases: dict[DiskPackWriter, set[ChunkHash]] = {}
        self.evicted: list[ArtifactHash] = []
        self.copying_bytes = 0
        self.leaving_bytes = 0
        self._promised: set[str] = set()
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(8)
        self._other_bytes = 0
        self.count_others()

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

    def gone(self, n_bytes: int) -> None:
        """So many bytes of what was set aside were removed."""
        self._other_bytes = max(0, self._other_bytes - n_bytes)

    def held_bytes(self) -> int:
        """Bytes of everything in the store's directory."""
        index_bytes = sum(path.stat().st_size for path in self._index.files() if path.exists())
        open_bytes = sum(writer.size_bytes for writer in self.leases)
        written_bytes = open_bytes + self._partials.size_bytes() + self.copying_bytes + self.leaving_bytes
        return self._index.pack_bytes() + written_bytes + index_bytes + self._other_bytes

    def free_bytes(self) -> int:
        """Bytes free on the disk."""
        with storage_errors("asking for free space"):
            return self._files.free_bytes(self._paths.root)

    # --- names --------------------------------------------------------------------------------------------------------

    def temporary_path(self) -> Path:
        """A path in the temporary folder that nothing else uses."""
        return self._paths.temporary / f"{self._run}-{next(self._numbers)}.part"

    def free_name(self, artifact: ArtifactHash) -> str:
        """The first name for a pack of an artifact that no file has, and that was promised to nobody."""
        return next(
            name
            for name in (pack_name(artifact, number) for number in itertools.count(1))
            if name not in self._promised
            and not self._paths.pack(name).exists()
            and not self._paths.pack(name).is_symlink()
        )

    def promise_name(self, artifact: ArtifactHash) -> str:
        """A free name that nobody else gets until :meth:`take_promise_back`."""
        name = self.free_name(artifact)
        self._promised.add(name)
        return name

    def take_promise_back(self, name: str) -> None:
        """The name is used by now, or is not going to be."""
        self._promised.discard(name)

    # --- what has to go -----------------------------------------------------------------------------------------------

    def lack(self, need_bytes: int) -> int:
        """How many bytes too many there would be with so many more; not above 0 when they fit."""
        over_quota = self.held_bytes() + need_bytes - self.quota_bytes
        too_little_free = need_bytes + self.min_free_bytes - self.free_bytes()
        return max(over_quota, too_little_free)

    def victims_for(self, need_bytes: int, lack_bytes: int) -> list[ArtifactHash]:
        """Artifacts to evict when so much is lacking; what interrupted fetches left goes before anything of use.

        Raises:
            StoreFullError: all that may go is not enough.
        """
        partial_bytes = self._partials.size_bytes()
        victims = self._choose(lack_bytes - partial_bytes) if lack_bytes > partial_bytes else []
        if victims is None:
            raise self.full(need_bytes)
        return victims

    def surplus_bytes(self) -> int:
        """How much has to go in the background, so that nobody who adds has to wait for it."""
        return surplus_bytes(self.held_bytes(), self.quota_bytes)

    def unused_since(self, before_s: float) -> list[ArtifactHash]:
        """Artifacts that may go and were last used before a time, in seconds since 1970."""
        return [artifact for artifact, used_s in self._index.unpinned() if used_s < before_s]

    def _choose(self, lack_bytes: int) -> list[ArtifactHash] | None:
        packs = self._index.packs()
        ids = [pack.id for pack in packs]
        return self.choice(packs, self._index.pack_users(min(ids), max(ids)) if ids else [])(lack_bytes)

    def choice(
        self, packs: Sequence[PackRow], pack_users: Iterable[tuple[int, ArtifactHash]]
    ) -> Callable[[int], list[ArtifactHash] | None]:
        """What chooses who has to go for so many bytes, by what is held now; choosing itself needs no lock.

        Args:
            packs: all packs.
            pack_users: packs with the artifacts that use them.

        Returns:
            A function from bytes to artifacts, ``None`` when all that may go is not enough.
        """
        leased = {chunk for chunks in self.leases.values() for chunk in chunks}
        kept = {pack for chunk in leased for pack, _, _ in self._index.places_of(chunk)}
        users: dict[int, set[ArtifactHash]] = {pack.id: {pack.artifact} for pack in packs}
        for pack, artifact in pack_users:
            if pack in users:  # else it came since the packs were listed
                users[pack].add(artifact)
        listed = set(self._index.hashes())
        frozen = {pack: frozenset(artifacts & listed) for pack, artifacts in users.items() if pack not in kept}
        candidates = [Candidate(artifact, last_used_s) for artifact, last_used_s in self._index.unpinned()]
        return partial(choose_victims, candidates, frozen, {pack.id: pack.size_bytes for pack in packs})

    def full(self, need_bytes: int) -> StoreFullError:
        """The error for what does not fit."""
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

    # --- what may go of packs -----------------------------------------------------------------------------------------

    def needed(self, pack: PackRow) -> list[PlacedChunk]:
        """Chunks of an orphaned pack that must stay: used or leased, and nowhere else."""
        needed = {chunk.hash: chunk for chunk in self._index.needed_chunks(pack.id)}
        leased = {chunk for chunks in self.leases.values() for chunk in chunks}
        if leased:
            for chunk in self._index.chunks_of_pack(pack.id):
                if chunk.hash in leased and len(self._index.places_of(chunk.hash)) == 1:
                    needed[chunk.hash] = chunk
        return sorted(needed.values(), key=lambda chunk: chunk.offset)


_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def _size(n_bytes: int) -> str:
    """A size for a person: three digits in decimal units."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
