"""What the simulator says of the DHT against real nodes on loopback: every request on the wire is counted."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing
from libp2p.kad_dht import common, kad_dht
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from kvnet.network.libp2p import providers
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.network.libp2p.providers import ProviderRecords
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.ids import PeerId
from simulations.world import dht

pytestmark = pytest.mark.loopback

PATIENCE_S = 60.0


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many messages of each kind go out, and how many rounds of them, while this lasts."""
    counts: Counter[str] = Counter()
    exchange, next_batch = ProviderRecords._exchange, providers._Walk.next_batch

    async def counted_exchange(
        self: ProviderRecords, peer: PeerId, message: Message, *, reply_limit_s: float
    ) -> Message | None:
        counts[Message.MessageType.Name(message.type)] += 1
        return await exchange(self, peer, message, reply_limit_s=reply_limit_s)

    def counted_batch(self: providers._Walk) -> list[PeerId]:
        batch = next_batch(self)
        counts["rounds"] += bool(batch)
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(ProviderRecords, "_exchange", counted_exchange)
        patched.setattr(providers._Walk, "next_batch", counted_batch)
        yield counts


async def _nodes(nursery: trio.Nursery, count: int) -> list[LibP2PNetwork]:
    """Nodes that all have each other in their routing tables."""
    found: list[LibP2PNetwork] = []
    for number in range(count):
        bootstrap = found[0].addresses()[:1] if found else ()
        network = LibP2PNetwork(_key(f"node {number}"), listen=["127.0.0.1:0"], bootstrap=bootstrap)
        await nursery.start(network.run)
        for other in found:
            await network.connect(other.addresses()[0], timeout_s=PATIENCE_S)
        found.append(network)
    with trio.fail_after(PATIENCE_S):
        while min(each.routing_peers() for each in found) < count - 1:  # noqa: ASYNC110 - the table tells nobody
            await trio.sleep(0.02)
    # Who was new in a table has been asked for others.
    await trio.testing.wait_all_tasks_blocked(0.2)
    return found


async def _provide(node: LibP2PNetwork, key: bytes) -> int:
    told: list[int] = []
    done = trio.Event()

    def report(_: bytes, servers: int) -> None:
        told.append(servers)
        done.set()

    await node.provide(key, report=report)
    with trio.fail_after(PATIENCE_S):
        await done.wait()
    return told[0]


@pytest.mark.parametrize("servers", [4, pytest.param(13, marks=pytest.mark.nightly)])
async def test_a_walk_takes_the_requests_and_rounds_that_are_simulated(
    servers: int, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "QUERY_LIMIT_S", PATIENCE_S)
    monkeypatch.setattr(providers, "ACKNOWLEDGEMENT_LIMIT_S", PATIENCE_S)
    first, second, *_ = await _nodes(nursery, servers + 1)
    expected = dht.walk(servers)
    with _counted(monkeypatch) as counts:
        assert await first.find_providers(_key("nobody has it"), timeout_s=PATIENCE_S) == []
    assert counts == {"GET_PROVIDERS": expected.requests, "rounds": expected.rounds}
    with _counted(monkeypatch) as counts:
        assert await _provide(first, _key("one has it")) == expected.records
    assert counts["GET_PROVIDERS"] + counts["ADD_PROVIDER"] == expected.announcement
    with _counted(monkeypatch) as counts:
        assert len(await second.find_providers(_key("one has it"), timeout_s=PATIENCE_S)) == 1
    # One provider is fewer than a lookup would take: it goes on to the last of the closest.
    assert counts == {"GET_PROVIDERS": expected.requests, "rounds": expected.rounds}


def test_the_limits_are_those_of_the_code_that_runs() -> None:
    assert (dht.CLOSEST, dht.PARALLEL) == (providers.REPLICATION, providers.PARALLEL)
    assert common.BUCKET_SIZE == dht.RECORDS_OF_A_KEY


async def test_the_pace_of_announcing_stays_below_what_a_server_takes_from_one_sender(nursery: trio.Nursery) -> None:
    (node,) = await _nodes(nursery, 1)
    assert node._providers is not None
    server: kad_dht.KadDHT = node._providers._dht
    assert (server._provider_rate_max, server._provider_rate_window) == (dht.RECORDS_OF_A_SENDER, dht.SENDER_WINDOW_S)
    # Each server gets each record once: at this pace so many in a window, one more where it begins anew.
    assert dht.SENDER_WINDOW_S / AnnounceLimits().interval_s + 1 < dht.RECORDS_OF_A_SENDER


@pytest.mark.parametrize(("servers", "requests", "rounds"), [(1, 1, 1), (6, 6, 1), (7, 7, 2), (20, 20, 4), (63, 20, 4)])
def test_small_swarms_are_asked_whole_and_large_ones_not(servers: int, requests: int, rounds: int) -> None:
    assert (dht.walk(servers).requests, dht.walk(servers).rounds) == (requests, rounds)


def test_ten_times_as_many_servers_cost_little_more() -> None:
    hundreds, thousands = dht.walk(999), dht.walk(9_999)
    assert 20 < hundreds.requests < thousands.requests < 30
    assert 4 < hundreds.rounds < thousands.rounds < 5
    assert thousands.announcement == thousands.requests + 20
