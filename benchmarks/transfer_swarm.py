"""Fetching from several providers at once: all sound, or one throttled and one that dies half-way."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trio

from benchmarks.synthetic import identity
from benchmarks.transfer_bare import warm_memory
from benchmarks.transfer_peers import QUIET, Served, serving
from kvnet.exchange.bulk_warm import TAKEN_BACK_S
from kvnet.exchange.events import FetchProgress
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.locating import Located
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.pace import Purpose
from kvnet.store.disk import DiskStore
from kvnet.store.packs import PACK_SUFFIX

N_PROVIDERS = 4
THROTTLED_SHARE = 0.01
"""Of what all four deliver."""


class Target:
    """A node that fetches to disk, and forgets what it fetched.

    Args:
        directory: of its store; made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.parent
        self._store = DiskStore.open(directory, quota_bytes=1 << 40, min_free_bytes=0)
        self.duplicate_shares: list[float] = []
        self.node = ExchangeNode(
            LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=()),
            self._store,
            ThreadLane(),
            identity(),
            random=secrets.token_bytes,
            options=NodeOptions(announce=QUIET),
            bulk=BulkEndpoint(["127.0.0.1:0"]),
        )
        self._located: Located | None = None
        self._entries: tuple[ChunkEntry, ...] = ()

    async def locate(self, artifact: ArtifactHash) -> None:
        """Find it: what is measured is the chunks."""
        self._located = await self.node.fetcher.locate(artifact)
        self._entries = await self.node.fetcher.chunk_list(self._located)

    async def fetch(self, half_way: Served | None = None) -> float:
        """Into the store, published, durable; then removed. Bytes per second.

        Args:
            half_way: a provider to kill when half of it is here.
        """
        assert self._located is not None

        async def kill(event: FetchProgress) -> None:
            if half_way is not None and 2 * event.done_bytes >= event.total_bytes:
                half_way.kill()

        assert self.node.bulk is not None
        size_bytes = sum(entry.length_bytes for entry in self._entries)
        await trio.to_thread.run_sync(warm_memory, self._directory, size_bytes)
        discarded_bytes = self.node.bulk.discarded_bytes
        begun = time.perf_counter()
        fetched = await self.node.fetcher.fetch(
            self._located, self._entries, progress=kill, purpose=Purpose.REPLICATION
        )
        seconds = time.perf_counter() - begun
        assert fetched.record.complete
        await trio.sleep(TAKEN_BACK_S)  # what is still coming is counted then
        surplus_bytes = sum(each.surplus_bytes for each in fetched.delivered.values())
        surplus_bytes += self.node.bulk.discarded_bytes - discarded_bytes
        self.duplicate_shares.append(surplus_bytes / fetched.fetched_bytes)
        await trio.to_thread.run_sync(self._store.remove, fetched.record.hash)
        await trio.to_thread.run_sync(lambda: self._store.collect_garbage(everything=True))
        return fetched.fetched_bytes / seconds

    def close(self) -> None:
        """When the node has ended."""
        self._store.close()


class Swarm:
    """Four providers, each a process with the artifact.

    Args:
        source: a store that holds it; its packs are shared, not copied.
        directory: for everything that is written.
        artifact: its hash.
    """

    def __init__(self, source: Path, directory: Path, artifact: ArtifactHash) -> None:
        self._source = source
        self._directory = directory
        self._artifact = artifact
        self._sound: list[str] = []
        self._rate_bytes_s = 0.0
        self._copies = 0
        self.pids: list[int] = []
        self.sound = Target(directory / "target-4")
        self.faulty = Target(directory / "target-4-faulty")

    async def start(self, peers: ExitStack, nursery: trio.Nursery) -> None:
        """Start the providers and the nodes that fetch."""
        self._sound = [peers.enter_context(self._provider()).ready for _ in range(N_PROVIDERS)]
        for target, addresses in ((self.sound, self._sound), (self.faulty, self._sound[: N_PROVIDERS - 2])):
            await nursery.start(target.node.run)
            for address in addresses:
                await target.node.connect(address)
            await target.locate(self._artifact)
        await self.sound.fetch()  # warm, as the rows with one provider are

    @contextmanager
    def _provider(self, rate_bytes_s: float = 0.0) -> Iterator[Served]:
        self._copies += 1
        copy = self._directory / f"provider-{self._copies}"
        shutil.copytree(self._source, copy, copy_function=_share)
        try:
            with serving("node", str(copy), str(rate_bytes_s)) as provider:
                self.pids.append(provider.process.pid)
                yield provider
        finally:
            shutil.rmtree(copy)

    async def from_four(self) -> float:
        """From four sound providers."""
        self._rate_bytes_s = await self.sound.fetch()
        return self._rate_bytes_s

    async def from_two(self) -> float:
        """From two sound ones: what the faulty ones beside them should not make slower."""
        return await self.faulty.fetch()

    async def from_two_and_two_faulty(self) -> float:
        """From two sound ones, one at a hundredth of what four deliver, and one that is killed half-way."""
        rate = THROTTLED_SHARE * self._rate_bytes_s
        with self._provider(rate) as throttled, self._provider() as doomed:
            for each in (throttled, doomed):
                await self.faulty.node.connect(each.ready)
            return await self.faulty.fetch(half_way=doomed)

    def close(self) -> None:
        """When the nodes have ended."""
        self.sound.close()
        self.faulty.close()


def _share(source: str, target: str) -> None:
    """Packs are written once and only read after that: a second name for them is enough. The index is written to."""
    if source.endswith(PACK_SUFFIX):
        os.link(source, target)
    else:
        shutil.copy2(source, target)
