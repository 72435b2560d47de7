"""Bytes through a link, both ways, with TLS and without."""

import os

import pytest
import trio

from kvnet.errors import NetworkError
from kvnet.format.hashes import blake3_hash
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.link import Link
from tests.loopback.network.bulk.conftest import Listening
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback

SIZE = 24 << 20
"""More than the sockets of both sides take unread."""


def receive(link: Link, n_bytes: int) -> bytes:
    view = memoryview(bytearray(n_bytes))
    link.receive_into(view, silence_s=10)
    return blake3_hash(view)


def send(link: Link, data: bytes) -> None:
    link.send_all(memoryview(data), stall_s=10)


async def take(link: Link, found: list[bytes]) -> None:
    found.append(await trio.to_thread.run_sync(receive, link, SIZE))


@pytest.mark.parametrize("cipher", ["tls13", "none"])
async def test_what_is_sent_arrives_both_ways(cipher: str, nursery: trio.Nursery) -> None:
    endpoint = BulkEndpoint(["127.0.0.1:0"], cipher=cipher)
    await nursery.start(endpoint.run)
    listening = Listening(endpoint)
    dialled = await endpoint.dial(listening.agree(cipher), ["127.0.0.1"], endpoint.port, timeout_s=PATIENCE_S)
    await listening.arrived.wait()
    (accepted,) = listening.links
    data = os.urandom(SIZE)
    for sending, receiving in ((dialled, accepted), (accepted, dialled)):
        found: list[bytes] = []
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as both:
                both.start_soon(trio.to_thread.run_sync, send, sending, data)
                # The sender has filled every buffer before anybody reads.
                await trio.sleep(0.1)
                both.start_soon(take, receiving, found)
        assert found == [blake3_hash(data)]
    for link in (dialled, accepted):
        link.close()


async def test_end_is_an_error_and_not_silence(listening: Listening) -> None:
    dialled = await listening.dial(listening.agree())
    await listening.arrived.wait()
    listening.links[0].close()
    with trio.fail_after(PATIENCE_S), pytest.raises(NetworkError, match=r"the peer ended the connection|broke"):
        await trio.to_thread.run_sync(receive, dialled, 1)
    dialled.close()
