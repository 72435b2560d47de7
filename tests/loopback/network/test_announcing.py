"""Announcing over real sockets: a provider that started alone, and a bootstrap that lost everything."""

import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from kvnet.exchange.announcer import Announcer
from kvnet.exchange.lane import InlineLane
from kvnet.format.hashes import dht_key
from kvnet.network.dialing import connect_any
from kvnet.network.interface import Network
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.network.libp2p.identity import key_pair
from kvnet.protocol.announce import AnnounceLimits
from tests.loopback.network.conftest import PATIENCE_S, SpawnPeer, StartNode
from tests.ports import free_port

pytestmark = pytest.mark.loopback

KEYS = [bytes([n]) * 32 for n in range(3)]
INTERVAL_S = 3.0
LIMITS = AnnounceLimits(interval_s=0.2, reprovide_s=INTERVAL_S, retry_s=0.5, verify_s=1.0, rounds_s=1.0)


@asynccontextmanager
async def announcing(network: Network) -> AsyncIterator[Announcer]:
    announcer = Announcer(network, LIMITS, lane=InlineLane(), random=bytes)
    announcer.add(KEYS)
    async with trio.open_nursery() as nursery:
        await nursery.start(announcer.run)
        yield announcer
        nursery.cancel_scope.cancel()


async def happened(what: Callable[[], bool]) -> None:
    """Return as soon as something is so."""
    with trio.fail_after(PATIENCE_S):
        while not what():  # noqa: ASYNC110 - nobody is told
            await trio.sleep(0.02)


async def found_within(seconds: float, seeker: Network, provider: Network) -> None:
    """Return when a lookup of every key names the provider; fail when none does in time."""
    with trio.fail_after(seconds):
        for key in KEYS:
            while provider.peer_id not in [hint.peer for hint in await seeker.find_providers(key, timeout_s=2)]:  # noqa: ASYNC110
                await trio.sleep(0.1)


async def test_a_provider_that_started_alone_is_found_and_found_again_when_its_bootstrap_forgot_everything(
    start_node: StartNode, spawn_peer: SpawnPeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listen = f"127.0.0.1:{free_port()}"
    boot = spawn_peer("boot", listen=listen)
    boot.kill()
    a = await start_node("a", bootstrap=(boot.address,))
    async with announcing(a) as announcer:
        await happened(lambda: "nobody to announce to" in caplog.text)
        assert (announcer.status().announced, announcer.status().alone) == (0, 1)
        boot = spawn_peer("boot", listen=listen)
        b = await start_node("b", bootstrap=(boot.address,))
        await found_within(PATIENCE_S, b, a)
        # It is renewed on a plain timer.
        await happened(lambda: announcer.status().announced > len(KEYS))
        boot.kill()
        with trio.fail_after(PATIENCE_S):
            while any(info.peer != b.peer_id for info in a.connected()):  # noqa: ASYNC110 — no event for this
                await trio.sleep(0.05)
        boot = spawn_peer("boot", listen=listen)
        c = await start_node("c", bootstrap=(boot.address,))
        await found_within(INTERVAL_S + PATIENCE_S, c, a)
    assert announcer.status().never == 0


async def test_of_twenty_listed_providers_nineteen_are_dead_and_the_living_one_is_reached_at_once(
    start_node: StartNode,
) -> None:
    server, alive, seeker = [await start_node(name) for name in ("server", "alive", "seeker")]
    for node in (alive, seeker):
        await node.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    _list_dead(server, 19)
    told = trio.Event()
    await alive.provide(KEYS[0], report=lambda _key, _count: told.set())
    with trio.fail_after(PATIENCE_S):
        await told.wait()
        hints = await seeker.find_providers(KEYS[0])
    assert len(hints) == 20
    with trio.fail_after(PATIENCE_S):
        assert await connect_any(seeker, hints, wanted=1) == [alive.peer_id]
    # The dead are known now, and come last.
    assert (await seeker.find_providers(KEYS[0]))[0].peer == alive.peer_id


def _list_dead(server: LibP2PNetwork, count: int) -> None:
    """Have a DHT server list providers at ports where nobody listens."""
    assert server._providers is not None
    store = server._providers._dht.provider_store
    for n in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = Multiaddr(f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}")
        peer = ID.from_pubkey(key_pair(hashlib.sha256(b"dead %d" % n).digest()).public_key)
        store.add_provider(dht_key(KEYS[0]), PeerInfo(peer, [address]))
