"""Remembered peers, kept over restarts: a small SQLite file beside the store.

It says which peers this node has met, where, and in which namespaces (by their ids, which are hashes). It is readable
by its owner alone. Losing it costs nothing that a bootstrap address or the local network does not bring back.
"""

import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from kvnet.exchange.peer_book import RememberedPeer
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.ids import PeerId
from kvnet_node.announce_store import open_private

_log = logging.getLogger(__name__)

MAX_PEERS = 1000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS peers (
    peer BLOB PRIMARY KEY, addresses TEXT NOT NULL, namespaces TEXT NOT NULL, seen_s REAL NOT NULL,
    failures INTEGER NOT NULL, due_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""


class PeerStore:
    """The table of one data directory.

    Args:
        file: the database; created 0600 when somebody is remembered.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> list[RememberedPeer]:
        """Everybody remembered, whoever was seen last first; nobody when the file cannot be read."""
        if not self._file.exists():
            return []
        try:
            with self._opened() as database:
                rows = database.execute("SELECT * FROM peers ORDER BY seen_s DESC LIMIT ?", [MAX_PEERS]).fetchall()
            return [_peer(row) for row in rows]
        except (sqlite3.Error, OSError, ValueError) as error:
            _log.warning("remembered peers could not be read: %s", error)
            return []

    def save(self, changed: Sequence[RememberedPeer], removed: Sequence[PeerId]) -> None:
        """Remember some, and forget others."""
        try:
            with self._opened() as database:
                database.executemany("DELETE FROM peers WHERE peer = ?", [[bytes(peer)] for peer in removed])
                database.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?, ?)", map(_row, changed))
        except (sqlite3.Error, OSError) as error:
            _log.warning("remembered peers could not be kept: %s", error)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(open_private(self._file, _SCHEMA)) as database, database:
            yield database


def _row(peer: RememberedPeer) -> tuple[bytes, str, str, float, int, float]:
    namespaces = json.dumps([namespace.hex() for namespace in peer.namespaces])
    return bytes(peer.peer), json.dumps(peer.addresses), namespaces, peer.seen_s, peer.failures, peer.due_s


def _peer(row: tuple[bytes, str, str, float, int, float]) -> RememberedPeer:
    peer, addresses, namespaces, seen_s, failures, due_s = row
    return RememberedPeer(
        PeerId(bytes(peer)),
        tuple(str(address) for address in json.loads(addresses)),
        tuple(NamespaceId(bytes.fromhex(text)) for text in json.loads(namespaces)),
        seen_s,
        failures,
        due_s,
    )
