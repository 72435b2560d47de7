"""Peers that break the format, the protocol or a signature: refused with the reason, and everybody else is served."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import KvnetError, NotFoundError, PeerUnreachableError, TrustError
from kvnet.format.hashes import ArtifactHash, artifact_hash_of
from kvnet.format.manifest import DerivedSpan
from kvnet.network.interface import ByteStream, StreamKind
from kvnet.network.memory import MemoryNetwork, World
from kvnet.network.memory_links import Link
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import GetChunkList, GetManifest, Lookup, LookupReply, Match
from kvnet.protocol.messages.chunks import ChunkHeader, ChunkRefused, GetChunks, decode_chunk_answer
from kvnet.protocol.messages.control import Reply, Request
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.envelope import StatementType, open_manifest, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.policy import TrustPolicy
from tests.evil import (
    BROKEN_HANDSHAKES,
    MALFORMED_MANIFESTS,
    EvilPeer,
    attacks,
    frame,
    manifest_answer,
    open_session,
    relay_answer,
    send_and_wait,
)
from tests.simulated.nodes import MINE, OTHER, Node, identity, seed, start_node
from tests.unit.store.samples import publish, sample

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]
PROMPT = [*TOKENS, 5, 6, 7]
A_KEY = PublisherKey(seed("a"))
STRANGER = PublisherKey(seed("stranger"))


def sealed(payload: bytes, key: PublisherKey = A_KEY) -> bytes:
    return seal(StatementType.MANIFEST, payload, key)


async def start_evil(nursery: trio.Nursery, evil: EvilPeer) -> str:
    network = evil.network
    assert isinstance(network, MemoryNetwork)
    await nursery.start(network.run)
    return network.address


def claim(artifact: ArtifactHash, size_bytes: int = 1) -> Callable[[Lookup], LookupReply]:
    """Claims to have all but the last block of what is looked for."""

    def match(request: Lookup) -> LookupReply:
        found = Match(
            key_index=1,
            artifact=bytes(MINE.keyed_artifact(artifact)),
            n_tokens=1500,
            codec="raw",
            size_bytes=size_bytes,
        )
        return LookupReply(request_id=request.request_id, matches=(found,))

    return match


async def is_served_by(node: Node, honest: Node, record: ArtifactRecord) -> bool:
    """Whether a node gets an artifact from an honest peer."""
    await node.meet(honest)
    return (await node.fetch(record.hash)).record.complete


@pytest.mark.parametrize("variant", MALFORMED_MANIFESTS)
async def test_a_malformed_manifest_from_a_peer_is_refused_with_the_reason(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, variant: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    make, reason = MALFORMED_MANIFESTS[variant]
    # Signed by a trusted key, and under the hash of its own bytes: only its form is wrong.
    payload = make(open_manifest(added.record.envelope).manifest_bytes)
    wanted = artifact_hash_of(payload)
    evil = EvilPeer(world.network("evil"), (MINE,), manifest_answer(sealed(payload), claim(wanted)))
    assert await b.exchange.connect(await start_evil(nursery, evil)) is not None
    with pytest.raises(NotFoundError, match=reason):
        await b.fetch(wanted)
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert [type(request) for request in evil.requests].count(GetManifest) == 2
    assert not b.store.artifacts()
    assert await is_served_by(b, a, added.record)


async def test_an_envelope_of_nothing_but_nesting_is_refused(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    for number, unit in enumerate((b"\x81", b"\xa1\x00", b"\xc1", b"\x9f")):
        evil = EvilPeer(world.network(f"evil{number}"), (MINE,), manifest_answer((unit * 4000)[:4000]))
        await b.exchange.connect(await start_evil(nursery, evil))
    with pytest.raises(NotFoundError, match=r"4 x .*COSE_Sign1"):
        await b.fetch(added.record.hash)
    assert await is_served_by(b, a, added.record)


# --- who signed what --------------------------------------------------------------------------------------------------


def signed_by_another(record: ArtifactRecord) -> bytes:
    return sealed(open_manifest(record.envelope).manifest_bytes, STRANGER)


def signature_of_another_manifest(record: ArtifactRecord) -> bytes:
    other = sealed(b"another manifest", STRANGER)
    return record.envelope[:-64] + other[-64:]


def unsigned(record: ArtifactRecord) -> bytes:
    return record.envelope[:-64] + bytes(64)


def without_a_signature(record: ArtifactRecord) -> bytes:
    return open_manifest(record.envelope).manifest_bytes


FORGERIES: dict[str, tuple[Callable[[ArtifactRecord], bytes], type[KvnetError], str]] = {
    "signed by another key than it claims": (signed_by_another, TrustError, "that the manifest names"),
    "another manifest's signature": (signature_of_another_manifest, TrustError, "not valid"),
    "unsigned": (unsigned, TrustError, "not valid"),
    "no envelope": (without_a_signature, NotFoundError, "COSE_Sign1"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_manifest_its_publisher_did_not_sign_is_not_used_and_does_not_hide_the_sound_one(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, forgery: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    make, kind, reason = FORGERIES[forgery]
    evil = EvilPeer(world.network("evil"), (MINE,), manifest_answer(make(added.record), claim(added.record.hash)))
    assert await b.exchange.connect(await start_evil(nursery, evil)) is not None
    with pytest.raises(kind, match=reason):
        await b.fetch(added.record.hash)
    assert (await b.generate(PROMPT)).reused_tokens == 0
    # The forger is asked first, and the honest peer all the same.
    assert await is_served_by(b, a, added.record)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [("own", "the trust policy is own"), ("trusted", "not among the trusted publishers")],
)
async def test_an_unknown_signer_follows_the_policy_and_the_refusal_says_which(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, policy: str, reason: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    who = identity("b")
    object.__setattr__(who, "trust", TrustPolicy(policy, own=who.trust.own, trusted=frozenset()))  # type: ignore[arg-type]
    b = await start_node(world, nursery, tmp_path, "b", who=who)
    added = await a.add(TOKENS)
    await b.meet(a)
    with pytest.raises(TrustError, match=reason):
        await b.fetch(added.record.hash)
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert not b.store.artifacts()


async def test_the_policy_own_uses_not_even_what_a_trusted_key_signed(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    who = identity("b", trusts=["a"])
    object.__setattr__(who, "trust", TrustPolicy("own", own=who.trust.own, trusted=who.trust.trusted))
    b = await start_node(world, nursery, tmp_path, "b", who=who)
    added = await a.add(TOKENS)
    await b.meet(a)
    with pytest.raises(TrustError, match="the trust policy is own"):
        await b.fetch(added.record.hash)


async def test_what_a_trusted_key_signed_is_used_whoever_passes_it_on(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    relay = await start_node(world, nursery, tmp_path, "relay", who=identity("relay", trusts=["a"]))
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await relay.meet(a)
    await relay.fetch(added.record.hash)
    own_of_relay = await relay.add(TOKENS[:300])
    await b.meet(relay)
    answer = await b.generate(PROMPT)
    assert [source.signer for source in answer.sources] == [A_KEY.public]
    assert answer.sources[0].peer == relay.network.peer_id
    with pytest.raises(TrustError):
        await b.fetch(own_of_relay.record.hash)


# --- peers that break the protocol ------------------------------------------------------------------------------------


@pytest.mark.parametrize("handshake", BROKEN_HANDSHAKES)
async def test_a_peer_that_breaks_the_handshake_costs_nobody_else_anything(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, handshake: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    evil = world.network("evil")

    async def misbehave(peer: PeerId, stream: ByteStream) -> None:
        if BROKEN_HANDSHAKES[handshake]:
            await stream.send_all(BROKEN_HANDSHAKES[handshake])
            while await stream.receive_some(1 << 16):
                pass

    evil.set_handler(StreamKind.CONTROL, misbehave)
    await nursery.start(evil.run)
    session = await b.exchange.connect(evil.address)
    assert session is None or not session.slots
    await trio.sleep(60)
    assert await is_served_by(b, a, added.record)


async def test_a_node_answers_honest_peers_after_everything_a_stranger_may_send(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    evil = world.network("evil")
    await nursery.start(evil.run)
    peer = await evil.connect(a.network.address, timeout_s=5)
    for kind, data in attacks():
        await send_and_wait(evil, peer, kind, data, patience_s=20)
    assert a.exchange.counters().get("chunks_served", 0) == 0
    assert await is_served_by(b, a, added.record)


async def test_a_member_that_asks_in_the_wrong_slot_or_of_another_session_gets_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    added = await a.add(TOKENS)
    evil = world.network("evil")
    await nursery.start(evil.run)
    peer = await evil.connect(a.network.address, timeout_s=5)
    stream, machine = await open_session(evil, peer, (OTHER,))
    assert machine.opened is not None
    assert not machine.opened.slots
    for slot in range(8):
        await stream.send_all(
            frame(GetManifest(request_id=slot, slot=slot, artifact=bytes(MINE.keyed_artifact(added.record.hash))))
        )
    # The machine of an honest peer would not have asked: what comes back is read by hand.
    received = b""
    with trio.move_on_after(5):
        while received.count(b"unknown") < 8:
            received += await stream.receive_some(1 << 16)
    assert received.count(b"unknown") == 8
    wanted = GetChunks(
        session=machine.opened.session_id,
        slot=0,
        artifact=bytes(MINE.keyed_artifact(added.record.hash)),
        indices=(0, 1),
    )
    chunks = await evil.open_stream(peer, StreamKind.CHUNKS)
    await chunks.send_all(frame(wanted))
    for index in (0, 1):
        length = int.from_bytes(await chunks.receive_exactly(4), "big")
        refusal = decode_chunk_answer(await chunks.receive_exactly(length))
        assert refusal == ChunkRefused(index=index, reason="unknown")


# --- peers that stall -------------------------------------------------------------------------------------------------


async def nothing(stream: ByteStream, request: GetChunks, data: bytes) -> None:
    await trio.sleep_forever()


async def half_a_chunk(stream: ByteStream, request: GetChunks, data: bytes) -> None:
    await stream.send_all(frame(ChunkHeader(index=request.indices[0], length_bytes=len(data))) + data[: len(data) // 2])
    await trio.sleep_forever()


async def a_byte_a_second(stream: ByteStream, request: GetChunks, data: bytes) -> None:
    await stream.send_all(frame(ChunkHeader(index=request.indices[0], length_bytes=len(data))))
    for position in range(len(data)):
        await stream.send_all(data[position : position + 1])
        await trio.sleep(1)


STALLS: dict[str, Callable[[ByteStream, GetChunks, bytes], Awaitable[None]]] = {
    "nothing": nothing,
    "half a chunk": half_a_chunk,
    "a byte a second": a_byte_a_second,
}


def staller(world: World, a: Node, record: ArtifactRecord, how: str) -> EvilPeer:
    async def chunks(stream: ByteStream, request: GetChunks) -> None:
        await STALLS[how](stream, request, a.store.read_chunk(record.entries[request.indices[0]].hash))

    return EvilPeer(world.network("evil"), (MINE,), relay_answer(record), chunks)


@pytest.mark.parametrize("how", STALLS)
async def test_a_provider_that_stalls_is_left_for_an_honest_one(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, how: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    evil = staller(world, a, added.record, how)
    await b.exchange.connect(await start_evil(nursery, evil))
    located = await b.exchange.fetcher.locate(added.record.hash)
    assert located.session.peer == evil.network.peer_id
    await b.meet(a)
    entries = await b.exchange.fetcher.chunk_list(located)
    with trio.fail_after(120):
        fetched = await b.exchange.fetcher.fetch(located, entries)
    assert fetched.record.complete
    assert evil.chunk_requests == 1


@pytest.mark.parametrize("how", STALLS)
async def test_a_fetch_from_nobody_but_a_stalling_provider_ends_naming_what_is_missing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, how: str
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    await b.exchange.connect(await start_evil(nursery, staller(world, a, added.record, how)))
    located = await b.exchange.fetcher.locate(added.record.hash)
    entries = await b.exchange.fetcher.chunk_list(located)
    with pytest.raises(NotFoundError, match=f"{len(entries)} chunks are missing"), trio.fail_after(300):
        await b.exchange.fetcher.fetch(located, entries)
    assert b.store.get(added.record.hash) is None
    assert not list((tmp_path / "b").rglob("*.part*"))


@pytest.mark.parametrize("silent", [GetManifest, GetChunkList, GetChunks])
async def test_a_peer_that_claims_a_prefix_and_falls_silent_costs_a_generation_no_more_than_the_lookup_and_a_prefill(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, silent: type
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record
    relay = relay_answer(record, claim(record.hash))

    def answer(request: Request) -> Reply | None:
        return None if isinstance(request, silent) else relay(request)

    evil = EvilPeer(world.network("evil"), (MINE,), answer)
    await b.exchange.connect(await start_evil(nursery, evil))
    cold = await b.generate(PROMPT, reuse=False)
    answered = await b.generate(PROMPT)
    assert (answered.reused_tokens, answered.text) == (0, cold.text)
    assert answered.ttft_s < 4
    assert silent is GetChunks or any(isinstance(request, silent) for request in evil.requests)
    assert not b.store.artifacts()


async def test_a_peer_that_shows_the_tokens_and_then_stalls_costs_little_more_than_a_prefill(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    record = (await a.add(TOKENS)).record

    async def chunks(stream: ByteStream, request: GetChunks) -> None:
        for index in request.indices:
            if index not in record.manifest.plan().token_chunks:
                await trio.sleep_forever()
            data = a.store.read_chunk(record.entries[index].hash)
            await stream.send_all(frame(ChunkHeader(index=index, length_bytes=len(data))) + data)

    evil = EvilPeer(world.network("evil"), (MINE,), relay_answer(record, claim(record.hash)), chunks)
    await b.exchange.connect(await start_evil(nursery, evil))
    cold = await b.generate(PROMPT, reuse=False)
    # A prefill of 5 s, which the six blocks would spare; of which one would have been waited for.
    answered = await b.generate(PROMPT, prefill_tokens_s=300.0)
    assert (answered.text, answered.reused_tokens) == (cold.text, 0)
    assert evil.chunk_requests > 1
    assert answered.ttft_s < 2.5


async def test_an_artifact_whose_tokens_have_another_key_than_was_signed_is_not_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    a.forge_keys(TOKENS[::-1], keys_of=TOKENS)
    await b.meet(a)
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert answer.text == (await b.generate(PROMPT, reuse=False)).text
    assert not b.store.artifacts()


async def test_two_artifacts_with_one_key_are_told_apart_by_their_tokens(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    cold = await a.generate(PROMPT, reuse=False)
    a.forge_keys(TOKENS[::-1], keys_of=TOKENS)
    assert (await a.generate(PROMPT)).reused_tokens == 0
    await a.add(TOKENS[:700])
    warm = await a.generate(PROMPT)
    assert (warm.reused_tokens, warm.text) == (700, cold.text)


async def test_a_peer_that_claims_more_than_it_has_gets_a_miss(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    other = await a.add([9, *TOKENS[1:]])
    evil = EvilPeer(world.network("evil"), (MINE,), manifest_answer(other.record.envelope, claim(other.record.hash)))
    await b.exchange.connect(await start_evil(nursery, evil))
    answer = await b.generate(PROMPT)
    assert answer.reused_tokens == 0
    assert not b.store.artifacts()


async def test_a_peer_that_answers_nothing_is_a_miss_however_much_is_asked(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.add(TOKENS)
    evil = EvilPeer(world.network("evil"), (MINE,), lambda _: None)
    await b.exchange.connect(await start_evil(nursery, evil))
    reasons: list[str] = []

    async def look_for(number: int) -> None:
        with pytest.raises(NotFoundError) as missed:
            await b.exchange.fetcher.locate(ArtifactHash(bytes([number]) * 32))
        reasons.append(str(missed.value))

    async with trio.open_nursery() as asking:
        for number in range(100):
            asking.start_soon(look_for, number)
    assert sum("at most 64 open requests" in reason for reason in reasons) == 36
    assert await is_served_by(b, a, added.record)


async def test_a_prefix_that_comes_from_more_publishers_than_a_manifest_can_name_is_computed_anew(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a", who=identity("a", trusts=["friend", "stranger"]))
    friend = PublisherKey(seed("friend"))
    fingerprint = a.engine.info.fingerprint
    assert fingerprint is not None
    sources = tuple(DerivedSpan(ArtifactHash(bytes([n]) * 32), STRANGER.public, 0, 0) for n in range(16))
    for spans in (sources[:15], sources):
        tokens = [len(spans), *TOKENS]
        made = sample(tokens, key=friend, namespace=MINE, fingerprint=fingerprint, derived_from=spans)
        publish(a.store, made)
    assert len((await a.add([15, *TOKENS, 5])).record.manifest.derived_from) == 16
    added = await a.add([16, *TOKENS, 5])
    assert (added.reused_tokens, added.record.manifest.derived_from) == (0, ())


async def test_a_member_that_takes_no_bytes_holds_up_no_answer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b = await start_node(world, nursery, tmp_path, "b")
    evil = EvilPeer(world.network("evil"), (MINE,), lambda _request: None)
    address = await start_evil(nursery, evil)
    session = await b.exchange.connect(address)
    assert session is not None
    world.set_link(b.network, evil.network, Link(rate_bytes_per_s=1.0))  # type: ignore[arg-type]
    keys = tuple(bytes([i % 256, i // 256]) * 16 for i in range(4000))
    lookup = Lookup(request_id=0, slot=session.slots[MINE], keys=keys)
    for _ in range(8):
        with trio.move_on_after(0.5) as scope:
            with suppress(PeerUnreachableError):
                await session.ask(lookup)
        assert trio.current_time() < scope.deadline + 0.1


async def test_a_silent_claimant_of_more_leaves_an_honest_peer_the_time_to_deliver(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    honest = await start_node(world, nursery, tmp_path, "honest")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a", "honest"]))
    deeper = (await a.add(TOKENS)).record
    await honest.add(TOKENS[:1024])
    relay = relay_answer(deeper, claim(deeper.hash))

    def answer(request: Request) -> Reply | None:
        return None if isinstance(request, GetManifest) else relay(request)

    evil = EvilPeer(world.network("evil"), (MINE,), answer)
    await b.exchange.connect(await start_evil(nursery, evil))
    await b.meet(honest)
    cold = await b.generate(PROMPT, reuse=False)
    answered = await b.generate(PROMPT)
    assert (answered.text, answered.reused_tokens) == (cold.text, 1024)
    assert any(isinstance(request, GetManifest) for request in evil.requests)


async def test_a_bug_that_a_session_finds_costs_that_session_and_not_the_node_whoever_has_dialled(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = [
        await start_node(world, nursery, tmp_path, name, who=identity(name, trusts=["a", "b", "c"])) for name in "abc"
    ]

    async def stumble(session: object) -> None:
        raise ValueError("a bug")

    a.exchange.greet_with(stumble)
    await a.exchange.connect(b.network.address)
    await c.exchange.connect(a.network.address)
    await trio.sleep(120)
    assert {record.exc_info[0] for record in caplog.records if record.exc_info} == {ExceptionGroup}
    added = await b.add(TOKENS)
    await c.meet(b)
    assert (await c.fetch(added.record.hash)).record.complete
    assert a.exchange.addresses()
