"""What could be had without us: bare socket pairs, the disk alone, and where a process's time went."""

import os
import secrets
import socket
import ssl
import time
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

PIECE_BYTES = 1 << 20
SYNC_BYTES = 64 << 20
"""Bytes between two fdatasync: what a journal of verified chunks needs."""


class _File:
    """A file that is written as a store writes: in order, and on the medium every so many bytes."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._offset = self._synced = 0

    def write(self, view: memoryview) -> None:
        """Write behind what is there."""
        self._offset += os.pwrite(self._handle, view, self._offset)
        if self._offset - self._synced >= SYNC_BYTES:
            os.fdatasync(self._handle)
            self._synced = self._offset

    def close(self) -> None:
        """All of it on the medium."""
        os.fdatasync(self._handle)
        os.close(self._handle)


CORRECTIONS_S: list[float] = []
"""Processor time to take off what this process spent for a row: warming memory is no row's own. What a child spent for
the row is negative."""


def warm_memory(directory: Path, size_bytes: int) -> None:
    """Let so much memory be free that was in use just now; before each row that writes files.

    A virtual machine may give memory that stays free for two seconds back to its host. Getting it anew costs 2 s of
    processor time per GB here, which whoever writes next would pay: four times what the writing costs.
    """
    begun = time.thread_time()
    path = directory / "warm"
    piece = memoryview(bytearray(PIECE_BYTES))
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in range(size_bytes // PIECE_BYTES + 64):
        os.pwrite(handle, piece, number * PIECE_BYTES)
    os.close(handle)
    path.unlink()
    CORRECTIONS_S.append(time.thread_time() - begun)


def _receive(connection: socket.socket, size_bytes: int, *, hashed: bool, file: _File | None) -> None:
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    for _ in range(size_bytes // PIECE_BYTES):
        filled = 0
        while filled < PIECE_BYTES:
            received = connection.recv_into(view[filled:])
            if not received:
                raise ConnectionError("the sender has gone")
            filled += received
        if hashed:
            blake3(view).digest()
        if file is not None:
            file.write(view)


def receive_bare(port: int, size_bytes: int, *, tls: bool, path: Path | None = None) -> float:
    """A blocking socket pair, with or without TLS 1.3 and BLAKE3, into memory or to disk; bytes per second."""
    if path is not None:
        warm_memory(path.parent, size_bytes)
    with socket.create_connection(("127.0.0.1", port)) as plain:
        connection: socket.socket = plain
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = context.wrap_socket(plain)
        begun = time.perf_counter()
        file = _File(path) if path else None
        _receive(connection, size_bytes, hashed=tls, file=file)
        if file:
            file.close()
        seconds = time.perf_counter() - begun
        connection.close()
    if path is not None:
        path.unlink()
    return size_bytes / seconds


def write_only(path: Path, size_bytes: int) -> float:
    """The disk alone; bytes per second."""
    warm_memory(path.parent, size_bytes)
    piece = memoryview(secrets.token_bytes(PIECE_BYTES))
    begun = time.perf_counter()
    file = _File(path)
    for _ in range(size_bytes // PIECE_BYTES):
        file.write(piece)
    file.close()
    seconds = time.perf_counter() - begun
    path.unlink()
    return size_bytes / seconds


def processor_s(pids: Iterable[int]) -> float:
    """Processor time of other processes so far, in seconds; 0 where the system does not tell (`proc(5)`)."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
