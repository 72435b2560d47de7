"""Nodes that fetch over bulk connections."""

import secrets
import socket
import threading
from pathlib import Path

import pytest
import trio
from multiaddr import Multiaddr

import kvnet.exchange.peer_sessions
from kvnet.errors import KvnetError
from kvnet.exchange import bulk, bulk_answering, bulk_warm
from kvnet.exchange.bulk import BulkTransport
from kvnet.exchange.identity import FixedIdentity
from kvnet.exchange.node import NodeOptions
from kvnet.network.bulk.certificates import make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.sessions import BulkSession
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.messages.bulk import BulkOffer, OpenBulk
from kvnet.protocol.serve import ServeLimits
from tests.loopback.network.bulk.nodes import BulkNode, running
from tests.loopback.network.conftest import PATIENCE_S
from tests.simulated.nodes import OTHER

pytestmark = pytest.mark.loopback

LISTEN = ["127.0.0.1:0"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = has_ipv6()


@pytest.fixture(autouse=True)
def _patient_dialling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot be dialled here is found out at once; a busy machine takes its time for the others."""
    for name in ("DIAL_S", "DIALLED_S"):
        monkeypatch.setattr(bulk, name, PATIENCE_S)


def bulk_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kvnet-bulk")]


@pytest.mark.parametrize("cipher", ["tls13", "none"])
async def test_node_fetches_over_one_warm_bulk_connection(tmp_path: Path, cipher: str) -> None:
    ends = [BulkEndpoint(LISTEN, cipher=cipher) for _ in range(2)]
    async with (
        running(tmp_path / "a", "a", bulk=ends[0]) as holder,
        running(tmp_path / "b", "b", bulk=ends[1]) as asker,
    ):
        first, second = holder.hold(600), holder.hold(700)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        fetched = await asker.fetch(first)
        assert fetched.record.complete
        assert fetched.fetched_bytes == fetched.record.manifest.total_size_bytes
        assert asker.exchange.peers()[0].chunks == ("bulk" if cipher == "tls13" else "bulk without encryption")
        assert asker.n_connections == 1
        await asker.fetch(second)
        assert asker.n_connections == holder.n_connections == 1
        assert holder.exchange.counters()["bytes_served"] >= fetched.fetched_bytes
    assert bulk_threads() == []


async def test_connection_without_encryption_is_told_from_tls_whatever_is_drawn_for_its_name(tmp_path: Path) -> None:
    def as_tls_begins(n_bytes: int) -> bytes:
        return b"\x16" + secrets.token_bytes(n_bytes - 1)

    ends = [BulkEndpoint(LISTEN, cipher="none") for _ in range(2)]
    async with (
        running(tmp_path / "a", "a", bulk=ends[0], random=as_tls_begins) as holder,
        running(tmp_path / "b", "b", bulk=ends[1], random=as_tls_begins) as asker,
    ):
        artifact = holder.hold(300)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        await asker.fetch(artifact)
        assert asker.exchange.peers()[0].chunks == "bulk without encryption"


async def test_encryption_is_dropped_only_when_both_sides_ask_for_that(tmp_path: Path) -> None:
    for number, ciphers in enumerate([("none", "tls13"), ("tls13", "none")]):
        a, b = (BulkEndpoint(LISTEN, cipher=cipher) for cipher in ciphers)
        place = tmp_path / str(number)
        async with running(place / "a", "a", bulk=a) as holder, running(place / "b", "b", bulk=b) as asker:
            artifact = holder.hold(300)
            await asker.exchange.connect(holder.exchange.addresses()[0])
            await asker.fetch(artifact)
            assert asker.exchange.peers()[0].chunks == "bulk"


@pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_bulk_connection_is_dialled_where_the_peer_was(tmp_path: Path, host: str) -> None:
    place = f"{host}:0"
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint([place]), listen=place) as holder,
        # It listens nowhere for bulk connections: nobody can dial back in place of it.
        running(tmp_path / "b", "b", bulk=BulkEndpoint([]), listen=place) as asker,
    ):
        artifact = holder.hold(600)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        where = [host.strip("[]")]
        assert asker.exchange.network.seen_at(holder.exchange.peer_id) == where
        assert holder.exchange.network.seen_at(asker.exchange.peer_id) == where
        assert (await asker.fetch(artifact)).record.complete
        assert asker.exchange.peers()[0].chunks == "bulk"


async def test_peer_that_cannot_be_dialled_dials_back(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint([])) as holder,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN)) as asker,
    ):
        artifact = holder.hold(600)
        # Whoever is asked to dial knows addresses only of a peer that has told some.
        await holder.exchange.connect(asker.exchange.addresses()[0])
        await asker.exchange.wait_for_members(PATIENCE_S)
        fetched = await asker.fetch(artifact)
        assert fetched.record.complete
        assert asker.exchange.peers()[0].chunks == "bulk"
        assert holder.n_connections == 1


async def test_chunks_come_over_a_stream_where_bulk_connections_do_not_work_and_it_says_why(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint([])) as holder,
        running(tmp_path / "b", "b", bulk=BulkEndpoint([])) as asker,
    ):
        artifact = holder.hold(600)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        assert (await asker.fetch(artifact)).record.complete
        assert asker.exchange.peers()[0].chunks.startswith("stream: expected an address of the peer to dial")


async def test_peer_without_bulk_connections_is_asked_for_none(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=None) as holder,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN)) as asker,
    ):
        artifact = holder.hold(600)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        assert (await asker.fetch(artifact)).record.complete
        assert asker.exchange.peers()[0].chunks == "stream: the peer has no bulk connections"


async def test_cancelled_fetch_keeps_its_connection_warm_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_warm, "TAKEN_BACK_S", PATIENCE_S)
    a, b = BulkEndpoint(LISTEN), BulkEndpoint(LISTEN)
    async with running(tmp_path / "a", "a", bulk=a) as holder, running(tmp_path / "b", "b", bulk=b) as asker:
        artifact = holder.hold(256 * 24)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        located = await asker.exchange.fetcher.locate(artifact)
        entries = await asker.exchange.fetcher.chunk_list(located)
        for _ in range(3):
            with trio.CancelScope() as scope:

                async def enough(progress: object) -> None:
                    scope.cancel()

                await asker.exchange.fetcher.fetch(located, entries, progress=enough)
            assert scope.cancelled_caught
            assert asker.exchange.bulk is not None
            with trio.fail_after(PATIENCE_S):
                while not asker.exchange.bulk.n_at_rest:  # noqa: ASYNC110 - nobody is told
                    await trio.sleep(0.01)
            assert asker.n_connections == bulk_threads().count("kvnet-bulk-receive") == 1
        assert (await asker.fetch(artifact)).record.complete
        assert holder.exchange.counters()["requests_OpenBulk"] == 1
    assert bulk_threads() == []


async def shut_out(holder: BulkNode) -> None:
    """A node is in another namespace from now on."""
    assert isinstance(holder.exchange.identity, FixedIdentity)
    object.__setattr__(holder.exchange.identity, "members", (OTHER,))
    await holder.exchange.reload()


@pytest.mark.parametrize("path", ["bulk", "stream"])
async def test_chunks_end_in_the_middle_of_a_request_for_a_peer_that_is_no_member_any_more(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvnet.exchange.peer_sessions, "LEFT_S", 0.2)
    slowly = NodeOptions(serve=ServeLimits(bytes_per_s=2e6, burst_bytes=1 << 20))
    a, b = (BulkEndpoint(LISTEN), BulkEndpoint(LISTEN)) if path == "bulk" else (None, None)
    async with (
        running(tmp_path / "a", "a", bulk=a, options=slowly) as holder,
        running(tmp_path / "b", "b", bulk=b) as asker,
    ):
        artifact = holder.hold(256 * 24)
        await asker.exchange.connect(holder.exchange.addresses()[0])
        removed = trio.Event()

        async def shut_out_later(progress: object) -> None:
            if not removed.is_set():
                removed.set()
                await shut_out(holder)

        located = await asker.exchange.fetcher.locate(artifact)
        entries = await asker.exchange.fetcher.chunk_list(located)
        with trio.fail_after(PATIENCE_S), pytest.raises(KvnetError):
            await asker.exchange.fetcher.fetch(located, entries, progress=shut_out_later)
        served = holder.exchange.counters().get("bytes_served", 0)
        assert served < sum(entry.length_bytes for entry in entries) / 2
        with trio.fail_after(PATIENCE_S):
            while holder.exchange.uploading or (holder.exchange.bulk and holder.n_connections):  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_peer_has_four_bulk_connections_and_no_more_however_it_collects_agreements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if time passed between them: what was agreed on waits longer than it counts.
    monkeypatch.setattr(bulk_answering, "DIALLED_S", -bulk_answering.DIAL_S)
    a, b = BulkEndpoint(LISTEN), BulkEndpoint(LISTEN)
    async with running(tmp_path / "a", "a", bulk=a) as holder, running(tmp_path / "b", "b", bulk=b) as asker:
        session = await asker.exchange.connect(holder.exchange.addresses()[0])
        assert session is not None
        agreed = []
        for _ in range(12):
            own = make_certificate()
            offer = await session.ask(OpenBulk(request_id=0, certificate=own.der, cipher="tls13"))
            assert isinstance(offer, BulkOffer)
            agreed.append((BulkSession(offer.name, session.peer, own, offer.certificate), offer.port))
        links = [await b.dial(each, ["127.0.0.1"], port, timeout_s=PATIENCE_S) for each, port in agreed]
        with trio.fail_after(PATIENCE_S):
            while a.n_expected or not holder.n_connections:  # noqa: ASYNC110 - nobody is told
                await trio.sleep(0.01)
        assert holder.n_connections == 4
        for link in links:
            link.close()


async def test_peer_that_says_it_is_elsewhere_has_nobody_dialled_there(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "a", "a", bulk=BulkEndpoint(LISTEN)) as asked,
        running(tmp_path / "b", "b", bulk=BulkEndpoint(LISTEN)) as bad,
    ):
        network = bad.exchange.network
        assert isinstance(network, LibP2PNetwork)
        # What it tells of itself, as libp2p's identify does; it connects from 127.0.0.1 all the same.
        network._host._addrs_factory = lambda _: [Multiaddr("/ip4/192.0.2.1/tcp/6379")]  # type: ignore[union-attr]
        await bad.exchange.connect(asked.exchange.addresses()[0])
        assert await asked.exchange.open_session(network.peer_id) is not None
        told = asked.exchange.network
        with trio.fail_after(PATIENCE_S):
            while not any("192.0.2.1" in each for info in told.connected() for each in info.addresses):
                await told.probe(network.peer_id)
        assert told.seen_at(network.peer_id) == ["127.0.0.1"]
        assert isinstance(asked.exchange.bulk, BulkTransport)
        assert asked.exchange.bulk._hosts_of(network.peer_id) == ["127.0.0.1"]
