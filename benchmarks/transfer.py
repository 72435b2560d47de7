"""What the wire costs: one kvnet stream between two processes on loopback, beside a bare TCP socket."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import trio

from benchmarks.report import print_rates, time_rounds
from kvnet.network.interface import ByteStream, StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.ids import PeerId

PIECE = bytes(1024 * 1024)
N_PIECES = 64
SIZE_BYTES = len(PIECE) * N_PIECES
ROUNDS = 3


@contextlib.contextmanager
def served(kind: str) -> Iterator[str]:
    """Run a sender in another process; yields the address it prints."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.transfer", kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def serve_socket() -> None:
    """Send the bytes to everybody who connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                for _ in range(N_PIECES):
                    connection.sendall(PIECE)


async def serve_streams() -> None:
    """Send the bytes on every chunk stream that a peer opens."""

    async def send(_peer: PeerId, stream: ByteStream) -> None:
        for _ in range(N_PIECES):
            await stream.send_all(PIECE)

    network = LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=())
    network.set_handler(StreamKind.CHUNKS, send)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        print(network.addresses()[0], flush=True)


def receive_socket(port: int) -> None:
    """Receive everything over a bare socket."""
    buffer = bytearray(len(PIECE))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        left = SIZE_BYTES
        while left:
            left -= connection.recv_into(buffer)


async def receive_streams(address: str) -> list[float]:
    """Receive everything over kvnet streams, several rounds on one connection; returns bytes per second."""
    network = LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=())
    rates = []
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        peer = await network.connect(address, timeout_s=10)
        for _ in range(ROUNDS + 1):
            begun = trio.current_time()
            stream = await network.open_stream(peer, StreamKind.CHUNKS)
            for _ in range(N_PIECES):
                await stream.receive_exactly(len(PIECE))
            rates.append(SIZE_BYTES / (trio.current_time() - begun))
            await stream.aclose()
        nursery.cancel_scope.cancel()
    return rates[1:]


def main() -> None:
    """Print the rates."""
    from benchmarks.report import Rate

    with served("socket") as port:
        bare = time_rounds(
            "bare TCP socket, not encrypted", SIZE_BYTES, lambda: receive_socket(int(port)), rounds=ROUNDS
        )
    with served("streams") as address:
        ours = Rate("kvnet stream (libp2p: Noise, Yamux)", tuple(trio.run(receive_streams, address)))
    print_rates(f"transfer, {SIZE_BYTES // 1024**2} MiB, two processes on loopback, unverified", [bare, ours])


if __name__ == "__main__":
    if sys.argv[1] == "socket":
        serve_socket()
    else:
        trio.run(serve_streams)
