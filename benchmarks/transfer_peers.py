"""The sending ends of the transfer benchmark: ``python -m benchmarks.transfer_peers KIND`` is one of them."""

import contextlib
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from benchmarks.synthetic import identity
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.network.bulk.certificates import make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import ByteStream, StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.serve import ServeLimits
from kvnet.store.disk import DiskStore

PIECE_BYTES = 1 << 20

QUIET = AnnounceLimits(interval_s=24 * 3600.0, verify_s=0.0)
"""Nodes of a benchmark tell the DHT nothing: half a dozen of them on one machine would do little else at times."""


@dataclass(frozen=True)
class Served:
    """A sender in another process, and the line it printed when it was ready."""

    process: subprocess.Popen[str]
    ready: str

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()


@contextlib.contextmanager
def serving(kind: str, *arguments: str) -> Iterator[Served]:
    """Run a sender in another process."""
    command = [sys.executable, "-m", "benchmarks.transfer_peers", kind, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _serve_sockets(size_bytes: int, wrap: Callable[[socket.socket], socket.socket]) -> None:
    piece = memoryview(secrets.token_bytes(PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            accepted, _ = listener.accept()
            with contextlib.suppress(OSError), wrap(accepted) as connection:
                for _ in range(size_bytes // PIECE_BYTES):
                    connection.sendall(piece)
                connection.recv(1)


def serve_socket(size_bytes: int) -> None:
    """Bare TCP."""
    _serve_sockets(size_bytes, lambda accepted: accepted)


def serve_tls(size_bytes: int) -> None:
    """A blocking TLS 1.3 socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    make_certificate().load_into(context)
    _serve_sockets(size_bytes, lambda accepted: context.wrap_socket(accepted, server_side=True))


async def serve_streams(size_bytes: int) -> None:
    """The chunk streams of the control transport."""
    piece = secrets.token_bytes(PIECE_BYTES)

    async def send(_peer: PeerId, stream: ByteStream) -> None:
        for _ in range(size_bytes // PIECE_BYTES):
            await stream.send_all(piece)

    network = LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=())
    network.set_handler(StreamKind.CHUNKS, send)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        print(network.addresses()[0], flush=True)


async def serve_node(store_directory: str, rate_bytes_s: float = 0.0) -> None:
    """A whole node that holds the artifact, and sends it at no more than a rate; 0 for any."""
    store = DiskStore.open(Path(store_directory), quota_bytes=1 << 40, min_free_bytes=0)
    node = ExchangeNode(
        LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=()),
        store,
        ThreadLane(),
        identity(),
        random=secrets.token_bytes,
        options=NodeOptions(announce=QUIET, serve=ServeLimits(total_bytes_per_s=rate_bytes_s)),
        bulk=BulkEndpoint(["127.0.0.1:0"]),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        print(node.addresses()[0], flush=True)


def serve_torrent(directory: str) -> None:
    """A libtorrent seeder: the same bytes as one file, TCP on loopback, nothing else."""
    from benchmarks.torrent import seed

    print(seed(Path(directory)), flush=True)
    threading.Event().wait()


def leech_torrent(directory: str, port: str) -> None:
    """Leech it once and print the seconds and the processor time that took.

    Not in the process that fetches: what libtorrent keeps in memory is no node's.
    """
    from benchmarks.torrent import leech

    target = Path(directory) / "leeched"
    target.mkdir()
    begun, spent = time.perf_counter(), time.process_time()
    leech(Path(directory) / "data.torrent", target, int(port))
    print(time.perf_counter() - begun, time.process_time() - spent, flush=True)
    shutil.rmtree(target)


def main(kind: str, argument: str, *more: str) -> None:
    """Serve until killed."""
    match kind:
        case "socket":
            serve_socket(int(argument))
        case "tls":
            serve_tls(int(argument))
        case "streams":
            trio.run(serve_streams, int(argument))
        case "node":
            trio.run(serve_node, argument, *map(float, more))
        case "torrent":
            serve_torrent(argument)
        case "leech":
            leech_torrent(argument, *more)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for the bytes of one run; on the disk that is measured."""
    return tempfile.TemporaryDirectory(prefix="kvnet-transfer-", dir=os.environ.get("KVNET_BENCH_DIR"))


if __name__ == "__main__":
    main(*sys.argv[1:])
