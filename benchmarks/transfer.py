"""How fast verified bytes get from one process to another on loopback, beside what could be had.

``python -m benchmarks.transfer [--json] [--size-mib N] [--rounds N]``. Everything is interleaved: each round measures
every row once, and the medians are compared.
"""

import argparse
import json
import os
import resource
import secrets
import shutil
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import trio
from blake3 import blake3

from benchmarks import torrent
from benchmarks.report import Rate, machine, print_rates
from benchmarks.synthetic import BLOCK_BYTES, identity, make_artifact
from benchmarks.transfer_peers import scratch, served
from benchmarks.transfer_swarm import Swarm
from kvnet.exchange.chunk_fetch import ChunkFetch
from kvnet.exchange.fetcher import Located
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.node import ExchangeNode
from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.format.hashes import ArtifactHash
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.ids import PeerId
from kvnet.store.disk import DiskStore

PIECE_BYTES = 1 << 20
SYNC_BYTES = 64 << 20
"""Bytes between two fdatasync: what a journal of verified chunks needs."""

STREAM_SHARE = 8
"""The control transport's streams are measured with this part of the bytes: they are slow, and the rate is the same."""

Row = Callable[[], Awaitable[float]]
"""Moves bytes once; returns bytes per second."""


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
    """A blocking socket pair, with or without TLS 1.3 and BLAKE3, into memory or to disk."""
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
    return size_bytes / seconds


def write_only(path: Path, size_bytes: int) -> float:
    """The disk alone."""
    piece = memoryview(secrets.token_bytes(PIECE_BYTES))
    begun = time.perf_counter()
    file = _File(path)
    for _ in range(size_bytes // PIECE_BYTES):
        file.write(piece)
    file.close()
    return size_bytes / (time.perf_counter() - begun)


def leech(directory: Path, port: int, size_bytes: int) -> float:
    """libtorrent, to disk."""
    target = directory / "leeched"
    target.mkdir()
    begun = time.perf_counter()
    torrent.leech(directory / "data.torrent", target, port)
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    return size_bytes / seconds


class Fetching:
    """Our own node, connected to providers of the artifact."""

    def __init__(self, node: ExchangeNode, store: DiskStore) -> None:
        self._node = node
        self._store = store
        self._located: Located | None = None
        self._entries: tuple[ChunkEntry, ...] = ()

    async def locate(self, artifact: ArtifactHash) -> None:
        """Find it once: what is measured is the chunks."""
        self._located = await self._node.fetcher.locate(artifact)
        self._entries = await self._node.fetcher.chunk_list(self._located)

    @property
    def size_bytes(self) -> int:
        """Of all chunks."""
        return sum(entry.length_bytes for entry in self._entries)

    async def into_memory(self) -> float:
        """Every chunk fetched and verified, and let go."""
        assert self._located is not None
        assert self._node.bulk is not None
        verified = 0

        async def count(chunks: Sequence[VerifiedChunk], _peer: PeerId) -> None:
            nonlocal verified
            verified += sum(len(chunk.data) for chunk in chunks)

        providers = self._node.fetcher.providers(self._located)
        begun = time.perf_counter()
        await ChunkFetch(self._node.bulk, self._entries, range(len(self._entries)), providers, count).run()
        seconds = time.perf_counter() - begun
        assert verified == self.size_bytes
        return verified / seconds

    async def to_disk(self) -> float:
        """Into the store, published, durable; then removed."""
        assert self._located is not None
        begun = time.perf_counter()
        fetched = await self._node.fetcher.fetch(self._located, self._entries)
        seconds = time.perf_counter() - begun
        await trio.to_thread.run_sync(self._store.remove, fetched.record.hash)
        await trio.to_thread.run_sync(lambda: self._store.collect_garbage(everything=True))
        return fetched.fetched_bytes / seconds


async def receive_streams(network: LibP2PNetwork, address: str, size_bytes: int) -> float:
    """One stream of the control transport."""
    peer = await network.connect(address, timeout_s=10)
    begun = time.perf_counter()
    stream = await network.open_stream(peer, StreamKind.CHUNKS)
    for _ in range(size_bytes // PIECE_BYTES):
        await stream.receive_exactly(PIECE_BYTES)
    seconds = time.perf_counter() - begun
    await stream.aclose()
    return size_bytes / seconds


def _in_thread(call: Callable[[], float]) -> Row:
    async def run() -> float:
        return await trio.to_thread.run_sync(call)

    return run


async def measure(size_bytes: int, rounds: int, directory: Path) -> tuple[dict[str, Rate], float]:
    """All rows, and by how many MiB this process grew while it fetched.

    Args:
        size_bytes: about how many bytes each row moves.
        rounds: how often.
        directory: for everything that is written.
    """
    size_bytes = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    source = directory / "source"
    source_store = DiskStore.open(source, quota_bytes=1 << 40, min_free_bytes=0)
    artifact = make_artifact(source_store, size_bytes).hash
    source_store.close()
    store = DiskStore.open(directory / "target", quota_bytes=1 << 40, min_free_bytes=0)
    network = LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=())
    node = ExchangeNode(
        network, store, ThreadLane(), identity(), random=secrets.token_bytes, bulk=BulkEndpoint(["127.0.0.1:0"])
    )
    rates: dict[str, list[float]] = {}
    growth_mib = 0.0
    with ExitStack() as peers:
        raw = int(peers.enter_context(served("socket", str(size_bytes))))
        tls = int(peers.enter_context(served("tls", str(size_bytes))))
        streams = peers.enter_context(served("streams", str(size_bytes // STREAM_SHARE)))
        provider = peers.enter_context(served("node", str(source)))
        swarm = Swarm(source, directory, artifact)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.run)
            await swarm.start(peers, nursery)
            await node.connect(provider)
            fetching = Fetching(node, store)
            await fetching.locate(artifact)
            scratch_file = directory / "scratch"
            rows: dict[str, Row] = {
                "raw_tcp": _in_thread(lambda: receive_bare(raw, size_bytes, tls=False)),
                "tls_blake3": _in_thread(lambda: receive_bare(tls, size_bytes, tls=True)),
                "ours_memory_1": fetching.into_memory,
                "disk": _in_thread(lambda: write_only(scratch_file, size_bytes)),
                "tls_blake3_disk": _in_thread(lambda: receive_bare(tls, size_bytes, tls=True, path=scratch_file)),
                "ours_disk_1": fetching.to_disk,
                "ours_disk_4": swarm.from_four,
                FAULTY: swarm.from_two_and_two_faulty,
                "libp2p_stream": lambda: receive_streams(network, streams, size_bytes // STREAM_SHARE),
            }
            if torrent.available():
                rows["libtorrent"] = _torrent_row(peers, directory, size_bytes)
            await fetching.into_memory()  # warm: the connection, the page cache, the window
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(rounds):
                for name, row in rows.items():
                    rates.setdefault(name, []).append(await row())
            growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / _MAXRSS_PER_MIB
            nursery.cancel_scope.cancel()
        swarm.close()
    store.close()
    return {name: Rate(name, tuple(values)) for name, values in rates.items()}, growth_mib


def _torrent_row(peers: ExitStack, directory: Path, size_bytes: int) -> Row:
    folder = directory / "torrent"
    folder.mkdir()
    with (folder / "data").open("wb") as file:
        for _ in range(size_bytes // PIECE_BYTES):
            file.write(secrets.token_bytes(PIECE_BYTES))
    torrent.write_torrent(folder)
    port = int(peers.enter_context(served("torrent", str(folder))))
    return _in_thread(lambda: leech(folder, port, size_bytes))


_MAXRSS_PER_MIB = 1 << 20 if sys.platform == "darwin" else 1 << 10

FAULTY = "ours_disk_4_faulty"

FIGURES = (
    "ours_memory_1",
    "ours_disk_1",
    "ours_disk_4",
    "tls_blake3",
    "tls_blake3_disk",
    "raw_tcp",
    "disk",
    "libp2p_stream",
    "libtorrent",
)
"""Rows of the last line of ``--json``, in its order."""

TITLES = {
    "tls_blake3": "bare TLS 1.3 pair, BLAKE3",
    "ours_memory_1": "kvnet, 1 provider, into memory",
    "raw_tcp": "bare TCP pair, not encrypted, not hashed",
    "tls_blake3_disk": "bare TLS 1.3 pair, BLAKE3, to disk",
    "ours_disk_1": "kvnet, 1 provider, to disk",
    "ours_disk_4": "kvnet, 4 providers, to disk",
    FAULTY: "the same, one at 1 %, one killed half-way",
    "disk": "disk alone",
    "libp2p_stream": "a py-libp2p stream, not hashed",
    "libtorrent": "libtorrent, 1 seeder, to disk",
}


def main(arguments: list[str] | None = None) -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args([] if arguments is None else arguments)
    size_bytes = options.size_mib << 20
    with scratch() as folder:
        rates, growth_mib = trio.run(measure, size_bytes, options.rounds, Path(folder))
    listed = [Rate(title, rates[name].bytes_per_s) for name, title in TITLES.items() if name in rates]
    print_rates(f"transfer, {options.size_mib} MiB, two processes on loopback, {options.rounds} rounds", listed)
    print(f"  this process grew by {growth_mib:.0f} MiB")
    print(f"  {machine()}")
    if options.json:
        medians = {name: round(statistics.median(rate.bytes_per_s) / 1e6, 1) for name, rate in rates.items()}
        print(json.dumps({"type": "transfer faulty", f"{FAULTY}_mb_s": medians[FAULTY]}))
        figures = {f"{name}_mb_s": medians.get(name) for name in FIGURES}
        print(
            json.dumps(
                {"type": "transfer", "size_bytes": size_bytes, **figures, "node_rss_growth_mib": round(growth_mib, 1)}
            )
        )


if __name__ == "__main__":
    main(sys.argv[1:])
