"""A node in a process of its own, to be stopped and killed. Prints its address; serves until it is ended.

Control streams echo length-prefixed messages. On a chunk stream the first byte says what to do:
``S`` swallow everything; ``H`` send a length of 64 MiB and then only 1 MiB of it; ``B`` send as many MiB as the next
two bytes say, in writes of as many KiB as the two after them.
"""

import hashlib
import sys

import trio

from kvnet.network.interface import ByteStream, StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.ids import PeerId

MIB = 1024 * 1024


async def echo(peer: PeerId, stream: ByteStream) -> None:
    while True:
        size = await stream.receive_exactly(4)
        await stream.send_all(size + await stream.receive_exactly(int.from_bytes(size, "big")))


async def chunks(peer: PeerId, stream: ByteStream) -> None:
    what = await stream.receive_exactly(1)
    if what == b"S":
        while await stream.receive_some(MIB):
            pass
    elif what == b"H":
        await stream.send_all((64 * MIB).to_bytes(4, "big") + bytes(MIB))
        await trio.sleep_forever()
    else:
        total = int.from_bytes(await stream.receive_exactly(2), "big") * MIB
        piece = bytes(int.from_bytes(await stream.receive_exactly(2), "big") * 1024)
        for _ in range(total // len(piece)):
            await stream.send_all(piece)


async def main(name: str, listen: str, *bootstrap: str) -> None:
    seed = hashlib.sha256(name.encode()).digest()
    network = LibP2PNetwork(seed, listen=[listen], bootstrap=bootstrap, rebootstrap_interval_s=1.0)
    network.set_handler(StreamKind.CONTROL, echo)
    network.set_handler(StreamKind.CHUNKS, chunks)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        print(network.addresses()[0], flush=True)  # noqa: T201 — the parent reads it


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
