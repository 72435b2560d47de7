"""Nodes on one local network, over real multicast between network namespaces: found without any configuration."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from zeroconf._protocol.incoming import DNSIncoming

from kvnet.format.hashes import artifact_text
from tests.e2e.conftest import POLL_S, TIMEOUT_S, Kvnet
from tests.e2e.lan import CAPTURE, FLOOD, Lan, Machine, asked, lan
from tests.e2e.prepared import prepare
from tests.unit.store.samples import FRIEND, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

SAMPLE = sample(range(600), key=FRIEND)
N_INVENTED = 500
AGAIN_S = 10.0
"""Seconds after which invented neighbours are announced once more: a busy machine does not take in every datagram."""


@dataclass
class Street:
    """Three machines with a node each: two members and a stranger."""

    lan: Lan
    machines: list[Machine]
    nodes: list[Kvnet]
    peers: list[str]
    started: list[dict[str, Any]]
    captured: Path


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    """The network; what is said on it is written down from before the first node starts."""
    folder = tmp_path_factory.mktemp("street")
    with lan() as network:
        machines = [network.machine() for _ in range(3)]
        nodes = [machine.wrap(Kvnet(folder / name)) for machine, name in zip(machines, "abc", strict=True)]
        for member in nodes[:2]:
            prepare(member, folder, trusts=FRIEND)
        captured = folder / "captured"
        with captured.open("w") as file:
            listening = ("ip", "netns", "exec", network.name, sys.executable, "-c", CAPTURE)
            capture = subprocess.Popen(listening, stdout=file)
            try:
                while not captured.stat().st_size:
                    assert capture.poll() is None
                    time.sleep(POLL_S)
                started = [node.start("--listen", ":0")[0] for node in nodes]
                yield Street(network, machines, nodes, [each["peer"] for each in started], started, captured)
            finally:
                for node in nodes:
                    node.end()
                capture.kill()
                capture.wait()


async def until(kvnet: Kvnet, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `kvnet peers` says once it is as expected."""
    seen: dict[str, Any] = {}
    with trio.move_on_after(TIMEOUT_S):
        while not what(seen := await asked(kvnet, "peers")):  # noqa: ASYNC110 — another process has no event for this
            await trio.sleep(POLL_S)
        return seen
    raise AssertionError(f"not so within {TIMEOUT_S:.0f} s: {json.dumps(seen, indent=1)}")


def states(peers: dict[str, Any]) -> dict[str, str]:
    return {each["peer"]: each["state"] for each in peers["neighbours"]}


def members(peers: dict[str, Any]) -> set[str]:
    return {each["peer"] for each in peers["peers"] if each["member"]}


async def test_members_on_one_network_have_a_session_and_strangers_are_only_listed(street: Street) -> None:
    a, b, c = street.peers
    assert "on eth0 (10.77.0.1" in street.started[0]["discovery"]
    expected = [{b: "member", c: "stranger"}, {a: "member", c: "stranger"}, {a: "stranger", b: "stranger"}]
    for node, others in zip(street.nodes, expected, strict=True):
        with_session = {peer for peer, state in others.items() if state == "member"}
        expectation = (others, with_session)
        await until(node, lambda peers, wanted=expectation: (states(peers), members(peers)) == wanted)  # type: ignore[misc]
    told = street.nodes[2]("peers")
    assert "shares no namespace" in told.stdout
    assert street.nodes[2].typed("invite --device here, then kvnet join - there") in told.stdout


async def test_the_doctor_finds_nothing_wrong_between_members(street: Street) -> None:
    address = street.started[1]["addresses"][0]
    findings = street.nodes[0].json("doctor", "--network", "--peer", address)["findings"]
    assert [each for each in findings if each["state"] == "problem"] == []
    states = {(each["subject"], each["state"]) for each in findings}
    assert {("node", "ok"), ("port", "ok"), ("discovery", "ok"), ("peer", "ok"), ("neighbour", "note")} <= states


async def test_nothing_that_is_said_links_two_members(street: Street) -> None:
    for node in street.nodes:
        await until(node, lambda peers: len(peers["neighbours"]) >= 2)
    everybody = {"_kvnet", "_tcp", "local", "v=1"}
    with trio.fail_after(TIMEOUT_S):
        while True:
            a, b, c = said = [_said_by(street.captured, machine.mac) for machine in street.machines]
            if all(everybody < each and len(each) >= 8 for each in said):
                break
            await trio.sleep(POLL_S)
    assert a & b == everybody
    assert a & b <= c
    for node in street.nodes[:2]:
        name = (node.data_dir / "namespaces").iterdir()
        secrets = b"".join(path.read_bytes() for path in name if path.is_file())
        assert not any(len(value) > 7 and value.encode() in secrets for value in a | b)


async def test_several_nodes_on_one_machine_find_each_other_and_those_elsewhere(street: Street, tmp_path: Path) -> None:
    here = street.machines[0].wrap(Kvnet(tmp_path / "second"))
    try:
        started, _ = here.start("--listen", "0.0.0.0:0")
        await until(here, lambda peers: set(street.peers) <= set(states(peers)))
        await until(street.nodes[0], lambda peers: states(peers).get(started["peer"]) == "stranger")
        await until(street.nodes[1], lambda peers: states(peers).get(started["peer"]) == "stranger")
    finally:
        here.end()
    await until(street.nodes[1], lambda peers: started["peer"] not in states(peers))


async def test_a_machine_without_ipv4_is_a_member_at_its_link_local_address(street: Street, tmp_path: Path) -> None:
    newcomer = street.lan.machine(ipv4=False).wrap(Kvnet(tmp_path / "six"))
    prepare(newcomer, tmp_path, SAMPLE, trusts=FRIEND)
    try:
        started, _ = newcomer.start("--listen", ":0")

        def is_member(peers: dict[str, Any]) -> bool:
            return any(
                each["peer"] == started["peer"]
                and each["state"] == "member"
                and any(text.startswith("/ip6zone/eth0/ip6/fe80::") for text in each["addresses"])
                for each in peers["neighbours"]
            )

        await until(street.nodes[0], is_member)
        fetched = await trio.to_thread.run_sync(street.nodes[0].json, "fetch", artifact_text(SAMPLE.hash))
        assert fetched["artifact"] == artifact_text(SAMPLE.hash)
        await until(street.nodes[0], lambda peers: _chunks(peers, started["peer"]) == "bulk")
        await until(newcomer, lambda peers: states(peers).get(street.peers[1]) == "member")
        address = next(
            text
            for each in street.nodes[0].json("peers")["neighbours"]
            for text in each["addresses"]
            if text.startswith("/ip6zone/") and each["peer"] == started["peer"]
        )
        findings = street.nodes[0].json("doctor", "--network", "--peer", address)["findings"]
        assert any(each["subject"] == "peer" and "%eth0 port" in each["text"] for each in findings)
    finally:
        newcomer.end()


def _chunks(peers: dict[str, Any], peer: str) -> str:
    return next((str(each["chunks"]) for each in peers["peers"] if each["peer"] == peer), "")


async def test_a_crowd_of_invented_neighbours_keeps_no_member_out(street: Street, tmp_path: Path) -> None:
    flooding = ("ip", "netns", "exec", street.machines[2].namespace, sys.executable, "-c", FLOOD, str(N_INVENTED))
    crowded: dict[str, Any] = {}
    with trio.fail_after(TIMEOUT_S):
        while not crowded:
            await trio.run_process(flooding)
            with trio.move_on_after(AGAIN_S):
                crowded = await until(street.nodes[0], lambda peers: len(peers["neighbours"]) > 100)
    assert len(crowded["neighbours"]) <= 128
    addresses = [address for each in crowded["neighbours"] for address in each["addresses"]]
    assert all(address.startswith(("/ip4/10.77.0.", "/ip6zone/eth0/ip6/fe80:")) for address in addresses)
    newcomer = street.machines[1].wrap(Kvnet(tmp_path / "newcomer"))
    prepare(newcomer, tmp_path, trusts=FRIEND)
    try:
        started, _ = newcomer.start("--listen", "0.0.0.0:0")
        await until(
            street.nodes[0],
            lambda peers: started["peer"] in members(peers),
        )
    finally:
        newcomer.end()
    status = await asked(street.nodes[0], "status")
    assert status["running"]


async def test_a_member_that_comes_back_with_another_address_is_a_member_again(street: Street) -> None:
    a, b = street.peers[:2]
    await until(street.nodes[0], lambda peers: states(peers).get(b) == "member")
    street.machines[1].leave()
    street.machines[1].join("10.77.0.99")

    def is_there(peers: dict[str, Any]) -> bool:
        return any(
            each["peer"] == b and each["member"] and any("/10.77.0.99/" in text for text in each["addresses"])
            for each in peers["peers"]
        )

    await until(street.nodes[0], is_there)
    await until(street.nodes[1], lambda peers: states(peers).get(a) == "member")


def _said_by(captured: Path, mac: str) -> set[str]:
    """Every name, label, value and number in the answers that one machine sent."""
    said: set[str] = set()
    # The first line says that it listens; the last one may still be written.
    for line in captured.read_text().split("\n")[1:-1]:
        source, payload = line.split()
        incoming = DNSIncoming(bytes.fromhex(payload))
        if source != mac or not incoming.is_response():
            continue
        for record in incoming.answers():
            said.update(record.name.rstrip(".").split("."))
            for part in ("alias", "server"):
                said.update(getattr(record, part, "").rstrip(".").split("."))
            if (text := getattr(record, "text", b"")) != b"":
                said.update(_strings(text))
            if (port := getattr(record, "port", None)) is not None:
                said.add(f"port {port}")
            if (raw := getattr(record, "address", None)) is not None:
                said.add(f"address {raw.hex()}")
    return said - {""}


def _strings(text: bytes) -> Iterator[str]:
    while text:
        length = text[0]
        yield text[1 : 1 + length].decode()
        text = text[1 + length :]
