"""``kvnet doctor --network``: why a node and another one do not see each other."""

import hashlib
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.network.interface import ByteStream, StreamKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.handshake import Hello
from tests.e2e.conftest import Kvnet
from tests.e2e.prepared import prepare
from tests.unit.store.samples import FRIEND

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]


def peer_finding(kvnet: Kvnet, address: str) -> dict[str, Any]:
    """What is found of the node at an address; the node's own state is another finding."""
    ran = kvnet("--json", "doctor", "--network", "--peer", address)
    (finding,) = [each for each in ran.lines[-1]["findings"] if each["subject"] == "peer"]
    assert (ran.code == 1) == any(each["state"] == "problem" for each in ran.lines[-1]["findings"])
    return dict(finding)


def test_where_nobody_is_it_says_so_and_a_malformed_address_is_a_usage_error(kvnet: Kvnet) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        # Nobody listens there, and nobody else can as long as it is taken.
        finding = peer_finding(kvnet, f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
    assert finding["state"] == "problem"
    assert "nothing listens on that port" in finding["text"]
    assert "kvnet node start" in finding["hint"]
    assert kvnet("doctor", "--network", "--peer", "192.168.1.7").code == 2


def test_another_swarm_and_another_key_are_told_apart_from_a_member(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    prepare(kvnet, tmp_path, trusts=FRIEND)
    started, _ = kvnet.start()
    (address,) = started["addresses"]
    own = peer_finding(kvnet, address)
    assert "found this node's own" in own["text"]
    assert "on the other machine" in own["hint"]
    itself = kvnet("peers", address)
    assert (itself.code, "on the other machine shows its addresses" in itself.stderr) == (60, True)
    stranger = peer_finding(other, address)
    assert stranger["state"] == "problem"
    assert "no namespace that this node is in" in stranger["text"]
    assert "kvnet join" in stranger["hint"]

    place = address.rpartition("/p2p/")[0]
    renamed = peer_finding(other, f"{place}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")
    assert "another node answers" in renamed["text"]
    assert renamed["hint"].endswith(address)

    member = Kvnet(tmp_path / "member")
    prepare(member, tmp_path, trusts=FRIEND)
    finding = peer_finding(member, address)
    assert finding["state"] == "ok"
    assert "shares a namespace" in finding["text"]


async def test_another_version_is_named_with_its_number(kvnet: Kvnet, nursery: trio.Nursery) -> None:
    async def speak_another_version(_peer: PeerId, stream: ByteStream) -> None:
        await stream.send_all(encode_frame(encode_message(Hello(versions=(7,), capabilities=(), agent="kvnet/9"))))
        await stream.receive_some(1 << 16)
        await trio.sleep_forever()

    network = LibP2PNetwork(hashlib.sha256(b"later").digest(), listen=["127.0.0.1:0"])
    network.set_handler(StreamKind.CONTROL, speak_another_version)
    await nursery.start(network.run)
    finding = await trio.to_thread.run_sync(partial(peer_finding, kvnet, network.addresses()[0]))
    assert finding["state"] == "problem"
    assert "version 1" in finding["text"]
    assert "7" in finding["text"]
    assert finding["hint"] == "run the same kvnet on both machines"
