"""Memory of both ends while much more than they may use goes through them."""

import resource
import sys

import pytest
import trio

from kvnet.network.arrivals import ChunkArrived
from tests.loopback.network.bulk.conftest import Listening
from tests.loopback.network.bulk.test_chunks import MIB, Source, asking, served
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback

MAXRSS_PER_MIB = 1 << 20 if sys.platform == "darwin" else 1 << 10


@pytest.mark.parametrize("n_chunks", [512, pytest.param(10_240, marks=pytest.mark.nightly)])
async def test_memory_does_not_grow_with_what_is_fetched(listening: Listening, n_chunks: int) -> None:
    pair, sender = await served(listening, Source(dict.fromkeys(range(n_chunks), bytes(MIB))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in range(0, n_chunks, 128):
        indices = range(start, start + 128)
        pair.receiver.request(asking(*indices), dict.fromkeys(indices, MIB))
        for _ in indices:
            event = await pair.next()
            assert isinstance(event, ChunkArrived)
            pair.receiver.finished(event.data)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / MAXRSS_PER_MIB < 256
    await pair.end()
    with trio.fail_after(PATIENCE_S):
        await sender.done.wait()
