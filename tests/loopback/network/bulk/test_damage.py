"""A disk goes bad under a node that serves."""

from pathlib import Path

import pytest

from kvnet.errors import NotFoundError
from kvnet.network.bulk.endpoint import BulkEndpoint
from tests.loopback.network.bulk.nodes import running

pytestmark = pytest.mark.loopback

LISTEN = ["127.0.0.1:0"]


@pytest.mark.parametrize("path", ["bulk", "stream"])
async def test_damaged_chunk_is_refused_and_makes_no_liar_of_its_owner(tmp_path: Path, path: str) -> None:
    a, b = (BulkEndpoint(LISTEN), BulkEndpoint(LISTEN)) if path == "bulk" else (None, None)
    async with running(tmp_path / "a", "a", bulk=a) as holder, running(tmp_path / "b", "b", bulk=b) as asker:
        artifact = holder.hold(600)
        record = holder.store.get(artifact)
        assert record is not None
        damaged = record.entries[-1].hash
        place = holder.store.locate_all([damaged])[0]
        assert place is not None
        with place.path.open("r+b") as pack:
            pack.seek(place.offset)
            (first,) = pack.read(1)
            pack.seek(place.offset)
            pack.write(bytes([first ^ 1]))
        await asker.exchange.connect(holder.exchange.addresses()[0])
        with pytest.raises(NotFoundError, match="a chunk is missing: the only provider did not have what is missing"):
            await asker.fetch(artifact)
        assert not asker.store.has_chunk(damaged)
        assert not holder.store.has_chunk(damaged)
        counters = holder.exchange.counters()
        assert (counters["chunks_damaged"], counters["chunks_served"]) == (1, len(record.entries) - 1)
        # It is asked again for whatever it still has.
        located = await asker.exchange.fetcher.locate(artifact)
        assert [each.peer for each in asker.exchange.fetcher.providers(located)] == [holder.exchange.peer_id]
