"""The index: which chunk lies where, which artifact uses it, which prefix keys lead to it. SQLite, and only a cache.

Files are the truth. Everything here follows from the packs and the small marker files beside them (and, for prefix
keys, from secrets that whoever opens the store has), so a lost commit costs a scan and nothing else. That is why
commits do not wait for the medium (``synchronous = NORMAL`` under WAL keeps the database whole, not the last commit).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash, FingerprintHash, NamespaceId, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.store.database import Database

QUERY_KEYS: Final = 500
"""Keys per query; SQLite allows 999 variables in every build."""


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack as the index knows it; ``name`` is relative to the folder of packs."""

    id: int
    name: str
    artifact: ArtifactHash
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """An artifact as the index keeps it; see ``ArtifactRecord``.

    ``readable``: the chunks of its token ids are held, so that it can be compared with a prompt.
    """

    id: int
    hash: ArtifactHash
    envelope: bytes
    pages: bytes
    complete: bool
    readable: bool
    pinned: bool
    held_bytes: int
    created_s: float
    last_used_s: float


@dataclass(frozen=True, slots=True)
class ArtifactCounts:
    """How many artifacts are listed, how many of them are pinned, and the bytes of chunks the latter use."""

    artifacts: int
    pinned: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk and where it lies in a pack."""

    hash: ChunkHash
    offset: int
    length_bytes: int


_ARTIFACT_COLUMNS: Final = "id, hash, envelope, pages, complete, readable, pinned, held_bytes, created_s, last_used_s"


class Index(Database):
    """One open index: every question that the store asks of it."""

    # --- packs and chunks ---------------------------------------------------------------------------------------------

    def packs(self) -> list[PackRow]:
        """All packs."""
        return [PackRow(*row) for row in self._rows("SELECT id, name, artifact, size_bytes, mtime_ns FROM packs")]

    def packs_of(self, artifact: ArtifactHash) -> list[PackRow]:
        """The packs that carry an artifact's manifest."""
        query = "SELECT id, name, artifact, size_bytes, mtime_ns FROM packs WHERE artifact = ?"
        return [PackRow(*row) for row in self._rows(query, (artifact,))]

    def packs_of_none_but(self, row: ArtifactRow) -> list[PackRow]:
        """The packs of an artifact of which no other one uses anything."""
        query = (
            "SELECT id, name, artifact, size_bytes, mtime_ns FROM packs p WHERE p.artifact = ? AND NOT EXISTS "
            "(SELECT 1 FROM chunks c JOIN refs r ON r.hash = c.hash WHERE c.pack = p.id AND r.artifact <> ?)"
        )
        return [PackRow(*found) for found in self._rows(query, (row.hash, row.id))]

    def pack_bytes(self) -> int:
        """Bytes of all packs."""
        return int(self._row("SELECT coalesce(sum(size_bytes), 0) FROM packs")[0])

    def add_pack(
        self, name: str, artifact: ArtifactHash, size_bytes: int, mtime_ns: int, chunks: Iterable[PlacedChunk]
    ) -> int:
        """Take in a pack and its chunks; returns its id."""
        with self._translated():
            cursor = self._db.execute(
                "INSERT INTO packs (name, artifact, size_bytes, mtime_ns) VALUES (?, ?, ?, ?)",
                (name, artifact, size_bytes, mtime_ns),
            )
            pack = cursor.lastrowid
            assert pack is not None  # noqa: S101 - an INSERT into a table with a row id has one
            # A pack may hold equal tiles twice only if its writer was careless; one place is enough.
            self._db.executemany(
                "INSERT OR IGNORE INTO chunks (hash, pack, offset, length_bytes) VALUES (?, ?, ?, ?)",
                ((chunk.hash, pack, chunk.offset, chunk.length_bytes) for chunk in chunks),
            )
        return pack

    def drop_pack(self, pack: int) -> None:
        """Forget a pack and its chunks."""
        with self._translated():
            self._db.execute("DELETE FROM chunks WHERE pack = ?", (pack,))
            self._db.execute("DELETE FROM packs WHERE id = ?", (pack,))

    def chunks_of_pack(self, pack: int) -> list[PlacedChunk]:
        """The chunks of a pack in the order in which they lie."""
        query = "SELECT hash, offset, length_bytes FROM chunks WHERE pack = ? ORDER BY offset"
        return [PlacedChunk(*row) for row in self._rows(query, (pack,))]

    def chunk_count(self) -> int:
        """Distinct chunks."""
        return int(self._row("SELECT count(DISTINCT hash) FROM chunks")[0])

    def has_chunk(self, chunk: ChunkHash) -> bool:
        """Whether some pack has it."""
        return self._row("SELECT 1 FROM chunks WHERE hash = ? LIMIT 1", (chunk,)) is not None

    def places_of(self, chunk: ChunkHash) -> list[tuple[int, str, PlacedChunk]]:
        """Every place of a chunk: pack id, pack name, place."""
        query = (
            "SELECT p.id, p.name, c.hash, c.offset, c.length_bytes FROM chunks c JOIN packs p ON p.id = c.pack "
            "WHERE c.hash = ? ORDER BY p.id"
        )
        return [(pack, name, PlacedChunk(*rest)) for pack, name, *rest in self._rows(query, (chunk,))]

    def first_places(self, chunks: Sequence[ChunkHash]) -> dict[ChunkHash, tuple[str, PlacedChunk]]:
        """Pack name and place of each chunk that some pack has: the first of its `places_of`."""
        found: dict[ChunkHash, tuple[str, PlacedChunk]] = {}
        for start in range(0, len(chunks), QUERY_KEYS):
            some = chunks[start : start + QUERY_KEYS]
            query = (
                "SELECT p.name, c.hash, c.offset, c.length_bytes FROM chunks c JOIN packs p ON p.id = c.pack "  # noqa: S608
                f"WHERE c.hash IN ({','.join('?' * len(some))}) ORDER BY p.id DESC"
            )
            for name, *rest in self._rows(query, some):
                place = PlacedChunk(*rest)
                found[place.hash] = (name, place)
        return found

    def drop_chunk(self, chunk: ChunkHash, pack: int) -> None:
        """Forget one place of a chunk, and see again which artifacts are whole."""
        with self._translated():
            self._db.execute("DELETE FROM chunks WHERE hash = ? AND pack = ?", (chunk, pack))
        self.refresh(self.users_of(chunk))

    def users_of(self, chunk: ChunkHash) -> list[int]:
        """Row ids of the artifacts that list a chunk."""
        return [row[0] for row in self._rows("SELECT DISTINCT artifact FROM refs WHERE hash = ?", (chunk,))]

    def orphaned_packs(self) -> list[PackRow]:
        """Packs whose own artifact is not listed: kept, if at all, for chunks that others use."""
        query = (
            "SELECT id, name, artifact, size_bytes, mtime_ns FROM packs WHERE artifact NOT IN "
            "(SELECT hash FROM artifacts)"
        )
        return [PackRow(*row) for row in self._rows(query)]

    def needed_chunks(self, pack: int) -> list[PlacedChunk]:
        """Chunks of a pack that some listed artifact uses and no other pack has, in the order in which they lie."""
        query = (
            "SELECT c.hash, c.offset, c.length_bytes FROM chunks c WHERE c.pack = ? "
            "AND EXISTS (SELECT 1 FROM refs r WHERE r.hash = c.hash) "
            "AND NOT EXISTS (SELECT 1 FROM chunks o WHERE o.hash = c.hash AND o.pack <> c.pack) ORDER BY c.offset"
        )
        return [PlacedChunk(*row) for row in self._rows(query, (pack,))]

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def artifact(self, artifact: ArtifactHash) -> ArtifactRow | None:
        """One artifact."""
        row = self._row(f"SELECT {_ARTIFACT_COLUMNS} FROM artifacts WHERE hash = ?", (artifact,))  # noqa: S608
        return _artifact_row(row) if row else None

    def artifacts(self) -> list[ArtifactRow]:
        """All artifacts, the newest first."""
        query = f"SELECT {_ARTIFACT_COLUMNS} FROM artifacts ORDER BY created_s DESC, id DESC"  # noqa: S608
        return [_artifact_row(row) for row in self._rows(query)]

    def counts(self) -> ArtifactCounts:
        """How many artifacts there are."""
        query = "SELECT count(*), coalesce(sum(pinned), 0), coalesce(sum(pinned * held_bytes), 0) FROM artifacts"
        return ArtifactCounts(*self._row(query))

    def unpinned(self) -> list[tuple[ArtifactHash, float]]:
        """Artifacts that may be evicted, and when each was last used."""
        rows = self._rows("SELECT hash, last_used_s FROM artifacts WHERE NOT pinned")
        return [(ArtifactHash(artifact), last_used_s) for artifact, last_used_s in rows]

    def pins(self) -> list[tuple[ArtifactHash, bool]]:
        """Every artifact, and whether it is pinned."""
        return [(ArtifactHash(one), bool(pinned)) for one, pinned in self._rows("SELECT hash, pinned FROM artifacts")]

    def row_ids(self) -> dict[ArtifactHash, int]:
        """The row of every artifact."""
        return {ArtifactHash(artifact): row for artifact, row in self._rows("SELECT hash, id FROM artifacts")}

    def hashes(self) -> list[ArtifactHash]:
        """The hashes of all artifacts."""
        return [ArtifactHash(row[0]) for row in self._rows("SELECT hash FROM artifacts")]

    def add_artifact(
        self,
        artifact: ArtifactHash,
        envelope: bytes,
        manifest: Manifest,
        entries: Sequence[ChunkEntry],
        pages: Sequence[bytes],
        *,
        pinned: bool,
        created_s: float,
    ) -> int:
        """List an artifact; returns its row id. Whether it is whole is for :meth:`refresh` to say."""
        with self._translated():
            cursor = self._db.execute(
                "INSERT INTO artifacts (hash, envelope, pages, fingerprint, namespace, token_chunks, pinned, "
                "created_s, last_used_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    artifact,
                    envelope,
                    b"".join(pages),
                    manifest.fingerprint.hash,
                    manifest.namespace,
                    len(manifest.plan().token_chunks),
                    pinned,
                    created_s,
                    created_s,
                ),
            )
            row = cursor.lastrowid
            assert row is not None  # noqa: S101 - as above
            self._db.executemany(
                "INSERT INTO refs (artifact, position, hash, length_bytes) VALUES (?, ?, ?, ?)",
                (
                    (row, position, entry.hash, entry.length_bytes)
                    for position, entry in enumerate(entries)
                    if not entry.absent
                ),
            )
        return row

    def drop_artifact(self, row: int) -> None:
        """List an artifact no longer; its packs and chunks stay until they are collected."""
        with self._translated():
            for table in ("refs", "prefixes"):
                self._db.execute(f"DELETE FROM {table} WHERE artifact = ?", (row,))  # noqa: S608
            self._db.execute("DELETE FROM artifacts WHERE id = ?", (row,))

    def refresh(self, rows: Iterable[int]) -> None:
        """See again which chunks of some artifacts are held."""
        held = "SELECT 1 FROM chunks c WHERE c.hash = r.hash"
        of_it = "FROM refs r WHERE r.artifact = artifacts.id AND"
        with self._translated():
            self._db.executemany(
                "UPDATE artifacts SET "  # noqa: S608 - no value in it comes from outside
                f"complete = NOT EXISTS (SELECT 1 {of_it} NOT EXISTS ({held})), readable = NOT EXISTS "
                f"(SELECT 1 {of_it} r.position < artifacts.token_chunks AND NOT EXISTS ({held})), "
                f"held_bytes = (SELECT coalesce(sum(r.length_bytes), 0) {of_it} EXISTS ({held})) WHERE id = ?",
                ((row,) for row in rows),
            )

    def refresh_all(self) -> None:
        """:meth:`refresh` of every artifact."""
        self.refresh([row[0] for row in self._rows("SELECT id FROM artifacts")])

    def users_of_pack(self, pack: int) -> list[int]:
        """Row ids of artifacts that list a chunk of a pack."""
        query = "SELECT DISTINCT r.artifact FROM chunks c JOIN refs r ON r.hash = c.hash WHERE c.pack = ?"
        return [row[0] for row in self._rows(query, (pack,))]

    def pack_users(self, first: int, last: int) -> list[tuple[int, ArtifactHash]]:
        """The packs of a range of ids, each with every artifact that uses a chunk of it."""
        query = (
            "SELECT DISTINCT c.pack, a.hash FROM chunks c JOIN refs r ON r.hash = c.hash "
            "JOIN artifacts a ON a.id = r.artifact WHERE c.pack BETWEEN ? AND ?"
        )
        return [(pack, ArtifactHash(artifact)) for pack, artifact in self._rows(query, (first, last))]

    def set_pinned(self, artifact: ArtifactHash, *, pinned: bool) -> None:
        """Note a pin, or that there is none."""
        with self._translated():
            self._db.execute("UPDATE artifacts SET pinned = ? WHERE hash = ?", (pinned, artifact))

    def touch(self, artifact: ArtifactHash, now_s: float) -> None:
        """Note a use."""
        with self._translated():
            self._db.execute("UPDATE artifacts SET last_used_s = max(last_used_s, ?) WHERE hash = ?", (now_s, artifact))

    def correct_uses(self, too_late_s: float, now_s: float) -> None:
        """Have what was used later than a time be used now."""
        with self._translated():
            self._db.execute("UPDATE artifacts SET last_used_s = ? WHERE last_used_s > ?", (now_s, too_late_s))

    def artifacts_of(self, fingerprint: FingerprintHash, namespace: NamespaceId) -> list[ArtifactHash]:
        """Readable artifacts of a model in a namespace, the last used first."""
        query = (
            "SELECT hash FROM artifacts WHERE fingerprint = ? AND namespace = ? AND readable "
            "ORDER BY last_used_s DESC, id DESC"
        )
        return [ArtifactHash(row[0]) for row in self._rows(query, (fingerprint, namespace))]

    def count(self, namespace: NamespaceId) -> int:
        """Artifacts of a namespace."""
        return int(self._row("SELECT count(*) FROM artifacts WHERE namespace = ?", (namespace,))[0])

    # --- prefix keys --------------------------------------------------------------------------------------------------

    def add_prefixes(self, row: int, namespace: NamespaceId, keys: Sequence[PrefixKey]) -> None:
        """Let prefix keys, one per block, lead to an artifact."""
        with self._translated():
            self._db.executemany(
                "INSERT OR IGNORE INTO prefixes (namespace, key, artifact, n_blocks) VALUES (?, ?, ?, ?)",
                ((namespace, key, row, number) for number, key in enumerate(keys, start=1)),
            )

    def without_prefixes(self) -> list[ArtifactHash]:
        """Readable artifacts that no prefix key leads to."""
        query = (
            "SELECT hash FROM artifacts WHERE readable AND NOT EXISTS "
            "(SELECT 1 FROM prefixes WHERE prefixes.artifact = artifacts.id)"
        )
        return [ArtifactHash(row[0]) for row in self._rows(query)]

    def find_prefix(self, namespace: NamespaceId, keys: Sequence[PrefixKey]) -> list[tuple[ArtifactHash, int]]:
        """Readable artifacts that have one of the keys, each with its deepest; the deepest first."""
        found: dict[ArtifactHash, int] = {}
        for start in range(0, len(keys), QUERY_KEYS):
            some = keys[start : start + QUERY_KEYS]
            query = (
                "SELECT a.hash, max(p.n_blocks) FROM prefixes p JOIN artifacts a ON a.id = p.artifact "  # noqa: S608
                f"WHERE p.namespace = ? AND p.key IN ({','.join('?' * len(some))}) AND a.readable GROUP BY a.id"
            )
            for artifact, n_blocks in self._rows(query, (namespace, *some)):
                found[artifact] = max(n_blocks, found.get(artifact, 0))
        return sorted(found.items(), key=lambda item: (-item[1], item[0]))

    def prefix_rows(self, namespace: NamespaceId) -> list[tuple[PrefixKey, ArtifactHash, int]]:
        """Every key of a namespace that leads to a readable artifact."""
        query = (
            "SELECT p.key, a.hash, p.n_blocks FROM prefixes p JOIN artifacts a ON a.id = p.artifact "
            "WHERE p.namespace = ? AND a.readable ORDER BY a.id, p.n_blocks"
        )
        return [(PrefixKey(key), ArtifactHash(artifact), n) for key, artifact, n in self._rows(query, (namespace,))]


def _artifact_row(row: Sequence[Any]) -> ArtifactRow:
    number, digest, envelope, pages, complete, readable, pinned, *rest = row
    return ArtifactRow(
        number, ArtifactHash(digest), envelope, pages, bool(complete), bool(readable), bool(pinned), *rest
    )
