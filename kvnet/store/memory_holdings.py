"""What a store in memory holds, how much that is, and who has to go for room. Covered by the store's lock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvnet.errors import StoreFullError
from kvnet.format.hashes import ArtifactHash, ChunkHash, PrefixKey
from kvnet.store.eviction import Candidate, choose_victims, is_fresh, surplus_bytes, too_late_s
from kvnet.store.interface import ArtifactRecord
from kvnet.store.memory_writer import MemoryPackWriter


@dataclass
class Held:
    """An artifact; ``record`` says what never changes about it."""

    record: ArtifactRecord
    keys: tuple[PrefixKey, ...]
    pinned: bool
    last_used_s: float
    chunks: frozenset[ChunkHash] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = frozenset(entry.hash for entry in self.record.entries if not entry.absent)


class Holdings:
    """Artifacts, chunks and packs being filled, in dictionaries.

    Args:
        quota_bytes: the most that chunks may take.

    Attributes:
        chunks: their bytes.
        artifacts: in the order in which they came.
        writers: packs being filled, each with the chunks that it refers to: they must stay until it has ended.
        partials: what interrupted fetches brought.
        evicted: artifacts that went for want of room or of use.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.chunks: dict[ChunkHash, bytes] = {}
        self.artifacts: dict[ArtifactHash, Held] = {}
        self.writers: dict[MemoryPackWriter, set[ChunkHash]] = {}
        self.partials: dict[ArtifactHash, dict[ChunkHash, bytes]] = {}
        self.evicted: list[ArtifactHash] = []

    def partial_bytes(self) -> int:
        """What interrupted fetches left."""
        return sum(len(data) for chunks in self.partials.values() for data in chunks.values())

    def held_bytes(self) -> int:
        """All of it."""
        open_bytes = sum(writer.size_bytes for writer in self.writers)
        return open_bytes + self.partial_bytes() + sum(map(len, self.chunks.values()))

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Evict until so many more bytes fit; returns who went. Chunks stay until they are swept.

        Raises:
            StoreFullError: they cannot; nothing is evicted.
        """
        lack = self.held_bytes() + need_bytes - self.quota_bytes
        # What interrupted fetches left goes before anything that is of use, and for nothing that cannot fit.
        if lack <= 0:
            return []
        partial_bytes = self.partial_bytes()
        victims = self.choose(lack - partial_bytes) if lack > partial_bytes else []
        if victims is None:
            raise StoreFullError(
                f"expected room for {need_bytes:,} more bytes; the store holds {self.held_bytes():,} of its "
                f"quota of {self.quota_bytes:,} bytes",
                hint="Remove or unpin something.",
            )
        while lack > 0 and self.partials:
            lack -= sum(map(len, self.partials.pop(next(iter(self.partials))).values()))
        self.evict(victims)
        return victims

    def correct_uses(self, now_s: float) -> None:
        """Have what a clock that was ahead saw used be used now."""
        for held in self.artifacts.values():
            if held.last_used_s > too_late_s(now_s):
                held.last_used_s = now_s

    def expired(self, before_s: float) -> list[ArtifactHash]:
        """Artifacts that may go and were last used before a time, in seconds since 1970."""
        return [one for one, held in self.artifacts.items() if not held.pinned and held.last_used_s < before_s]

    def surplus(self, now_s: float) -> list[ArtifactHash]:
        """Who has to go while nobody waits, so that nobody who adds has to wait for it."""
        lack = surplus_bytes(self.held_bytes(), self.quota_bytes)
        victims = (self.choose(lack) or []) if lack else []
        return [one for one in victims if not is_fresh(self.artifacts[one].last_used_s, now_s)]

    def evict(self, victims: Sequence[ArtifactHash]) -> None:
        """Let artifacts go."""
        for artifact in victims:
            del self.artifacts[artifact]
        self.evicted += victims

    def choose(self, lack_bytes: int) -> list[ArtifactHash] | None:
        """Artifacts to evict; none when nothing lacks, ``None`` when all together are too few."""
        numbers = {chunk: number for number, chunk in enumerate(self.chunks)}
        leased = {chunk for chunks in self.writers.values() for chunk in chunks}
        users: dict[int, set[ArtifactHash]] = {n: set() for c, n in numbers.items() if c not in leased}
        for artifact, held in self.artifacts.items():
            for chunk in held.chunks & numbers.keys() - leased:
                users[numbers[chunk]].add(artifact)
        return choose_victims(
            [Candidate(a, held.last_used_s) for a, held in self.artifacts.items() if not held.pinned],
            {number: frozenset(artifacts) for number, artifacts in users.items()},
            {number: len(self.chunks[chunk]) for chunk, number in numbers.items()},
            lack_bytes,
        )

    def unused(self) -> list[ChunkHash]:
        """Chunks that nobody uses."""
        used = {chunk for held in self.artifacts.values() for chunk in held.chunks}
        used |= {chunk for chunks in self.writers.values() for chunk in chunks}
        return list(self.chunks.keys() - used)
