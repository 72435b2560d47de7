"""The index: which chunk lies where, which artifact uses it, which prefix keys lead to it. SQLite, and only a cache.

Files are the truth. Everything here follows from the packs and the small marker files beside them (and, for prefix
keys, from secrets that whoever opens the store has), so a lost commit costs a scan and nothing else. That is why
commits do not wait for the medium (``synchronous = NORMAL`` under WAL keeps the database whole, not the last commit).
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvnet.errors import StoreError, StoreFullError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash, FingerprintHash, NamespaceId, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.store.osfile import PRIVATE_FILE_MODE

SCHEMA_VERSION: Final = 1
"""An index of another version is made anew."""

QUERY_KEYS: Final = 500
"""Keys per query; SQLite allows 999 variables in every build."""

_SCHEMA: Final = """
CREATE TABLE packs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    artifact BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL
);
CREATE INDEX packs_by_artifact ON packs (artifact);
CREATE TABLE chunks (
    hash BLOB NOT NULL,
    pack INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    length_bytes INTEGER NOT NULL,
    PRIMARY KEY (hash, pack)
) WITHOUT ROWID;
CREATE INDEX chunks_by_pack ON chunks (pack);
CREATE TABLE artifacts (
    id INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    envelope BLOB NOT NULL,
    pages BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    namespace BLOB NOT NULL,
    token_chunks INTEGER NOT NULL,
    pinned INTEGER NOT NULL,
    complete INTEGER NOT NULL DEFAULT 0,
    readable INTEGER NOT NULL DEFAULT 0,
    held_bytes INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    last_used_s REAL NOT NULL
);
CREATE INDEX artifacts_by_model ON artifacts (fingerprint, namespace);
CREATE TABLE refs (
    artifact INTEGER NOT NULL,
    position INTEGER NOT NULL,
    hash BLOB NOT NULL,
    length_bytes INTEGER NOT NULL,
    PRIMARY KEY (artifact, position)
) WITHOUT ROWID;
CREATE INDEX refs_by_hash ON refs (hash);
CREATE TABLE prefixes (
    namespace BLOB NOT NULL,
    key BLOB NOT NULL,
    artifact INTEGER NOT NULL,
    n_blocks INTEGER NOT NULL,
    PRIMARY KEY (namespace, key, artifact)
) WITHOUT ROWID;
CREATE INDEX prefixes_by_artifact ON prefixes (artifact);
"""


class IndexUnreadableError(StoreError):
    """The index is damaged or of another version; the packs can make a new one."""


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


class Index:
    """One open index. Not safe for threads by itself: the store's lock covers it.

    Args:
        path: the database file; created 0600 when missing.

    Raises:
        IndexUnreadableError: damaged, or of another version.
        StoreError: the disk failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        new = not self._path.exists()
        if new:
            try:
                # SQLite gives its side files the mode of the database.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE))
            except OSError as error:
                raise StoreError(f"the index {self._path} cannot be created: {error.strerror}") from error
        with self._translated():
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        with self._translated():
            # Nobody else opens it: the data directory is locked. Then SQLite needs no memory-mapped file beside it,
            # whose pages kill the process with SIGBUS when the drive has gone.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version != SCHEMA_VERSION:
                raise IndexUnreadableError(f"expected an index of version {SCHEMA_VERSION}, found {version}")
            elif db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise IndexUnreadableError("the index is damaged")

    @classmethod
    def open(cls, path: Path) -> "Index":
        """The index at ``path``; a new, empty one when there is none or it cannot be used.

        Raises:
            StoreError: the disk failed.
        """
        try:
            return cls(path)
        except IndexUnreadableError:
            _remove(path)
            return cls(path)

    def start_anew(self) -> None:
        """Throw everything away and start with an empty index.

        Raises:
            StoreError: the disk failed.
        """
        self._db.close()
        _remove(self._path)
        self._db = self._connect()

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def checkpoint(self) -> None:
        """Move what was committed into the database file, and empty the log beside it."""
        with self._translated():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def files(self) -> list[Path]:
        """The database and its side files."""
        return _files(self._path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it, or nothing.

        Raises:
            StoreFullError: the disk is full.
            IndexUnreadableError: the database is damaged.
            StoreError: the disk failed.
        """
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise StoreFullError(
                    "there is no room for the index", hint="Make room on the disk, or remove artifacts: `kvnet rm`."
                ) from error
            # The last three: tables that contradict each other, or are others than ours.
            if code in {
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
                sqlite3.SQLITE_CONSTRAINT,
                sqlite3.SQLITE_MISMATCH,
                sqlite3.SQLITE_ERROR,
            }:
                raise IndexUnreadableError("the index is damaged", hint="Run `kvnet store rebuild`.") from error
            raise StoreError(f"the index failed: {error}", hint="Run `kvnet store rebuild`.") from error

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._translated():
            return self._db.execute(query, parameters).fetchall()

    def _row(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        rows = self._rows(query, parameters)
        return rows[0] if rows else None

    # --- packs and chunks ---------------------------------------------------------------------------------------------

    def packs(self) -> list[PackRow]:
        """All packs."""
        return [PackRow(*row) for row in self._rows("SELECT id, name, artifact, size_bytes, mtime_ns FROM packs")]

    def packs_of(self, artifact: ArtifactHash) -> list[PackRow]:
        """The packs that carry an artifact's manifest."""
        query = "SELECT id, name, artifact, size_bytes, mtime_ns FROM packs WHERE artifact = ?"
        return [PackRow(*row) for row in self._rows(query, (artifact,))]

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

    def pack_users(self) -> list[tuple[int, ArtifactHash]]:
        """Every pack with every artifact that uses a chunk of it."""
        query = (
            "SELECT DISTINCT c.pack, a.hash FROM chunks c JOIN refs r ON r.hash = c.hash "
            "JOIN artifacts a ON a.id = r.artifact"
        )
        return [(pack, ArtifactHash(artifact)) for pack, artifact in self._rows(query)]

    def set_pinned(self, artifact: ArtifactHash, *, pinned: bool) -> None:
        """Note a pin, or that there is none."""
        with self._translated():
            self._db.execute("UPDATE artifacts SET pinned = ? WHERE hash = ?", (pinned, artifact))

    def touch(self, artifact: ArtifactHash, now_s: float) -> None:
        """Note a use."""
        with self._translated():
            self._db.execute("UPDATE artifacts SET last_used_s = max(last_used_s, ?) WHERE hash = ?", (now_s, artifact))

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


def _files(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


def _remove(path: Path) -> None:
    try:
        for file in _files(path):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"the index {path} cannot be removed: {error.strerror}") from error


def _artifact_row(row: Sequence[Any]) -> ArtifactRow:
    number, digest, envelope, pages, complete, readable, pinned, *rest = row
    return ArtifactRow(
        number, ArtifactHash(digest), envelope, pages, bool(complete), bool(readable), bool(pinned), *rest
    )
