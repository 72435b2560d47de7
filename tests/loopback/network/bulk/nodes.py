"""Real nodes on 127.0.0.1: libp2p, disk stores, bulk connections; no engine."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.format.fingerprint import Fingerprint, LayerLayout
from kvnet.format.hashes import ArtifactHash
from kvnet.format.tensor import DType, LayerKind
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.store.disk import DiskStore
from kvnet.trust.keys import PublisherKey
from tests.simulated.nodes import MINE, identity, seed
from tests.unit.store.samples import publish, sample

WIDE = Fingerprint(
    b"w" * 32,
    b"c" * 32,
    (),
    "llama",
    LayerLayout((LayerKind("kv", heads=8, k_dim=64, v_dim=64, dtype=DType.FLOAT32),), bytes(4)),
)
"""1 MiB a layer and block."""


@dataclass
class BulkNode:
    """A running node."""

    exchange: ExchangeNode
    store: DiskStore
    name: str

    @property
    def n_connections(self) -> int:
        """Its bulk connections now."""
        assert self.exchange.bulk is not None
        return self.exchange.bulk.n_connections

    def hold(self, n_tokens: int) -> ArtifactHash:
        """Have an artifact of so many tokens, 4 KiB each and layer."""
        made = sample(range(n_tokens), key=PublisherKey(seed(self.name)), namespace=MINE, fingerprint=WIDE)
        record = publish(self.store, made)
        self.exchange.published(record, made.keys)
        return record.hash

    async def fetch(self, artifact: ArtifactHash) -> Fetched:
        """Fetch a whole artifact."""
        located = await self.exchange.fetcher.locate(artifact)
        return await self.exchange.fetcher.fetch(located, await self.exchange.fetcher.chunk_list(located))


@asynccontextmanager
async def running(
    directory: Path,
    name: str,
    *,
    bulk: BulkEndpoint | None,
    options: NodeOptions | None = None,
    listen: str = "127.0.0.1:0",
    random: Callable[[int], bytes] = secrets.token_bytes,
) -> AsyncIterator[BulkNode]:
    """A node that trusts the nodes "a" and "b"."""
    store = DiskStore.open(directory, quota_bytes=1 << 40, min_free_bytes=0)
    exchange = ExchangeNode(
        LibP2PNetwork(secrets.token_bytes(32), listen=[listen]),
        store,
        ThreadLane(),
        identity(name, trusts=["a", "b"]),
        random=random,
        options=options,
        bulk=bulk,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.run)
        try:
            yield BulkNode(exchange, store, name)
        finally:
            nursery.cancel_scope.cancel()
    store.close()
