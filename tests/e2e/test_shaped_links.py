"""Fetching over links with delay, loss and a limited rate, between network namespaces; needs root and the tools of
iproute2 (and nftables for loss alone), and is skipped where they or the kernel's parts are missing."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvnet.format.hashes import artifact_text
from kvnet.store.disk import DiskStore
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.e2e.prepared import prepare
from tests.e2e.test_fetching import N_CHUNKS, SAMPLE
from tests.unit.store.samples import FRIEND, check_whole

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

PROVIDER_ADDRESS, FETCHER_ADDRESS = "10.213.7.1", "10.213.7.2"
MEGABIT_BYTES = 125_000

LOSSY = """
table inet lossy
delete table inet lossy
table inet lossy {{
    chain output {{
        type filter hook output priority 0
        oif "kv0" numgen random mod 100 < {lost} counter drop
    }}
}}
"""
"""Rules of nftables: of every hundred packets so many are lost."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def require_tools() -> None:
    """Skip, with the reason, where network namespaces cannot be made."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: install iproute2")


@dataclass(frozen=True)
class ShapedLink:
    """Two namespaces with one link between them."""

    provider: str
    fetcher: str

    def shape(self, *, rate_mbit: int, delay_ms: int = 0, loss_percent: int = 0) -> None:
        """How bytes go from the provider to the fetcher, and their delay both ways; replaces what was.

        Loss without delay is made by a packet filter: kernels without netem are common, and have one.
        """
        for namespace, lost in ((self.provider, loss_percent), (self.fetcher, 0)):
            if delay_ms:
                how = ["netem", "delay", f"{delay_ms / 2}ms", "loss", f"{lost}%", "rate", f"{rate_mbit}mbit"]
            else:
                how = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "100ms"]
            self._do(namespace, "tc", "qdisc", "replace", "dev", "kv0", "root", *how)
            if lost and not delay_ms:
                self._do(namespace, "nft", LOSSY.format(lost=lost))

    def lost_packets(self) -> int:
        """How many packets of the provider the packet filter has dropped."""
        listed = self._do(self.provider, "nft", "--json", "list table inet lossy")
        (rule,) = [each["rule"] for each in json.loads(listed)["nftables"] if "rule" in each]
        return int(next(part["counter"]["packets"] for part in rule["expr"] if "counter" in part))

    @staticmethod
    def _do(namespace: str, *command: str) -> str:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} not found")
        inside = ["ip", "netns", "exec", namespace, *command]
        done = subprocess.run(inside, check=False, capture_output=True, text=True, timeout=20)
        if done.returncode:
            pytest.skip(f"this kernel cannot do {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


@pytest.fixture
def link(tmp_path: Path, kvnet: Kvnet, other: Kvnet) -> Iterator[ShapedLink]:
    """A link, with the first command at its one end and the other at the other."""
    require_tools()
    pair = ShapedLink(f"kvnet-a-{os.getpid()}", f"kvnet-b-{os.getpid()}")
    ends = ((pair.provider, PROVIDER_ADDRESS, kvnet), (pair.fetcher, FETCHER_ADDRESS, other))
    try:
        try:
            for namespace, _, _ in ends:
                run("ip", "netns", "add", namespace)
            peer = ("peer", "name", "kv0", "netns", pair.fetcher)
            run("ip", "link", "add", "name", "kv0", "netns", pair.provider, "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces do not work here: {error.stderr.strip()}")
        for namespace, address, command in ends:
            inside = ("ip", "netns", "exec", namespace, "ip")
            run(*inside, "address", "add", f"{address}/24", "dev", "kv0")
            run(*inside, "link", "set", "dev", "kv0", "up")
            run(*inside, "link", "set", "dev", "lo", "up")
            script = tmp_path / namespace
            script.write_text(f'#!/bin/sh\nexec ip netns exec {namespace} {command.command} "$@"\n')
            script.chmod(0o755)
            command.command = script
        yield pair
    finally:
        kvnet.end()
        other.end()
        for namespace, _, _ in ends:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=20)


def start_provider(kvnet: Kvnet, other: Kvnet, folder: Path) -> str:
    """A running node at the other end of the link; its address there."""
    prepare(kvnet, folder, SAMPLE, trusts=FRIEND)
    prepare(other, folder, trusts=FRIEND)
    kvnet.environment |= {"KVNET_BULK_LISTEN": f"{PROVIDER_ADDRESS}:0"}
    started, _ = kvnet.start("--listen", f"{PROVIDER_ADDRESS}:0")
    return next(str(address) for address in started["addresses"] if PROVIDER_ADDRESS in address)


def check_fetched(other: Kvnet) -> None:
    store = DiskStore.open(other.data_dir / "store", quota_bytes=1 << 30, min_free_bytes=0)
    try:
        check_whole(store, SAMPLE)
    finally:
        store.close()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"rate_mbit": 100, "delay_ms": 20, "loss_percent": 1}, id="20 ms, 1 % loss, 100 Mbit/s"),
        pytest.param({"rate_mbit": 100, "loss_percent": 2}, id="2 % loss, 100 Mbit/s"),
    ],
)
def test_fetch_over_a_shaped_link_is_right(
    link: ShapedLink, kvnet: Kvnet, other: Kvnet, tmp_path: Path, shape: dict[str, int]
) -> None:
    link.shape(**shape)
    address = start_provider(kvnet, other, tmp_path)
    ran = other("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    assert ran.code == 0
    (part,) = ran.result["providers"]
    assert (part["chunks"], part["path"], part["dropped"]) == (N_CHUNKS, "bulk", "")
    assert part["rate_bytes_s"] < 1.1 * 100 * MEGABIT_BYTES
    if "loss_percent" in shape and "delay_ms" not in shape:
        assert link.lost_packets() > 0
    check_fetched(other)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"delay_ms": 20, "loss_percent": 1}, id="20 ms, 1 % loss"),
        pytest.param({}, id="rate"),
    ],
)
def test_rate_that_drops_to_a_tenth_in_mid_fetch_only_delays_it(
    link: ShapedLink, kvnet: Kvnet, other: Kvnet, tmp_path: Path, shape: dict[str, int]
) -> None:
    link.shape(rate_mbit=40, **shape)
    address = start_provider(kvnet, other, tmp_path)
    process = other.popen("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    assert process.stdout is not None
    dropped_at_bytes = 0
    lines: list[dict[str, object]] = []
    for line in process.stdout:
        lines.append(json.loads(line))
        done = lines[-1].get("done", 0)
        if not dropped_at_bytes and isinstance(done, int) and done > SAMPLE.size_bytes // 4:
            link.shape(rate_mbit=4, **shape)
            dropped_at_bytes = done
    assert process.wait(timeout=TIMEOUT_S) == 0
    assert 0 < dropped_at_bytes < SAMPLE.size_bytes
    result = lines[-1]
    assert result["complete"] is True
    assert result["fetched_chunks"] == N_CHUNKS
    slow_s = (SAMPLE.size_bytes - dropped_at_bytes) / (4 * MEGABIT_BYTES)
    assert isinstance(result["seconds"], float)
    assert result["seconds"] < 30 + 3 * slow_s
    check_fetched(other)
