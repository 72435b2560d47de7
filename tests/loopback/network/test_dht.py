"""Provider records among real nodes that come, go and stop."""

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from kvnet.network.interface import Network, ProviderHint
from kvnet.network.libp2p import providers
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.ids import peer_text
from tests.loopback.network.conftest import PATIENCE_S, SpawnPeer, StartNode
from tests.ports import free_port

pytestmark = pytest.mark.loopback

KEY = bytes(range(32))


async def _provide(network: Network, key: bytes = KEY) -> int:
    reported = trio.Event()
    counts: list[int] = []

    def report(_: bytes, count: int) -> None:
        counts.append(count)
        reported.set()

    await network.provide(key, report=report)
    with trio.fail_after(PATIENCE_S):
        await reported.wait()
    return counts[0]


async def _wait_until_routed(network: LibP2PNetwork, peers: int = 1) -> None:
    with trio.fail_after(PATIENCE_S):
        while network.routing_peers() < peers:  # noqa: ASYNC110 — py-libp2p's routing table tells nobody
            await trio.sleep(0.02)


async def test_records_lie_under_the_multihash_that_a_cid_of_the_same_hash_has(start_node: StartNode) -> None:
    server, a = [await start_node(name) for name in ("server", "a")]
    await a.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    assert await _provide(a) == 1
    assert server._providers is not None
    assert list(server._providers._dht.provider_store.providers) == [b"\x1e\x20" + KEY]


async def test_a_key_of_another_size_is_refused(start_node: StartNode) -> None:
    a = await start_node("a")
    with pytest.raises(ValueError, match="32"):
        await a.provide(b"short")


async def test_a_provider_that_started_before_its_bootstrap_is_found_within_an_interval(
    start_node: StartNode, spawn_peer: SpawnPeer
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    boot = spawn_peer("boot", listen=listen)
    boot.kill()
    a = await start_node("a", bootstrap=(boot.address,))
    assert await _provide(a) == 0  # nobody there yet: the announcer sees it and tries again

    boot = spawn_peer("boot", listen=listen)
    b = await start_node("b", bootstrap=(boot.address,))
    await _wait_until_routed(a)
    await _wait_until_routed(b)
    assert await _provide(a) >= 1
    assert [h.peer for h in await b.find_providers(KEY)] == [a.peer_id]


async def test_a_bootstrap_that_lost_everything_is_told_again(start_node: StartNode, spawn_peer: SpawnPeer) -> None:
    listen = f"127.0.0.1:{free_port()}"
    boot = spawn_peer("boot", listen=listen)
    a = await start_node("a", bootstrap=(boot.address,))
    await _wait_until_routed(a)
    assert await _provide(a) == 1
    boot.kill()
    with trio.fail_after(PATIENCE_S):
        while a.connected():  # noqa: ASYNC110 — a network has no event for this
            await trio.sleep(0.02)
    boot = spawn_peer("boot", listen=listen)
    with trio.fail_after(PATIENCE_S):
        while not a.connected():  # noqa: ASYNC110
            await trio.sleep(0.02)
    assert await _provide(a) == 1
    stranger = await start_node("stranger", bootstrap=(boot.address,))
    await _wait_until_routed(stranger)
    assert [h.peer for h in await stranger.find_providers(KEY)] == [a.peer_id]


async def test_a_bootstrap_that_lost_its_key_too_is_used_as_who_it_is_now(
    start_node: StartNode, spawn_peer: SpawnPeer, caplog: pytest.LogCaptureFixture
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    boot = spawn_peer("boot", listen=listen)
    a = await start_node("a", bootstrap=(boot.address,))
    await _wait_until_routed(a)
    boot.kill()
    with trio.fail_after(PATIENCE_S):
        while a.connected():  # noqa: ASYNC110
            await trio.sleep(0.02)
    new = spawn_peer("another key", listen=listen)
    with trio.fail_after(PATIENCE_S):
        while not a.connected():  # noqa: ASYNC110
            await trio.sleep(0.02)
    assert [new.address.endswith(peer_text(info.peer)) for info in a.connected()] == [True]
    assert await _provide(a) == 1
    stranger = await start_node("stranger", bootstrap=(new.address,))
    await _wait_until_routed(stranger)
    assert [h.peer for h in await stranger.find_providers(KEY)] == [a.peer_id]
    assert "another key" in caplog.text


async def test_a_stopped_dht_server_holds_up_neither_announcements_nor_lookups(
    start_node: StartNode, spawn_peer: SpawnPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the stopped one costs each time; the other one answers sooner, on a busy machine too.
    monkeypatch.setattr(providers, "QUERY_LIMIT_S", 2.0)
    # Less than that, as it is outside of tests: an acknowledgement that is late does not count as a failure.
    monkeypatch.setattr(providers, "ACKNOWLEDGEMENT_LIMIT_S", 0.5)
    stopped, fine = spawn_peer("stopped"), spawn_peer("fine")
    a = await start_node("a", bootstrap=(stopped.address, fine.address))
    b = await start_node("b", bootstrap=(stopped.address, fine.address))
    await _wait_until_routed(a, 2)
    await _wait_until_routed(b, 2)
    stopped.stop()
    reported: list[int] = []
    await a.provide(bytes(32), report=lambda _, count: reported.append(count))
    assert reported == []  # it has waited for nobody
    with trio.fail_after(PATIENCE_S):
        while await _provide(a) < 1:
            pass
        while [h.peer for h in await b.find_providers(KEY)] != [a.peer_id]:
            pass


async def test_a_lookup_takes_no_longer_than_it_may(
    start_node: StartNode, spawn_peer: SpawnPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "QUERY_LIMIT_S", 3600.0)
    stopped = spawn_peer("stopped")
    a = await start_node("a", bootstrap=(stopped.address,))
    await _wait_until_routed(a)
    stopped.stop()
    with trio.fail_after(PATIENCE_S):
        assert await a.find_providers(KEY, timeout_s=0.2) == []


async def test_records_told_to_us_as_a_server_are_not_lost_by_our_own_lookup(start_node: StartNode) -> None:
    server, a, c = [await start_node(name) for name in ("server", "a", "c")]
    for node in (a, c):
        await node.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    await _provide(a)
    for _ in range(2):
        assert [h.peer for h in await server.find_providers(KEY)] == [a.peer_id]
    assert [h.peer for h in await c.find_providers(KEY)] == [a.peer_id]


async def test_what_a_lookup_heard_is_not_kept_and_told_on(start_node: StartNode) -> None:
    server, a = [await start_node(name) for name in ("server", "a")]
    await a.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    await _provide(a)
    c = await start_node("c")  # after the announcement, so that nobody told c as a server
    await c.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    assert [h.peer for h in await c.find_providers(KEY)] == [a.peer_id]
    assert c._providers is not None
    assert not c._providers._dht.provider_store.providers


async def test_we_do_not_repeat_all_our_keys_at_once_every_day(start_node: StartNode) -> None:
    server, a = await start_node("server"), await start_node("a")
    await a.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    await _provide(a)
    assert a._providers is not None
    assert a._providers._dht.provider_store.providing_keys == set()


async def test_hundreds_of_addresses_in_a_reply_are_cut_down(start_node: StartNode) -> None:
    a = await start_node("a")
    reply = Message()
    each = reply.providerPeers.add()
    each.id = bytes(a.peer_id)
    each.addrs.extend([bytes([4, 127, 0, 0, 1, 6, n // 256, n % 256]) for n in range(1, 300)])
    each.addrs.insert(0, b"junk")
    into: dict[bytes, tuple[str, ...]] = {}
    providers._note(into, each.id, providers._texts(each.addrs))  # type: ignore[arg-type]
    (addresses,) = into.values()
    assert 1 <= len(addresses) <= 8
    assert all(text.startswith("/ip4/127.0.0.1/tcp/") for text in addresses)


async def test_a_peer_id_that_is_too_long_is_left_out() -> None:
    into: dict[bytes, tuple[str, ...]] = {}
    providers._note(into, b"\0" * 1000, ["/ip4/127.0.0.1/tcp/1"])  # type: ignore[arg-type]
    providers._note(into, b"", ["/ip4/127.0.0.1/tcp/1"])  # type: ignore[arg-type]
    assert into == {}


async def test_a_hint_from_the_dht_is_enough_to_connect(start_node: StartNode) -> None:
    server, a, c = [await start_node(name) for name in ("server", "a", "c")]
    for node in (a, c):
        await node.connect(server.addresses()[0], timeout_s=PATIENCE_S)
    await _provide(a)
    (hint,) = await c.find_providers(KEY)
    assert hint == ProviderHint(a.peer_id, tuple(a.addresses()))
    assert await c.connect_hint(hint) == a.peer_id
