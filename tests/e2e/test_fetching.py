"""``kvnet fetch`` that is interrupted, or asked for twice at once."""

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvnet.format.fingerprint import Fingerprint, LayerLayout
from kvnet.format.hashes import artifact_text
from kvnet.format.tensor import DType, LayerKind
from tests.e2e.conftest import Kvnet
from tests.e2e.prepared import prepare
from tests.unit.store.samples import FRIEND, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

NARROW = Fingerprint(
    b"w" * 32,
    b"c" * 32,
    (),
    "llama",
    LayerLayout((LayerKind("kv", heads=2, k_dim=64, v_dim=64, dtype=DType.FLOAT32),), bytes(1)),
)
"""256 KiB a block."""
SAMPLE = sample(range(60 * 256), key=FRIEND, fingerprint=NARROW)
N_CHUNKS = 64
UPLOAD = "KVNET_LIMITS_UPLOAD_BYTES_S"


def start_provider(kvnet: Kvnet, other: Kvnet, folder: Path, upload: str) -> str:
    """A running node that holds the artifact and sends it at a limited rate; its address."""
    assert len(SAMPLE.chunks) == N_CHUNKS
    prepare(kvnet, folder, SAMPLE, trusts=FRIEND)
    prepare(other, folder, trusts=FRIEND)
    kvnet.environment[UPLOAD] = upload
    started, _ = kvnet.start()
    return str(started["addresses"][0])


def chunks_served(kvnet: Kvnet) -> int:
    """What a node has sent, once it is all of an artifact: it counts a moment after its peer has the last chunk."""
    seen = kvnet.watch(lambda seen: seen["counters"].get("chunks_served", 0) >= N_CHUNKS, "status")
    counted: int = seen["counters"]["chunks_served"]
    return counted


def kill_at(process: subprocess.Popen[str], n_chunks: int) -> int:
    """Kill a fetch when it reports so many verified chunks; the last number it reported."""
    assert process.stdout is not None
    verified = 0
    for line in process.stdout:
        found = re.match(r"(\d+)/", json.loads(line).get("text", ""))
        verified = int(found[1]) if found else verified
        if verified >= n_chunks:
            process.kill()
    assert process.wait() == -signal.SIGKILL, "the fetch ended before it was interrupted"
    return verified


def test_a_killed_fetch_goes_on_where_it_was(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    address = start_provider(kvnet, other, tmp_path, "5 MB")
    fetch = ("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    process = other.popen(*fetch)
    verified = kill_at(process, N_CHUNKS // 2)
    assert verified < N_CHUNKS
    ran = other(*fetch)
    assert ran.code == 0
    resumed = ran.result["resumed_chunks"]
    assert resumed >= verified - 2
    assert ran.result["complete"] is True
    assert ran.result["fetched_chunks"] + resumed == N_CHUNKS
    notes = [json.loads(line) for line in ran.stdout.splitlines() if '"note"' in line]
    assert f"resumed: {resumed} of {N_CHUNKS} chunks were here" in [note["text"] for note in notes]
    # The provider counts what it has sent once an answer is over, that to the killed process too.
    assert sum(provided["chunks"] for provided in ran.result["providers"]) == N_CHUNKS - resumed
    assert chunks_served(kvnet) >= N_CHUNKS


@pytest.mark.nightly
@pytest.mark.parametrize("running", [False, True])
def test_an_interrupted_fetch_says_what_is_kept(kvnet: Kvnet, other: Kvnet, tmp_path: Path, running: bool) -> None:
    address = start_provider(kvnet, other, tmp_path, "500 kB")
    if running:
        other.start()
    process = other.popen("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    assert process.stdout is not None
    kept, interrupted = -1, False
    for line in process.stdout:
        said = json.loads(line)
        found = re.match(r"(\d+)/", said.get("text", ""))
        if found and int(found[1]) >= N_CHUNKS // 8 and not interrupted:
            process.send_signal(signal.SIGINT)
            interrupted = True
        kept = said.get("data", {}).get("kept_chunks", kept)
    assert process.wait() == 130
    assert N_CHUNKS // 8 <= kept < N_CHUNKS
    assert other.json("show", artifact_text(SAMPLE.hash))["held_chunks"] == kept


def test_a_fetch_goes_on_when_its_provider_is_there_again(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    address = start_provider(kvnet, other, tmp_path, "5 MB")
    process = other.popen("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    assert process.stdout is not None
    killed, text = False, ""
    while "waiting for a peer that has the rest" not in text:
        text = json.loads(process.stdout.readline()).get("text", "")
        found = re.match(r"(\d+)/", text)
        if found and int(found[1]) >= N_CHUNKS // 4 and not killed:
            kvnet._nodes[-1].kill()
            killed = True
    kvnet.start("--listen", f"127.0.0.1:{address.split('/')[4]}")
    *_, last = process.stdout
    assert process.wait() == 0
    result = json.loads(last)
    assert result["complete"] is True
    assert result["fetched_chunks"] == N_CHUNKS


def test_two_commands_for_one_artifact_share_the_work_of_a_running_node(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    address = start_provider(kvnet, other, tmp_path, "10 MB")
    other.start()
    fetch = ("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    with ThreadPoolExecutor() as pool:
        both = [each.result() for each in [pool.submit(other, *fetch) for _ in range(2)]]
    assert [ran.code for ran in both] == [0, 0]
    assert all(ran.result["complete"] for ran in both)
    assert chunks_served(kvnet) == N_CHUNKS


def test_two_processes_for_one_artifact_share_the_work_without_a_node(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    address = start_provider(kvnet, other, tmp_path, "2 MB")
    fetch = ("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    with ThreadPoolExecutor() as pool:
        both = [each.result() for each in [pool.submit(other, *fetch) for _ in range(2)]]
    assert [ran.code for ran in both] == [0, 0]
    assert sorted(ran.result["fetched_chunks"] for ran in both) == [0, N_CHUNKS]
    assert chunks_served(kvnet) == N_CHUNKS
    assert any("waiting for it" in ran.stdout for ran in both)


def test_each_provider_has_its_part_in_the_result(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    address = start_provider(kvnet, other, tmp_path, "20 MB")
    ran = other("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address)
    (part,) = ran.result["providers"]
    assert address.endswith(part["peer"])
    assert (part["bytes"], part["chunks"], part["dropped"]) == (SAMPLE.size_bytes, N_CHUNKS, "")
    assert part["path"] == "bulk"
    assert part["rate_bytes_s"] == pytest.approx(part["bytes"] / part["seconds"])
    assert part["rate_bytes_s"] < 30_000_000


def test_a_node_that_fetched_serves_on(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    address = start_provider(kvnet, other, tmp_path, "0")
    started, _ = other.start()
    assert other("fetch", artifact_text(SAMPLE.hash), "--from", address).code == 0
    kvnet.json("node", "stop")
    third = Kvnet(tmp_path / "third")
    prepare(third, tmp_path, trusts=FRIEND)
    try:
        ran = third("--json", "fetch", artifact_text(SAMPLE.hash), "--from", started["addresses"][0])
    finally:
        third.end()
    assert ran.result["complete"] is True
    assert [part["peer"] for part in ran.result["providers"]] == [started["peer"]]
    other.watch(lambda seen: seen["counters"].get("announced", 0) > 0, "status")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of the machine")
def test_where_bulk_connections_do_not_work_peers_and_status_say_so(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    # Each listens for them where the other does not look, as behind a firewall.
    kvnet.environment["KVNET_BULK_LISTEN"] = "127.0.0.2:0"
    other.environment["KVNET_BULK_LISTEN"] = "127.0.0.3:0"
    address = start_provider(kvnet, other, tmp_path, "0")
    other.start()
    assert re.fullmatch(r"port \d+", other.asked("status")["bulk"])
    (part,) = other.json("fetch", artifact_text(SAMPLE.hash), "--from", address)["providers"]
    assert part["path"] == "stream"
    (peer,) = other.json("peers")["peers"]
    assert peer["chunks"].startswith("stream: expected an answer at 127.0.0.1 port")
    assert other.asked("status")["bulk"].endswith(", not with 1 connected peer (kvnet peers says why)")


def test_what_cannot_be_a_named_context_is_refused_before_it_is_fetched(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    address = start_provider(kvnet, other, tmp_path, "0")
    ran = other("--json", "fetch", artifact_text(SAMPLE.hash), "--name", "rules", "--from", address)
    assert (ran.code, ran.error["code"]) == (2, "usage")
    assert "carries no messages" in ran.error["message"]
    assert kvnet.asked("status")["counters"].get("chunks_served", 0) == 0
    assert other.json("list")["artifacts"] == []
