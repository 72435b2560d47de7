"""How fast verified bytes get from one process to another on loopback, beside what could be had.

``python -m benchmarks.transfer [--json] [--size-mib N] [--rounds N] [--rows NAME,NAME]``. Everything is interleaved:
each round measures every row once, and the medians are compared.
"""

import argparse
import json
import os
import resource
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio

from benchmarks import torrent
from benchmarks.report import Rate, machine, print_rates
from benchmarks.synthetic import BLOCK_BYTES, identity, make_artifact
from benchmarks.transfer_bare import CORRECTIONS_S, PIECE_BYTES, processor_s, receive_bare, warm_memory, write_only
from benchmarks.transfer_peers import QUIET, Served, scratch, serving
from benchmarks.transfer_swarm import N_PROVIDERS, Swarm
from kvnet.exchange.chunk_fetch import ChunkFetch
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.locating import Located
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.format.hashes import ArtifactHash
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.ids import PeerId
from kvnet.protocol.pace import Purpose
from kvnet.store.disk import DiskStore

STREAM_SHARE = 8
"""The control transport's streams are measured with this part of the bytes: they are slow, and the rate is the same."""

Row = Callable[[], Awaitable[float]]
"""Moves bytes once; returns bytes per second."""


@dataclass
class Measured:
    """What was measured of one row, a number for each round.

    Attributes:
        pids: the processes that send.
        bytes_per_s: rates.
        here_s_per_gb: processor time of this process, for each GB.
        there_s_per_gb: that of the senders together.
    """

    pids: Sequence[int] = ()
    bytes_per_s: list[float] = field(default_factory=list)
    here_s_per_gb: list[float] = field(default_factory=list)
    there_s_per_gb: list[float] = field(default_factory=list)

    async def run(self, row: Row, size_bytes: int) -> None:
        """One round."""
        here, there, corrected = time.process_time(), processor_s(self.pids), sum(CORRECTIONS_S)
        self.bytes_per_s.append(await row())
        gb = size_bytes / 1e9
        self.here_s_per_gb.append((time.process_time() - here - sum(CORRECTIONS_S) + corrected) / gb)
        self.there_s_per_gb.append((processor_s(self.pids) - there) / gb)


def leech(directory: Path, port: int, size_bytes: int) -> float:
    """libtorrent, to disk."""
    warm_memory(directory, size_bytes)
    with serving("leech", str(directory), str(port)) as leecher:
        seconds, processor = map(float, leecher.ready.split())
    CORRECTIONS_S.append(-processor)
    shutil.rmtree(directory / "leeched", ignore_errors=True)
    return size_bytes / seconds


class Fetching:
    """Our own node, connected to providers of the artifact."""

    def __init__(self, node: ExchangeNode, store: DiskStore, directory: Path) -> None:
        self._node = node
        self._store = store
        self._directory = directory
        self._located: Located | None = None
        self._entries: tuple[ChunkEntry, ...] = ()

    async def locate(self, artifact: ArtifactHash) -> None:
        """Find it once: what is measured is the chunks."""
        self._located = await self._node.fetcher.locate(artifact)
        self._entries = await self._node.fetcher.chunk_list(self._located)

    @property
    def size_bytes(self) -> int:
        """Of all chunks."""
        return sum(entry.length_bytes for entry in self._entries)

    async def into_memory(self) -> float:
        """Every chunk fetched and verified, and let go."""
        assert self._located is not None
        assert self._node.bulk is not None
        verified = 0

        async def count(chunks: Sequence[VerifiedChunk], _peer: PeerId) -> None:
            nonlocal verified
            verified += sum(len(chunk.data) for chunk in chunks)

        providers = self._node.fetcher.providers(self._located)
        begun = time.perf_counter()
        await ChunkFetch(self._node.bulk, self._entries, range(len(self._entries)), providers, count).run()
        seconds = time.perf_counter() - begun
        assert verified == self.size_bytes
        return verified / seconds

    async def to_disk(self) -> float:
        """Into the store, published, durable; then removed."""
        assert self._located is not None
        await trio.to_thread.run_sync(warm_memory, self._directory, self.size_bytes)
        begun = time.perf_counter()
        fetched = await self._node.fetcher.fetch(self._located, self._entries, purpose=Purpose.REPLICATION)
        seconds = time.perf_counter() - begun
        await trio.to_thread.run_sync(self._store.remove, fetched.record.hash)
        await trio.to_thread.run_sync(lambda: self._store.collect_garbage(everything=True))
        return fetched.fetched_bytes / seconds


async def receive_streams(network: LibP2PNetwork, address: str, size_bytes: int) -> float:
    """One stream of the control transport."""
    peer = await network.connect(address, timeout_s=10)
    begun = time.perf_counter()
    stream = await network.open_stream(peer, StreamKind.CHUNKS)
    for _ in range(size_bytes // PIECE_BYTES):
        await stream.receive_exactly(PIECE_BYTES)
    seconds = time.perf_counter() - begun
    await stream.aclose()
    return size_bytes / seconds


def _in_thread(call: Callable[[], float]) -> Row:
    async def run() -> float:
        return await trio.to_thread.run_sync(call)

    return run


@dataclass(frozen=True)
class Result:
    """Of all rounds.

    Attributes:
        rows: by name.
        duplicates: what came twice or too late, as a share of what was needed, in each round with faulty providers
            and without.
        growth_mib: by how much this process grew while it fetched.
    """

    rows: dict[str, Measured]
    duplicates: dict[str, list[float]]
    growth_mib: float


async def measure(size_bytes: int, rounds: int, directory: Path, chosen: frozenset[str]) -> Result:
    """The chosen rows, interleaved.

    Args:
        size_bytes: about how many bytes each row moves.
        rounds: how often.
        directory: for everything that is written.
        chosen: names of rows; those that cannot run here are left out.
    """
    size_bytes = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    source = directory / "source"
    source_store = DiskStore.open(source, quota_bytes=1 << 40, min_free_bytes=0)
    artifact = make_artifact(source_store, size_bytes).hash
    source_store.close()
    store = DiskStore.open(directory / "target", quota_bytes=1 << 40, min_free_bytes=0)
    network = LibP2PNetwork(os.urandom(32), listen=["127.0.0.1:0"], bootstrap=())
    node = ExchangeNode(
        network,
        store,
        ThreadLane(),
        identity(),
        random=secrets.token_bytes,
        options=NodeOptions(announce=QUIET),
        bulk=BulkEndpoint(["127.0.0.1:0"]),
    )
    with ExitStack() as peers:
        senders = Senders(
            raw=peers.enter_context(serving("socket", str(size_bytes))),
            tls=peers.enter_context(serving("tls", str(size_bytes))),
            streams=peers.enter_context(serving("streams", str(size_bytes // STREAM_SHARE))),
            provider=peers.enter_context(serving("node", str(source))),
        )
        swarm = Swarm(source, directory, artifact)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.run)
            await swarm.start(peers, nursery)
            await node.connect(senders.provider.ready)
            fetching = Fetching(node, store, directory)
            await fetching.locate(artifact)
            rows = _rows(size_bytes, directory / "scratch", network, fetching, swarm, senders)
            rows = {name: row for name, row in rows.items() if name in chosen}
            if "libtorrent" in chosen and torrent.available():
                rows["libtorrent"] = _torrent_row(peers, directory, size_bytes)
            await fetching.into_memory()  # warm: the connection, the page cache, the window
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            measured = {name: Measured(pids) for name, (_, pids) in rows.items()}
            duplicates: dict[str, list[float]] = {"ours_disk_4": [], FAULTY: []}
            for _ in range(rounds):
                for name, (row, _) in rows.items():
                    await measured[name].run(row, size_bytes // (STREAM_SHARE if name == "libp2p_stream" else 1))
                for name, swarmed in (("ours_disk_4", swarm.sound), (FAULTY, swarm.faulty)):
                    duplicates[name].extend(swarmed.duplicate_shares[-1:] if name in rows else ())
            growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / _MAXRSS_PER_MIB
            nursery.cancel_scope.cancel()
        swarm.close()
    store.close()
    return Result(measured, duplicates, growth_mib)


@dataclass(frozen=True)
class Senders:
    """Processes that send, one for each kind of row but the swarm's."""

    raw: Served
    tls: Served
    streams: Served
    provider: Served


def _rows(
    size_bytes: int, scratch_file: Path, network: LibP2PNetwork, fetching: Fetching, swarm: Swarm, senders: Senders
) -> dict[str, tuple[Row, Sequence[int]]]:
    """Every row but libtorrent's, in the order in which a round measures them, with who sends."""
    raw_port, tls_port = int(senders.raw.ready), int(senders.tls.ready)
    return {
        "raw_tcp": (_in_thread(lambda: receive_bare(raw_port, size_bytes, tls=False)), [senders.raw.process.pid]),
        "tls_blake3": (_in_thread(lambda: receive_bare(tls_port, size_bytes, tls=True)), [senders.tls.process.pid]),
        "ours_memory_1": (fetching.into_memory, [senders.provider.process.pid]),
        "disk": (_in_thread(lambda: write_only(scratch_file, size_bytes)), []),
        "tls_blake3_disk": (
            _in_thread(lambda: receive_bare(tls_port, size_bytes, tls=True, path=scratch_file)),
            [senders.tls.process.pid],
        ),
        "ours_disk_1": (fetching.to_disk, [senders.provider.process.pid]),
        "ours_disk_4": (swarm.from_four, swarm.pids[:N_PROVIDERS]),
        TWO: (swarm.from_two, swarm.pids[:2]),
        FAULTY: (swarm.from_two_and_two_faulty, swarm.pids[:2]),
        "libp2p_stream": (
            lambda: receive_streams(network, senders.streams.ready, size_bytes // STREAM_SHARE),
            [senders.streams.process.pid],
        ),
    }


def _torrent_row(peers: ExitStack, directory: Path, size_bytes: int) -> tuple[Row, Sequence[int]]:
    folder = directory / "torrent"
    folder.mkdir()
    with (folder / "data").open("wb") as file:
        for _ in range(size_bytes // PIECE_BYTES):
            file.write(secrets.token_bytes(PIECE_BYTES))
    torrent.write_torrent(folder)
    seeder = peers.enter_context(serving("torrent", str(folder)))
    port = int(seeder.ready)
    return _in_thread(lambda: leech(folder, port, size_bytes)), [seeder.process.pid]


_MAXRSS_PER_MIB = 1 << 20 if sys.platform == "darwin" else 1 << 10

TWO = "ours_disk_2"
FAULTY = "ours_disk_4_faulty"

FIGURES = (
    "ours_memory_1",
    "ours_disk_1",
    "ours_disk_4",
    "tls_blake3",
    "tls_blake3_disk",
    "raw_tcp",
    "disk",
    "libp2p_stream",
    "libtorrent",
)
"""Rows of the last line of ``--json``, in its order."""

PAIRS = {
    "into memory": ("ours_memory_1", "tls_blake3"),
    "to disk": ("ours_disk_1", "tls_blake3_disk"),
}
"""Rows that are compared round by round: the first of each pair is ours."""

TITLES = {
    "tls_blake3": "bare TLS 1.3 pair, BLAKE3",
    "ours_memory_1": "kvnet, 1 provider, into memory",
    "raw_tcp": "bare TCP pair, not encrypted, not hashed",
    "tls_blake3_disk": "bare TLS 1.3 pair, BLAKE3, to disk",
    "ours_disk_1": "kvnet, 1 provider, to disk",
    "ours_disk_4": "kvnet, 4 providers, to disk",
    TWO: "kvnet, 2 providers, to disk",
    FAULTY: "the same, with one at 1 % and one killed half-way",
    "disk": "disk alone",
    "libp2p_stream": "a py-libp2p stream, not hashed",
    "libtorrent": "libtorrent, 1 seeder, to disk",
}


def main(arguments: list[str] | None = None) -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(prog="benchmarks.transfer")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(TITLES), help=f"which of {', '.join(TITLES)}; all if not given")
    options = parser.parse_args([] if arguments is None else arguments)
    chosen = frozenset(options.rows.split(","))
    if unknown := chosen - set(TITLES):
        parser.error(f"expected rows of {', '.join(TITLES)}; found {', '.join(sorted(unknown))}")
    if options.size_mib << 20 < BLOCK_BYTES:
        parser.error(f"expected --size-mib of at least {BLOCK_BYTES >> 20}, a block of K/V; found {options.size_mib}")
    if options.rounds < 1:
        parser.error(f"expected at least one of --rounds, found {options.rounds}")
    size_bytes = options.size_mib << 20
    with scratch() as folder:
        result = trio.run(measure, size_bytes, options.rounds, Path(folder), chosen)
    _print(result, f"transfer, {options.size_mib} MiB, two processes on loopback, {options.rounds} rounds")
    if options.json:
        _print_json(result, size_bytes)


def _print(result: Result, title: str) -> None:
    names = [name for name in TITLES if name in result.rows]
    print_rates(title, [Rate(TITLES[name], tuple(result.rows[name].bytes_per_s)) for name in names])
    print("\n  processor time for each GB, median: this process, and the senders")
    for name in names:
        here, there = (statistics.median(each) for each in _processor(result.rows[name]))
        print(f"  {TITLES[name]:52} {here:5.2f} s {there:5.2f} s")
    for name, (ours, bare) in PAIRS.items():
        if ours in result.rows and bare in result.rows:
            print(f"  {name}: {_ratio(result.rows[ours], result.rows[bare])}")
    for name, shares in result.duplicates.items():
        if not shares:
            continue
        print(f"  duplicates, {TITLES[name]}: {', '.join(f'{share:.1%}' for share in shares)}")
    print(f"  this process grew by {result.growth_mib:.0f} MiB")
    print(f"  {machine()}")


def _ratio(ours: Measured, bare: Measured) -> str:
    """Of the medians, of each round, and of the processor time of both ends: the last varies least."""
    rounds = [a / b for a, b in zip(ours.bytes_per_s, bare.bytes_per_s, strict=True)]
    spent = [sum(map(statistics.median, _processor(row))) for row in (ours, bare)]
    medians = statistics.median(ours.bytes_per_s) / statistics.median(bare.bytes_per_s)
    return (
        f"{medians:.2f} of the bare pair; by rounds {statistics.median(rounds):.2f} ({min(rounds):.2f} to "
        f"{max(rounds):.2f}, mean {statistics.fmean(rounds):.2f}); by processor time {spent[1] / spent[0]:.2f}"
    )


def _processor(row: Measured) -> tuple[list[float], list[float]]:
    return row.here_s_per_gb, row.there_s_per_gb


def _print_json(result: Result, size_bytes: int) -> None:
    medians = {name: round(statistics.median(row.bytes_per_s) / 1e6, 1) for name, row in result.rows.items()}
    shares = {name: round(statistics.median(each), 4) for name, each in result.duplicates.items() if each}
    processor = {name: [round(statistics.median(each), 3) for each in _processor(r)] for name, r in result.rows.items()}
    print(json.dumps({"type": "transfer processor", **{f"{name}_s_per_gb": each for name, each in processor.items()}}))
    print(
        json.dumps(
            {
                "type": "transfer faulty",
                f"{TWO}_mb_s": medians.get(TWO),
                f"{FAULTY}_mb_s": medians.get(FAULTY),
                **{f"{name}_duplicate_share": share for name, share in shares.items()},
            }
        )
    )
    figures = {f"{name}_mb_s": medians.get(name) for name in FIGURES}
    growth = round(result.growth_mib, 1)
    print(json.dumps({"type": "transfer", "size_bytes": size_bytes, **figures, "node_rss_growth_mib": growth}))


if __name__ == "__main__":
    main(sys.argv[1:])
