"""The ledger of what reuse has spared: per artifact, prefill paid once against seconds and tokens saved since.

It holds artifact hashes, names given by the person, counts and seconds; no prompt, no token and no text. It outlives
the artifacts. Money is no part of it: prices are the reader's.

A small SQLite file. With a write-ahead log and ``synchronous=NORMAL`` a killed process loses nothing that was noted,
and a power failure at most the newest notes; noting takes well under a millisecond, so it runs where the answer ends.
"""

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnet.format.hashes import ArtifactHash, artifact_text

if TYPE_CHECKING:
    from kvnet.exchange.answers import Finished
    from kvnet.exchange.generation import Answer

_log = logging.getLogger(__name__)

LIVE = ""
"""In place of an artifact: caches that were still in memory."""
OLDER = "older"
"""In place of artifacts whose rows were added up, because there were too many."""
MAX_ARTIFACTS = 20_000
"""Rows; a conversation leaves one for each of its turns."""
BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS artifacts (
    artifact TEXT PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, origin TEXT NOT NULL, tokens INTEGER NOT NULL,
    prefilled_tokens INTEGER NOT NULL, prefill_s REAL NOT NULL, fetch_s REAL NOT NULL, bytes INTEGER NOT NULL,
    made_s INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS uses (
    artifact TEXT NOT NULL, source TEXT NOT NULL, uses INTEGER NOT NULL, tokens INTEGER NOT NULL,
    saved_s REAL NOT NULL, bytes INTEGER NOT NULL, last_s INTEGER NOT NULL, PRIMARY KEY (artifact, source)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
    one INTEGER PRIMARY KEY CHECK (one = 1), requests INTEGER NOT NULL, reused_requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, prefilled_tokens INTEGER NOT NULL, prefill_s REAL NOT NULL, since_s INTEGER NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Use:
    """Reuse of one artifact from one source, added up.

    Attributes:
        artifact: artifact hash text, or ``LIVE`` or ``OLDER``.
        source: "ram", "disk" or "peer".
        uses: answers that continued from it.
        tokens: prompt tokens not computed.
        saved_s: seconds of prefill spared, less what looking up, fetching and restoring took.
        n_bytes: stored bytes read or fetched for it.
        last_s: when last, in seconds since 1970.
    """

    artifact: str
    source: str
    uses: int
    tokens: int
    saved_s: float
    n_bytes: int
    last_s: int


@dataclass(frozen=True, slots=True)
class Made:
    """How an artifact came here, and what was paid for it before its first use.

    Attributes:
        artifact: artifact hash text.
        name: the name it was given, or "".
        model: the model's name, or "".
        origin: "add", "interrupted" (an add that ended early, with the name it is to give), "conversation" or "fetch".
        tokens: its tokens.
        prefilled_tokens, prefill_s: computed for it.
        fetch_s: seconds of an explicit fetch.
        n_bytes: K/V bytes that were new.
        made_s: when, in seconds since 1970.
    """

    artifact: str
    name: str
    model: str
    origin: str
    tokens: int
    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    fetch_s: float = 0.0
    n_bytes: int = 0
    made_s: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """All answers noted: how many, how many reused anything, tokens of their prompts, and what was still computed."""

    requests: int = 0
    reused_requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    since_s: int = 0


class Savings:
    """The ledger of one data directory. Noting never raises: an answer is worth more than a line about it.

    Args:
        file: the database; created 0600 when something is noted.
        now: seconds since 1970.
    """

    def __init__(self, file: Path, *, now: Callable[[], float] = time.time) -> None:
        self._file = file
        self._now = now
        self._database: sqlite3.Connection | None = None

    # --- noting ---

    def note(self, finished: "Finished") -> None:
        """An answer of the endpoint is complete."""
        reuse, done = finished.reuse, finished.completed
        if reuse.sources:
            uses = self._uses(
                ((artifact_text(each.artifact), each.source, each.tokens, each.n_bytes) for each in reuse.sources),
                reuse.saved_s,
            )
        else:
            live = [(LIVE, reuse.source, reuse.reused_tokens, 0)] if reuse.reused_tokens else []
            uses = self._uses(live, reuse.saved_s)
        self._write(lambda to: self._add(to, uses, reuse.prompt_tokens, done.prefilled_tokens, done.prefill_s))

    def note_answer(self, answer: "Answer", saved_s: float) -> None:
        """An answer of ``ask`` or ``generate`` is complete; ``saved_s`` seconds of prefill were spared, net."""
        uses = self._uses(
            ((artifact_text(each.artifact), each.source, each.tokens, each.n_bytes) for each in answer.sources),
            saved_s,
        )
        self._write(lambda to: self._add(to, uses, answer.prompt_tokens, answer.prefilled_tokens, answer.prefill_s))

    def made(self, made: Made) -> None:
        """An artifact was added, kept after an answer, or fetched. Made again it is paid for again."""
        self._write(lambda to: self._make(to, made))

    def added(
        self, artifact: ArtifactHash, *, name: str, model: str, tokens: int, prefilled_tokens: int, prefill_s: float,
        n_bytes: int,
    ) -> None:  # fmt: skip
        """A named context was computed ahead of its use."""
        text = artifact_text(artifact)
        self.made(Made(text, name, model, "add", tokens, prefilled_tokens, prefill_s, n_bytes=n_bytes))

    def kept(self, artifact: ArtifactHash, *, model: str, tokens: int) -> None:
        """What an answer computed was kept; its prefill had to be paid for the answer itself."""
        self.made(Made(artifact_text(artifact), "", model, "conversation", tokens))

    def begun(self, artifact: ArtifactHash, *, name: str, model: str, tokens: int) -> None:
        """An add ended early, and what it had computed was kept."""
        self.made(Made(artifact_text(artifact), name, model, "interrupted", tokens))

    def fetched(
        self, artifact: ArtifactHash, *, name: str, model: str, tokens: int, seconds: float, n_bytes: int
    ) -> None:
        """An artifact was fetched ahead of its use."""
        text = artifact_text(artifact)
        self.made(Made(text, name, model, "fetch", tokens, fetch_s=seconds, n_bytes=n_bytes))

    def _uses(self, sources: Iterable[tuple[str, str, int, int]], saved_s: float) -> list[Use]:
        """Uses of several sources; seconds saved go to each by its tokens."""
        found = list(sources)
        total = sum(tokens for _, _, tokens, _ in found) or 1
        at = int(self._now())
        return [
            Use(artifact, source, 1, tokens, saved_s * tokens / total, n_bytes, at)
            for artifact, source, tokens, n_bytes in found
        ]

    def _add(
        self, to: sqlite3.Connection, uses: list[Use], prompt_tokens: int, prefilled_tokens: int, prefill_s: float
    ) -> None:
        for use in uses:
            to.execute(
                "INSERT INTO uses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET uses = uses + excluded.uses, "
                "tokens = tokens + excluded.tokens, saved_s = saved_s + excluded.saved_s, "
                "bytes = bytes + excluded.bytes, last_s = max(last_s, excluded.last_s)",
                (use.artifact, use.source, use.uses, use.tokens, use.saved_s, use.n_bytes, use.last_s),
            )
        to.execute(
            "INSERT INTO totals VALUES (1, 1, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + 1, "
            "reused_requests = reused_requests + excluded.reused_requests, "
            "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "prefilled_tokens = prefilled_tokens + excluded.prefilled_tokens, "
            "prefill_s = prefill_s + excluded.prefill_s",
            (int(bool(uses)), prompt_tokens, prefilled_tokens, prefill_s, int(self._now())),
        )

    def _make(self, to: sqlite3.Connection, made: Made) -> None:
        to.execute(
            "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "name = CASE excluded.name WHEN '' THEN name ELSE excluded.name END, "
            "prefilled_tokens = prefilled_tokens + excluded.prefilled_tokens, "
            "prefill_s = prefill_s + excluded.prefill_s, fetch_s = fetch_s + excluded.fetch_s, "
            "bytes = bytes + excluded.bytes",
            (
                made.artifact, made.name, made.model, made.origin, made.tokens, made.prefilled_tokens, made.prefill_s,
                made.fetch_s, made.n_bytes, int(self._now()),
            ),
        )  # fmt: skip
        if to.execute("SELECT count(*) FROM artifacts").fetchone()[0] > MAX_ARTIFACTS:
            _fold_oldest(to, MAX_ARTIFACTS // 2)

    # --- reading ---

    def artifacts(self) -> list[Made]:
        """Every artifact that was ever noted, the newest first."""
        rows = self._read("SELECT * FROM artifacts ORDER BY made_s DESC, artifact")
        return [Made(*row) for row in rows]

    def origins(self) -> dict[str, Made]:
        """How artifacts came here, by artifact hash text; none when the file cannot be read."""
        try:
            return {each.artifact: each for each in self.artifacts()}
        except (sqlite3.Error, OSError) as error:
            _log.warning("where artifacts came from cannot be read: %s", type(error).__name__)
            return {}

    def uses(self) -> list[Use]:
        """Every use, the one that saved most first."""
        return [Use(*row) for row in self._read("SELECT * FROM uses ORDER BY saved_s DESC, tokens DESC, artifact")]

    def totals(self) -> Totals:
        """All answers added up."""
        rows = self._read(
            "SELECT requests, reused_requests, prompt_tokens, prefilled_tokens, prefill_s, since_s FROM totals"
        )
        return Totals(*rows[0]) if rows else Totals()

    def close(self) -> None:
        """Close the database; it opens again when it is needed."""
        if self._database is not None:
            self._database.close()
            self._database = None

    # --- the file ---

    def _write(self, work: Callable[[sqlite3.Connection], None]) -> None:
        try:
            database = self._open()
            with database:
                work(database)
        except (sqlite3.Error, OSError) as error:
            _log.warning("the savings of an answer were not noted: %s", type(error).__name__)
            self.close()

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        if not self._file.exists():
            return []
        return self._open().execute(query).fetchall()

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            try:
                self._database = self._connect()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._set_aside()
                self._database = self._connect()
        return self._database

    def _connect(self) -> sqlite3.Connection:
        # SQLite would create it as the umask says; its log and index files take over the mode of the database.
        os.close(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self._file, timeout=BUSY_TIMEOUT_S)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _set_aside(self) -> None:
        aside = self._file.with_name(f"{self._file.name}.damaged")
        self._file.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)
        _log.warning("the ledger of savings was damaged and is now %s; a new one begins", aside.name)


def _fold_oldest(to: sqlite3.Connection, count: int) -> None:
    """Add the rows of the oldest artifacts without a name up into one; what they saved stays in the totals."""
    doomed = "SELECT artifact FROM artifacts WHERE origin = 'conversation' ORDER BY made_s, artifact LIMIT ?"
    to.execute(
        f"INSERT INTO uses SELECT '{OLDER}', source, sum(uses), sum(tokens), sum(saved_s), sum(bytes), max(last_s) "  # noqa: S608
        f"FROM uses WHERE artifact IN ({doomed}) GROUP BY source ON CONFLICT DO UPDATE SET "
        "uses = uses + excluded.uses, tokens = tokens + excluded.tokens, "
        "saved_s = saved_s + excluded.saved_s, bytes = bytes + excluded.bytes, "
        "last_s = max(last_s, excluded.last_s)",
        (count,),
    )
    to.execute(f"DELETE FROM uses WHERE artifact IN ({doomed})", (count,))  # noqa: S608
    to.execute(f"DELETE FROM artifacts WHERE artifact IN ({doomed})", (count,))  # noqa: S608
