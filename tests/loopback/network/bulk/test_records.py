"""Records of every size through a link: none waits for bytes that follow it."""

import os

import pytest
import trio

from tests.loopback.network.bulk.conftest import Listening

pytestmark = pytest.mark.loopback


async def test_records_of_every_size_arrive_though_nothing_follows(listening: Listening) -> None:
    endpoint = listening.endpoint
    dialled = await endpoint.dial(listening.agree(), ["127.0.0.1"], endpoint.port, timeout_s=60)
    await listening.arrived.wait()
    (accepted,) = listening.links
    # Each piece is a record or several: full ones, a little less and more, tiny ones, and one at a time at the end.
    sizes = [1, 16384, 16383, 16385, 1, 1, 40_000, *[3] * 500, 16384 * 20, 5, *range(16350, 16400), 1, 1]
    pieces = [os.urandom(size) for size in sizes]

    def send_and_hear_of_it() -> None:
        for piece in pieces:
            accepted.send_all(memoryview(piece), stall_s=60)
        assert accepted.receive_frame(silence_s=60) == b"all"

    def receive_all() -> None:
        for piece in pieces:
            view = memoryview(bytearray(len(piece)))
            dialled.receive_into(view, silence_s=60)
            assert view == piece
        dialled.send_all(memoryview(b"\0\0\0\3all"), stall_s=60)

    with trio.fail_after(60):
        async with trio.open_nursery() as both:
            both.start_soon(trio.to_thread.run_sync, send_and_hear_of_it)
            both.start_soon(trio.to_thread.run_sync, receive_all)
    for link in (dialled, accepted):
        link.close()
