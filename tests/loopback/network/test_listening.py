"""Where nodes listen, and what they do when somebody else does already."""

import os
import socket
from pathlib import Path

import pytest
import trio
from libp2p.network import swarm

from kvnet.errors import NetworkError, PortInUseError, UsageError
from kvnet.network.libp2p import ports
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.network.libp2p.ports import open_listeners, parse_listen, port_owner
from kvnet.protocol.ids import peer_text
from tests.loopback.network.conftest import PATIENCE_S, SpawnPeer, StartNode
from tests.ports import free_port

pytestmark = pytest.mark.loopback


def _port(address: str) -> int:
    return int(address.split("/")[4])


async def _run(network: LibP2PNetwork) -> None:
    with trio.move_on_after(PATIENCE_S):
        await network.run()


async def test_a_port_that_is_taken_is_an_error_naming_its_owner(spawn_peer: SpawnPeer) -> None:
    other = spawn_peer()
    port = _port(other.address)
    network = LibP2PNetwork(bytes(32), listen=[f"127.0.0.1:{port}"])
    with pytest.raises(PortInUseError) as taken:
        await _run(network)
    assert f"port {port}" in str(taken.value)
    assert f"process {other.process.pid}" in str(taken.value)
    assert "peer_process.py" in str(taken.value)
    assert "--listen" in taken.value.hint


async def test_two_nodes_of_one_process_cannot_share_a_port(start_node: StartNode) -> None:
    a = await start_node("a")
    with pytest.raises(PortInUseError, match=f"process {os.getpid()}"):
        await _run(LibP2PNetwork(bytes(32), listen=[f"127.0.0.1:{_port(a.addresses()[0])}"]))


async def test_a_failed_start_leaves_no_socket_behind(start_node: StartNode) -> None:
    a = await start_node("a")
    free = free_port()
    with pytest.raises(PortInUseError):
        await _run(LibP2PNetwork(bytes(32), listen=[f"127.0.0.1:{free}", f"127.0.0.1:{_port(a.addresses()[0])}"]))
    for bound in open_listeners([f"127.0.0.1:{free}"]):
        bound.socket.close()


async def test_a_node_takes_its_port_back_right_after_it_stopped(start_node: StartNode) -> None:
    port = free_port()
    other = await start_node("other")
    for _ in range(3):
        network = LibP2PNetwork(bytes(32), listen=[f"127.0.0.1:{port}"])
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            await other.connect(network.addresses()[0], timeout_s=PATIENCE_S)
            nursery.cancel_scope.cancel()


def test_without_a_wish_the_default_port_is_taken_on_both_families() -> None:
    default = free_port()
    bound = open_listeners(None, default_port=default)
    assert {b.port for b in bound} == {default}
    assert {b.host for b in bound} <= {"0.0.0.0", "::"}
    for each in bound:
        each.socket.close()


def test_without_a_wish_a_taken_default_port_is_replaced_by_onefree_port() -> None:
    default = free_port()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", default))
        squatter.listen()
        bound = open_listeners(None, default_port=default)
    assert len({b.port for b in bound}) == 1
    assert default not in {b.port for b in bound}
    for each in bound:
        each.socket.close()


def test_a_free_port_has_no_owner() -> None:
    assert port_owner(free_port()) is None


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(NetworkError, match=r"expected to listen on 192\.0\.2\.77"):
        open_listeners(["192.0.2.77:0"])


@pytest.mark.parametrize(
    ("text", "hosts", "port"),
    [
        ("127.0.0.1:0", ("127.0.0.1",), 0),
        ("[::1]:5864", ("::1",), 5864),
        (":5864", ports.WILDCARDS, 5864),
        ("*:5864", ports.WILDCARDS, 5864),
        ("5864", ports.WILDCARDS, 5864),
        ("/ip4/0.0.0.0/tcp/5864", ("0.0.0.0",), 5864),
        ("/ip6/::/tcp/1", ("::",), 1),
    ],
)
def test_listen_texts(text: str, hosts: tuple[str, ...], port: int) -> None:
    assert parse_listen(text) == ports.Endpoint(hosts, port)


@pytest.mark.parametrize(
    "text", ["", "here", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", ":-1", "a.b:1", "/ip4/x/tcp/1"]
)
def test_other_listen_texts_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="expected an address to listen on"):
        parse_listen(text)


async def test_nodes_meet_over_ipv6(start_node: StartNode) -> None:
    a, b = await start_node("a", listen="[::1]:0"), await start_node("b", listen="[::1]:0")
    assert b.addresses()[0].startswith("/ip6/::1/tcp/")
    assert await a.connect(b.addresses()[0], timeout_s=PATIENCE_S) == b.peer_id


async def test_listening_everywhere_is_told_as_addresses_that_can_be_dialled(start_node: StartNode) -> None:
    a, b = await start_node("a"), await start_node("b", listen=":0")
    assert b.addresses()
    assert not any("/0.0.0.0/" in address or "/ip6/::/" in address for address in b.addresses())
    assert all(address.endswith(f"/p2p/{peer_text(b.peer_id)}") for address in b.addresses())
    assert await a.connect(
        f"/ip4/127.0.0.1/tcp/{_port(b.addresses()[0])}/p2p/{b.addresses()[0].rpartition('/')[2]}", timeout_s=PATIENCE_S
    )


async def test_dials_do_not_wait_for_a_failure_that_does_not_come(start_node: StartNode) -> None:
    await start_node("a")
    assert swarm._HAPPY_EYEBALLS_DELAY == 0


async def test_nothing_fills_a_queue_that_nobody_reads(start_node: StartNode) -> None:
    a = await start_node("a")
    assert a._host is not None
    assert a._host.get_metrics_recv_channel() is None


def test_where_proc_is_missing_lsof_names_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lsof = tmp_path / "lsof"
    lsof.write_text('#!/bin/sh\ncase "$*" in *iTCP:5864*LISTEN*) printf "p123\\ncPython\\nf7\\n" ;; esac\n')
    lsof.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ports._owner_from_lsof(5864) == "Python (process 123)"
    assert ports._owner_from_lsof(5865) is None
    lsof.unlink()
    assert ports._owner_from_lsof(5864) is None
