"""Providers that break every rule, over real connections: streams of the control connection, and bulk ones."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio
from msgspec import structs

from kvnet.errors import NetworkError, NotFoundError
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.node import NodeOptions
from kvnet.format.hashes import ArtifactHash
from kvnet.network.bulk.certificates import make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.sending import Answers, Room, Sender
from kvnet.network.bulk.sessions import BulkSession
from kvnet.network.interface import ByteStream
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.fetch import FetchLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.bulk import BulkOffer, OpenBulk
from kvnet.protocol.messages.chunks import ChunkHeader, GetChunks
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.handshake import Capability
from kvnet.store.interface import ArtifactRecord
from tests.evil import EvilPeer, frame, relay_answer
from tests.loopback.network.bulk.nodes import BulkNode, running
from tests.loopback.network.conftest import PATIENCE_S
from tests.simulated.nodes import MINE

pytestmark = pytest.mark.loopback

LISTEN = ["127.0.0.1:0"]
FOREVER_S = 3600.0
N_TOKENS = 600

SILENT = ["nothing", "half a chunk", "a byte a second"]
WAYS = [*SILENT, "wrong bytes", "more than asked", "vanishes"]
PATHS = ["stream", "bulk"]


def patience(how: str, *, others: bool = True) -> NodeOptions:
    """Little with whoever only keeps the asker waiting; it is the only way to be rid of one.

    All else ends without a clock, however long the machine takes to open a stream.
    """
    short_s = 1.0 if how in SILENT else PATIENCE_S
    return NodeOptions(
        fetch=FetchLimits(
            idle_s=PATIENCE_S if others else short_s,
            idle_with_others_s=short_s,
            rate_window_s=1.0,
            attempts=3 if others else 1,
            min_rate_bytes_s=1024,
        )
    )


@dataclass
class Evil:
    """What an evil provider has, and how it breaks the rules."""

    node: BulkNode
    record: ArtifactRecord
    how: str

    def chunk(self, index: int) -> bytes:
        """A chunk as an honest peer sends it."""
        data = self.node.store.read_chunk(self.record.entries[index].hash)
        return frame(ChunkHeader(index=index, length_bytes=len(data))) + data

    def says(self, request: GetChunks) -> Iterator[bytes | float | None]:
        """Bytes, pauses in seconds, and ``None`` for going away."""
        index = request.indices[0]
        sound = self.chunk(index)
        match self.how:
            case "nothing":
                yield FOREVER_S
            case "half a chunk":
                yield sound[: len(sound) // 2]
                yield FOREVER_S
            case "a byte a second":
                for position in range(len(sound)):
                    yield sound[position : position + 1]
                    yield 1.0
            case "wrong bytes":
                yield sound[:-1] + bytes([sound[-1] ^ 1])
                yield FOREVER_S
            case "more than asked":
                yield sound
                unasked = next(each for each in range(len(self.record.entries)) if each not in request.indices)
                yield self.chunk(unasked)
                yield FOREVER_S
            case "vanishes":
                yield sound[: len(sound) // 2]
                yield None

    async def over_stream(self, stream: ByteStream, request: GetChunks) -> None:
        """Answers on a stream of the control connection."""
        for each in self.says(request):
            if each is None:
                await stream.reset()
            elif isinstance(each, float):
                await trio.sleep(each)
            else:
                await stream.send_all(each)


@dataclass
class EvilSource:
    """Answers on a bulk connection, behind the back of its sender."""

    evil: Evil
    link: Link

    def answers(self, peer: PeerId, request: GetChunks, room: Room) -> Answers:
        del peer, room
        for each in self.evil.says(request):
            if each is None:
                raise NetworkError("gone")
            if isinstance(each, float):
                self.link.pause(each)
            else:
                self.link.send_all(memoryview(each), stall_s=10.0)
        yield from ()


@asynccontextmanager
async def evil_provider(evil: Evil, path: str) -> AsyncIterator[EvilPeer]:
    """A peer that passes on manifest and chunk list as they are, and breaks rules when it is asked for chunks."""
    endpoint = BulkEndpoint(LISTEN)
    senders: list[Sender] = []
    relay = relay_answer(evil.record)
    token = trio.lowlevel.current_trio_token()

    def answer(request: Request) -> Reply | None:
        if not isinstance(request, OpenBulk):
            return relay(request)
        own, name = make_certificate(), os.urandom(16)

        def take(link: Link) -> None:
            sender = Sender(link, asker, EvilSource(evil, link))
            senders.append(sender)
            sender.start(token, lambda: None)

        (asker,) = [each.peer for each in peer.network.connected()]
        endpoint.expect(BulkSession(name, asker, own, request.certificate, request.cipher), take)
        return BulkOffer(request_id=0, name=name, certificate=own.der, port=endpoint.port, cipher=request.cipher)

    capabilities = [Capability.SERVE, *([Capability.BULK] if path == "bulk" else [])]
    network = LibP2PNetwork(os.urandom(32), listen=LISTEN)
    peer = EvilPeer(network, (MINE,), answer, evil.over_stream, capabilities=capabilities)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        await nursery.start(endpoint.run)
        yield peer
        for sender in senders:
            sender.stop()
        for sender in senders:
            await sender.done.wait()
        nursery.cancel_scope.cancel()


async def fetch_from_evil_first(asker: BulkNode, evil: EvilPeer, artifact: ArtifactHash, *honest: BulkNode) -> Fetched:
    for node in honest:
        await asker.exchange.connect(node.exchange.addresses()[0])
    await asker.exchange.connect(evil.network.addresses()[0])
    # The evil one is asked before any other.
    for node in honest:
        asker.exchange.fetcher.scores.delivered(node.exchange.peer_id, 1_000_000, 10.0, trio.current_time())
    asker.exchange.fetcher.scores.delivered(evil.network.peer_id, 1_000_000_000, 10.0, trio.current_time())
    with trio.fail_after(PATIENCE_S):
        return await asker.fetch(artifact)


def record_of(node: BulkNode, artifact: ArtifactHash) -> ArtifactRecord:
    record = node.store.get(artifact)
    assert record is not None
    return record


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", WAYS)
async def test_fetch_is_finished_from_the_honest_provider(tmp_path: Path, how: str, path: str) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN)) as honest,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN), options=patience(how)) as asker,
    ):
        artifact = honest.hold(N_TOKENS)
        async with evil_provider(Evil(honest, record_of(honest, artifact), how), path) as evil:
            fetched = await fetch_from_evil_first(asker, evil, artifact, honest)
            assert fetched.record.complete
            part = fetched.delivered[evil.network.peer_id]
            # On a busy machine it may be let go before its channel is open.
            assert part.path in {path, ""}
            assert part.n_chunks <= 1
            assert fetched.delivered[honest.exchange.peer_id].n_chunks >= len(fetched.record.entries) - 1
            for entry in fetched.record.entries:
                assert asker.store.read_chunk(entry.hash) == honest.store.read_chunk(entry.hash)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", WAYS)
async def test_fetch_from_nobody_else_ends_and_says_how_much_is_missing(tmp_path: Path, how: str, path: str) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN)) as honest,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN), options=patience(how, others=False)) as asker,
    ):
        artifact = honest.hold(N_TOKENS)
        record = record_of(honest, artifact)
        async with evil_provider(Evil(honest, record, how), path) as evil:
            n_missing = len(record.entries) - (how == "more than asked")
            with pytest.raises(NotFoundError, match=f"{n_missing} chunks are missing: the only provider "):
                await fetch_from_evil_first(asker, evil, artifact)
            assert asker.store.get(artifact) is None


@pytest.mark.parametrize("path", PATHS)
async def test_peer_that_only_shakes_hands_does_not_hold_up_a_fetch(tmp_path: Path, path: str) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN)) as honest,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN), options=patience("nothing")) as asker,
    ):
        artifact = honest.hold(N_TOKENS)
        async with evil_provider(Evil(honest, record_of(honest, artifact), "nothing"), path) as evil:
            evil.answer = lambda _request: None
            fetched = await fetch_from_evil_first(asker, evil, artifact, honest)
            assert fetched.record.complete


async def test_peer_whose_bulk_port_accepts_and_says_nothing_does_not_hold_up_a_fetch(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN)) as honest,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN), options=patience("nothing")) as asker,
        trio.open_nursery() as nursery,
    ):
        artifact = honest.hold(N_TOKENS)
        (silent,) = await nursery.start(partial(trio.serve_tcp, _says_nothing, 0, host="127.0.0.1"))
        async with evil_provider(Evil(honest, record_of(honest, artifact), "nothing"), "bulk") as evil:
            agreeing = evil.answer

            def answer(request: Request) -> Reply | None:
                reply = agreeing(request)
                if isinstance(reply, BulkOffer):
                    return structs.replace(reply, port=silent.socket.getsockname()[1])
                return reply

            evil.answer = answer
            fetched = await fetch_from_evil_first(asker, evil, artifact, honest)
            assert fetched.record.complete
            assert fetched.delivered[evil.network.peer_id].n_chunks == 0
        nursery.cancel_scope.cancel()


async def _says_nothing(stream: trio.SocketStream) -> None:
    del stream
    await trio.sleep_forever()
