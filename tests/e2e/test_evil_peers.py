"""A running node, in its own process on real sockets, among peers that break every rule."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from kvnet.errors import NetworkError
from kvnet.format.hashes import artifact_hash_of, artifact_text
from kvnet.network.interface import ByteStream
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.messages.artifacts import GetManifest, Lookup
from kvnet.protocol.messages.chunks import ChunkHeader, GetChunks
from kvnet.store.disk import DiskStore
from kvnet.trust.envelope import StatementType, open_manifest, seal
from tests.e2e.conftest import TIMEOUT_S, Kvnet, Ran
from tests.e2e.prepared import prepare
from tests.evil import (
    MALFORMED_MANIFESTS,
    EvilPeer,
    attacks,
    frame,
    manifest_answer,
    open_session,
    relay_answer,
    send_and_wait,
)
from tests.unit.store.samples import FRIEND, MINE, OTHER, OWN, Sample, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

SAMPLE = sample(range(1500), key=FRIEND)


async def run(work: Callable[[], Ran]) -> Ran:
    """A command beside the peers of this test."""
    return await trio.to_thread.run_sync(work)


async def test_a_node_stays_up_and_serves_honest_peers_whatever_others_send(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path, nursery: trio.Nursery
) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, trusts=FRIEND)
    started, process = await trio.to_thread.run_sync(kvnet.start)
    address = started["addresses"][0]
    evil = LibP2PNetwork(bytes(32), listen=["127.0.0.1:0"])
    await nursery.start(evil.run)
    peer = await evil.connect(address, timeout_s=TIMEOUT_S)
    for kind, data in attacks():
        await send_and_wait(evil, peer, kind, data, patience_s=0.2)
        await evil.connect(address, timeout_s=TIMEOUT_S)
    # Junk in a session that was opened as it should be, and questions from outside the namespace.
    stream, machine = await open_session(evil, peer, (OTHER,))
    assert machine.opened is not None
    assert not machine.opened.slots
    await stream.send_all(frame(Lookup(request_id=1, slot=0, keys=(bytes(32),))))
    await stream.send_all(frame(GetManifest(request_id=2, slot=0, artifact=bytes(MINE.keyed_artifact(SAMPLE.hash)))))
    with trio.fail_after(TIMEOUT_S):
        answers = b""
        while answers.count(b"unknown") < 1:
            answers += await stream.receive_some(1 << 16)
    assert b"manifest_reply" not in answers
    assert answers.count(b"lookup_reply") == 1
    await stream.send_all(encode_frame(b"\x9f" * 1000))
    with trio.fail_after(TIMEOUT_S):
        assert not await _receive_rest(stream)
    silent = [await trio.open_tcp_stream("127.0.0.1", int(address.split("/")[4])) for _ in range(100)]
    fetched = await run(lambda: other("--json", "fetch", artifact_text(SAMPLE.hash), "--from", address))
    assert fetched.result["complete"] is True
    for connection in silent:
        await trio.aclose_forcefully(connection)
    assert process.returncode is None
    status = await run(lambda: kvnet("--json", "status"))
    assert (status.result["running"], status.result["pid"]) == (True, process.pid)


async def _receive_rest(stream: ByteStream) -> bytes:
    """What still comes until the other side gives the stream up."""
    received = b""
    with suppress(NetworkError):
        while piece := await stream.receive_some(1 << 16):
            received += piece
    return received


async def test_a_bad_manifest_is_refused_with_the_reason_and_the_artifact_comes_from_an_honest_peer(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path, nursery: trio.Nursery
) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, trusts=FRIEND)
    honest, _ = await trio.to_thread.run_sync(kvnet.start)
    _, process = await trio.to_thread.run_sync(other.start)
    sound = open_manifest(SAMPLE.envelope).manifest_bytes
    evil = EvilPeer(LibP2PNetwork(bytes(32), listen=["127.0.0.1:0"]), (MINE,), manifest_answer(b"x"))
    await nursery.start(evil.network.run)
    (address,) = evil.network.addresses()
    for name in ("a key twice", "a trailing byte", "500 levels inside"):
        make, reason = MALFORMED_MANIFESTS[name]
        payload = make(sound)
        evil.answer = manifest_answer(seal(StatementType.MANIFEST, payload, FRIEND))
        wanted = artifact_text(artifact_hash_of(payload))
        ran = await run(partial(other, "fetch", wanted, "--from", address))
        assert (ran.code, ran.stdout) == (60, "")
        assert any(part in ran.stderr for part in reason.split("|"))
    for envelope in _forged(SAMPLE):
        evil.answer = manifest_answer(envelope)
        ran = await run(lambda: other("fetch", artifact_text(SAMPLE.hash), "--from", address))
        assert (ran.code, ran.stdout) == (30, "")
        assert "signature" in ran.stderr or "signed by" in ran.stderr
    assert process.returncode is None
    addresses = ("--from", address, "--from", honest["addresses"][0])
    ran = await run(lambda: other("--json", "fetch", artifact_text(SAMPLE.hash), *addresses))
    assert ran.result["complete"] is True
    assert [each["peer"] for each in ran.result["providers"] if each["chunks"]] == [honest["peer"]]
    assert all(each["dropped"] for each in ran.result["providers"] if not each["chunks"])


async def test_a_fetch_from_nobody_honest_fails_and_names_what_is_missing(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path, nursery: trio.Nursery
) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, trusts=FRIEND)
    store = DiskStore.open(kvnet.data_dir / "store", quota_bytes=1 << 30, min_free_bytes=0)
    record = store.get(SAMPLE.hash)
    store.close()
    assert record is not None

    async def flip_a_byte(stream: ByteStream, request: GetChunks) -> None:
        data = SAMPLE.chunks[request.indices[0]]
        header = frame(ChunkHeader(index=request.indices[0], length_bytes=len(data)))
        await stream.send_all(header + bytes([data[0] ^ 1]) + data[1:])

    evil = EvilPeer(LibP2PNetwork(bytes(32), listen=["127.0.0.1:0"]), (MINE,), relay_answer(record), flip_a_byte)
    await nursery.start(evil.network.run)
    ran = await run(lambda: other("fetch", artifact_text(SAMPLE.hash), "--from", evil.network.addresses()[0]))
    assert (ran.code, ran.stdout) == (60, "")
    assert f"{len(SAMPLE.chunks)} chunks are missing: the only provider sent other bytes than asked for" in ran.stderr
    assert evil.chunk_requests <= 3


def _forged(artifact: Sample) -> list[bytes]:
    """Signed by another key than the manifest names; under another manifest's signature; not signed."""
    payload = open_manifest(artifact.envelope).manifest_bytes
    other = seal(StatementType.MANIFEST, b"another", FRIEND)
    return [
        seal(StatementType.MANIFEST, payload, OWN),
        artifact.envelope[:-64] + other[-64:],
        artifact.envelope[:-64] + bytes(64),
    ]
