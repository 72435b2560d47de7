"""libtorrent beside us: the same bytes in one file, TCP on loopback, no DHT. Optional: ``pip install libtorrent``."""

import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "listen_interfaces": "127.0.0.1:0",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "allow_multiple_connections_per_ip": True,
    "alert_mask": 0,
}
PIECE_BYTES = 1 << 20
LIMIT_S = 60.0
"""Seconds for one round."""


def available() -> bool:
    """Whether libtorrent is installed."""
    try:
        import libtorrent  # noqa: F401
    except ImportError:
        return False
    return True


def _session() -> Any:
    import libtorrent as lt

    # Its stubs know the settings only one by one.
    session: Any = lt.session
    return session(SETTINGS)


def write_torrent(directory: Path) -> None:
    """Describe ``directory/data`` in ``directory/data.torrent``."""
    import libtorrent as lt

    storage = lt.file_storage()
    lt.add_files(storage, str(directory / "data"))
    torrent = lt.create_torrent(storage, PIECE_BYTES)
    lt.set_piece_hashes(torrent, str(directory))
    (directory / "data.torrent").write_bytes(lt.bencode(torrent.generate()))


_kept: list[Any] = []


def seed(directory: Path) -> int:
    """Seed it in this process; returns the port."""
    import libtorrent as lt

    session = _session()
    info = lt.torrent_info(str(directory / "data.torrent"))
    handle = session.add_torrent({"ti": info, "save_path": str(directory)})
    while not handle.status().is_seeding:
        time.sleep(0.05)
    _kept.append((session, handle))
    port: int = session.listen_port()
    return port


def leech(torrent: Path, target: Path, port: int) -> None:
    """Get it from a seeder on loopback into a folder, then stop."""
    import libtorrent as lt

    session = _session()
    handle = session.add_torrent({"ti": lt.torrent_info(str(torrent)), "save_path": str(target)})
    waited = 0
    until = time.monotonic() + LIMIT_S
    while not (status := handle.status()).is_seeding:
        # A peer that is named before the torrent has been looked through is forgotten.
        if waited % 20 == 0 and not status.num_peers:
            handle.connect_peer(("127.0.0.1", port))
        waited += 1
        if time.monotonic() > until:
            raise TimeoutError(f"expected libtorrent to be done within {LIMIT_S:g} s, found {status.progress:.0%}")
        time.sleep(0.005)
    session.remove_torrent(handle)
