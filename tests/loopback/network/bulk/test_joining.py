"""A provider that starts after a fetch began joins it, over real connections."""

import dataclasses
from pathlib import Path

import pytest
import trio

from kvnet.exchange.events import FetchProgress
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.node import NodeOptions
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.protocol.pace import Purpose
from kvnet.protocol.serve import ServeLimits
from tests.loopback.network.bulk.nodes import running
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback

LISTEN = ["127.0.0.1:0"]
N_TOKENS = 2560
SIZE_BYTES = 40 * 1024 * 1024
SLOW = NodeOptions(serve=ServeLimits(bytes_per_s=4 * 1024 * 1024, burst_bytes=1))


@pytest.mark.parametrize("purpose", [Purpose.INTERACTIVE, Purpose.REPLICATION])
async def test_provider_that_starts_during_a_fetch_brings_chunks(tmp_path: Path, purpose: Purpose) -> None:
    begun = trio.Event()
    results: list[Fetched] = []

    async def progress(event: FetchProgress) -> None:
        if event.done_chunks:
            begun.set()

    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN), options=SLOW) as slow,
        running(tmp_path / "c", "c", bulk=BulkEndpoint(LISTEN)) as asker,
        trio.open_nursery() as nursery,
    ):
        artifact = slow.hold(N_TOKENS)
        await asker.exchange.connect(slow.exchange.addresses()[0])
        fetcher = asker.exchange.fetcher
        located = await fetcher.locate(artifact)
        entries = await fetcher.chunk_list(located)
        done = trio.Event()

        async def fetch() -> None:
            results.append(await fetcher.fetch(located, entries, purpose=purpose, progress=progress))
            done.set()

        with trio.fail_after(PATIENCE_S):
            nursery.start_soon(fetch)
            await begun.wait()
            async with running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN)) as late:
                assert dataclasses.replace(late, name="a").hold(N_TOKENS) == artifact
                await asker.exchange.connect(late.exchange.addresses()[0])
                await done.wait()
        [fetched] = results
        assert fetched.record.complete
        brought = {peer: each.n_bytes for peer, each in fetched.delivered.items()}
        assert brought[slow.exchange.peer_id] > 0
        assert brought[late.exchange.peer_id] > SIZE_BYTES / 4
        # Nothing came twice but what may be asked for twice.
        assert sum(brought.values()) <= sum(entry.length_bytes for entry in entries)
        surplus = sum(each.surplus_bytes for each in fetched.delivered.values())
        assert surplus <= 0.05 * SIZE_BYTES
