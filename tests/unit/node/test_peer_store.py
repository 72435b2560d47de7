"""Remembered peers and announced keys in their files."""

import sqlite3
from pathlib import Path

import pytest

from kvnet.exchange.announcer import KeptKey
from kvnet.exchange.peer_book import RememberedPeer
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.ids import PeerId
from kvnet_node.announce_store import AnnounceStore
from kvnet_node.peer_store import PeerStore

PEER = RememberedPeer(PeerId(b"p" * 38), ("/ip4/10.0.0.1/tcp/1", "/x"), (NamespaceId(b"n" * 32),), 100.5, 2, 7.0)
KEY = KeptKey(b"k" * 32, 4, 2, 1000.5)


def test_peers_come_back_as_they_were(tmp_path: Path) -> None:
    store = PeerStore(tmp_path / "network" / "peers.sqlite3")
    assert store.load() == []
    store.save([PEER], [])
    assert PeerStore(tmp_path / "network" / "peers.sqlite3").load() == [PEER]
    store.save([], [PEER.peer])
    assert store.load() == []


def test_keys_come_back_as_they_were_the_newest_first(tmp_path: Path) -> None:
    store = AnnounceStore(tmp_path / "announced.sqlite3")
    assert store.load() == []
    later = KeptKey(b"l" * 32, 5, 0, None)
    store.save([KEY, later], [])
    assert store.load() == [later, KEY]
    again = KeptKey(KEY.key, 9, 3, 2000.0)
    store.save([again], [later.key])
    assert store.load() == [again]


def test_others_can_read_neither_file(tmp_path: Path) -> None:
    peers, keys = tmp_path / "peers.sqlite3", tmp_path / "keys.sqlite3"
    PeerStore(peers).save([PEER], [])
    AnnounceStore(keys).save([KEY], [])
    assert [path.stat().st_mode & 0o077 for path in (peers, keys)] == [0, 0]


def test_a_damaged_file_is_set_aside_and_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "peers.sqlite3"
    file.write_bytes(b"no database at all, and longer than a header " * 20)
    store = PeerStore(file)
    assert store.load() == []
    store.save([PEER], [])
    assert store.load() == [PEER]
    assert (tmp_path / "peers.sqlite3.damaged").exists()
    assert "begun anew" in caplog.text


def test_a_row_that_makes_no_sense_costs_what_was_remembered_and_not_the_node(tmp_path: Path) -> None:
    file = tmp_path / "peers.sqlite3"
    store = PeerStore(file)
    store.save([PEER], [])
    with sqlite3.connect(file) as database:
        database.execute("UPDATE peers SET addresses = 'not json'")
    database.close()
    assert store.load() == []


def test_a_place_that_cannot_be_written_is_said_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    PeerStore(tmp_path / "file" / "peers.sqlite3").save([PEER], [])
    AnnounceStore(tmp_path / "file" / "keys.sqlite3").save([KEY], [])
    assert caplog.text.count("could not be kept") == 2
