"""Revocations among simulated nodes: they reach all, are honoured everywhere, and cannot be held back for long."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import EngineError, NotFoundError, TrustError
from kvnet.exchange.meeting import MeetLimits
from kvnet.exchange.revoking import RevocationGuard
from kvnet.format.hashes import ArtifactHash
from kvnet.format.prefix import block_keys
from kvnet.network.memory import World
from kvnet.network.memory_links import Link
from kvnet.protocol.gossip import RECONCILE_S
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.policy import Refusal
from kvnet.trust.statement_bodies import ProviderRecord, Revocation, Tag
from kvnet.trust.statements import sign_statement
from tests.simulated.nodes import MINE, identity, start_node, wall_s
from tests.simulated.revoking import TOKENS, Hearer, key_of, start_hearer

NAMES = tuple("abcdefghijklmnopqrst")


async def wait_for(condition: Callable[[], bool], within_s: float) -> float:
    """Seconds until something is so; fails when it is not in time."""
    began_s = trio.current_time()
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - of several nodes, none of which has an event for it
            await trio.sleep(0.05)
    return trio.current_time() - began_s


def refused(hearer: Hearer, signer: str) -> bool:
    """Whether a node takes nothing that this node's key has signed."""
    return hearer.who.policy().is_revoked(key_of(signer).public, MINE.id)


# --- twenty nodes -----------------------------------------------------------------------------------------------------


async def test_a_revoked_key_is_honoured_by_twenty_nodes_within_a_minute_and_by_sleepers_when_they_wake(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hearers: dict[str, Hearer] = {}
    for at, name in enumerate(NAMES):
        bootstrap = tuple(hearers[other].node.network.address for other in NAMES[max(0, at - 3) : at])
        hearers[name] = await start_hearer(
            world, nursery, tmp_path, name, trusts=NAMES, bootstrap=bootstrap, meet=MeetLimits(wanted=0)
        )
    a = hearers["a"]
    added = await a.node.add(TOKENS)
    await wait_for(lambda: all(each.node.exchange.sessions() for each in hearers.values()), 60)
    holders = [hearers[name] for name in "bkt"]
    await holders[0].node.meet(a.node)
    await holders[0].node.fetch(added.record.hash)
    for fetching, source in ((holders[1], holders[0]), (holders[2], holders[1])):
        await fetching.node.meet(source.node)
        await fetching.node.fetch(added.record.hash)
    asleep = [hearers[name] for name in "gmq"]
    for each in asleep:
        world.hang(each.node.network)
    await trio.sleep(5)

    await a.revoke_key(key_of("a").public)
    awake = [each for each in hearers.values() if each not in asleep]
    took_s = await wait_for(lambda: all(refused(each, "a") for each in awake), 60)
    assert took_s < 5
    await wait_for(lambda: all(added.record.hash in each.guard.revoked for each in holders), 1)
    for each in holders:
        assert isinstance(each.who.policy().judge(added.record.manifest), Refusal)
        assert each.node.store.get(added.record.hash) is not None, "it is kept, and nothing reads it"
    reader = hearers["d"]
    await reader.node.meet(*(each.node for each in holders))
    with pytest.raises(NotFoundError):
        await reader.node.fetch(added.record.hash)

    await trio.sleep(90)
    assert not any(refused(each, "a") for each in asleep)
    for each in asleep:
        world.resume(each.node.network)
    await wait_for(lambda: all(refused(each, "a") for each in asleep), 60)


# --- honoured everywhere ----------------------------------------------------------------------------------------------


async def test_a_revoked_artifact_is_used_served_and_kept_in_memory_no_more(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    added = await a.node.add(TOKENS)
    await b.node.meet(a.node)
    await b.node.fetch(added.record.hash)
    warm = await b.node.generate([*TOKENS, 5, 6, 7])
    assert warm.reused_tokens == len(TOKENS)

    await a.revoke_artifact(added.record.hash)
    await trio.sleep(1)
    again = await b.node.generate([*TOKENS, 5, 6, 7])
    assert again.reused_tokens == 0
    assert again.text == warm.text
    assert (await b.node.engine.live()).n_caches == 0
    for each in (a, b):
        assert each.guard.revoked == {added.record.hash}
        with pytest.raises(NotFoundError):
            await (b if each is a else a).node.exchange.fetcher.locate(added.record.hash)


async def test_what_was_derived_from_a_revoked_artifact_is_revoked_with_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    c = await start_hearer(world, nursery, tmp_path, "c", trusts=("a", "b"))
    first = await a.node.add(TOKENS)
    await b.node.meet(a.node)
    await b.node.fetch(first.record.hash)
    longer = await b.node.add([*TOKENS, *range(3, 303)])
    assert [span.artifact for span in longer.record.manifest.derived_from] == [first.record.hash]
    await c.node.meet(b.node)
    await c.node.fetch(longer.record.hash)

    await a.revoke_artifact(first.record.hash)
    await trio.sleep(1)
    assert longer.record.hash in b.guard.revoked
    assert c.guard.revoked == {longer.record.hash}
    assert (await c.node.generate([*TOKENS, *range(3, 303), 9])).reused_tokens == 0


async def test_a_fetch_under_way_ends_when_its_artifact_is_revoked(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    added = await a.node.add(TOKENS)
    await b.node.meet(a.node)
    world.set_link(a.node.network, b.node.network, Link(latency_s=0.001, rate_bytes_per_s=2_000))
    failure: list[BaseException] = []

    async def fetch() -> None:
        try:
            await b.node.fetch(added.record.hash)
        except TrustError as error:
            failure.append(error)

    nursery.start_soon(fetch)
    await trio.sleep(2)
    assert not failure
    # By another way than the link that is busy: what matters here is that the fetch hears of it.
    b.statements.take([(await a.revoke_artifact(added.record.hash)).envelope], MINE)
    await wait_for(lambda: bool(failure), 2)
    assert "revoked" in str(failure[0])
    assert b.node.store.get(added.record.hash) is None


async def test_serving_ends_in_the_middle_of_a_request(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    deaf = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    added = await a.node.add(TOKENS)
    await deaf.meet(a.node)
    located = await deaf.exchange.fetcher.locate(added.record.hash)
    entries = await deaf.exchange.fetcher.chunk_list(located)
    world.set_link(a.node.network, deaf.network, Link(latency_s=0.001, rate_bytes_per_s=20_000))
    failure: list[BaseException] = []

    async def fetch() -> None:
        try:
            await deaf.exchange.fetcher.fetch(located, entries)
        except NotFoundError as error:
            failure.append(error)

    nursery.start_soon(fetch)
    await trio.sleep(2)
    served = a.node.exchange.counters()["chunks_served"]
    assert not failure
    await a.revoke_artifact(added.record.hash)
    await wait_for(lambda: bool(failure), 60)
    assert a.node.exchange.counters()["chunks_served"] <= served + 1
    assert served < added.record.manifest.n_chunks - 1
    assert not a.node.exchange._offering._announced, "nor is it announced"


async def test_what_was_revoked_is_served_no_more_after_a_restart(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    added = await a.node.add(TOKENS)
    await a.revoke_artifact(added.record.hash)
    await trio.sleep(1)
    await a.node.exchange.reload()
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    await b.node.meet(a.node)
    with pytest.raises(NotFoundError):
        await b.node.exchange.fetcher.locate(added.record.hash)
    assert len(a.node.exchange._server) == 0


async def test_a_revocation_by_somebody_whose_word_does_not_count_changes_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a", trusts=("b",))
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    added = await a.node.add(TOKENS)
    await b.node.meet(a.node)
    await b.revoke_artifact(added.record.hash)
    await b.revoke_key(key_of("a").public)
    await trio.sleep(1)
    assert len(a.statements.all(StatementType.REVOCATION)) == 2
    assert not a.guard.revoked
    c = await start_hearer(world, nursery, tmp_path, "c", trusts=("a",))
    await c.node.meet(a.node)
    assert (await c.node.fetch(added.record.hash)).record.complete


async def test_one_of_the_owners_machines_revokes_another_everywhere(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    devices = frozenset(key_of(name).public for name in "abc")
    trust = {"devices": devices, "members": {MINE.id: devices}}
    a, b, c = [await start_hearer(world, nursery, tmp_path, name, trust=trust) for name in "abc"]
    await b.node.meet(a.node, c.node)
    await a.revoke_key(key_of("c").public)
    await wait_for(lambda: refused(b, "c"), 5)
    assert not refused(c, "c"), "no other machine takes a node's own key from it"
    await c.revoke_key(key_of("a").public)
    await trio.sleep(2)
    assert not refused(a, "a")
    assert refused(b, "a"), "of two equals that revoke each other both are out"
    assert refused(b, "c")


async def test_a_rotated_key_is_followed_without_a_word_of_the_owner(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    before = await a.node.add(TOKENS)
    new = PublisherKey(bytes([77]) * 32)
    await b.node.meet(a.node)
    await a.rotate_to(new)
    a.who.key = new
    a.who.trust = a.who.trust.__class__("trusted", frozenset({key_of("a").public, new.public}), frozenset())
    after = await a.node.add(TOKENS[::-1])
    await trio.sleep(1)
    assert (await b.node.fetch(before.record.hash)).record.manifest.publisher == key_of("a").public
    assert (await b.node.fetch(after.record.hash)).record.manifest.publisher == new.public


# --- partitions and liars ---------------------------------------------------------------------------------------------


async def test_a_revocation_crosses_over_when_a_partition_heals(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    names = NAMES[:6]
    hearers = [await start_hearer(world, nursery, tmp_path, name, trusts=names) for name in names]
    for left, right in pairwise(hearers):
        await left.node.meet(right.node)
    networks = [each.node.network for each in hearers]
    world.partition(networks[:3], networks[3:])
    await hearers[0].revoke_key(key_of("a").public)
    await trio.sleep(20)
    assert [refused(each, "a") for each in hearers] == [True] * 3 + [False] * 3
    world.heal()
    await wait_for(lambda: all(refused(each, "a") for each in hearers), 2 * RECONCILE_S)


async def test_replay_of_old_statements_by_a_liar_changes_nothing(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    evil = await start_hearer(world, nursery, tmp_path, "evil", trusts=("a",))
    await evil.node.meet(a.node, b.node)

    def version(number: int) -> Callable[[int, int], Tag]:
        return lambda sequence, issued: Tag(
            sequence=sequence,
            issued=issued,
            expires=0,
            namespace=MINE.id,
            name="project",
            number=number,
            artifact=bytes([number]) * 32,
        )

    old = await a.statements.say(version(1))
    await trio.sleep(1)
    new = await a.statements.say(version(2))
    await wait_for(lambda: b.statements.all(StatementType.TAG) == [new], 5)
    evil.statements.also_tell(lambda _: [old.envelope])
    for _ in range(5):
        evil.statements._talks.spread(MINE, [old.envelope], None)
        b.statements.take([old.envelope], MINE)
        await trio.sleep(1)
    c = await start_hearer(world, nursery, tmp_path, "c", trusts=("a",))
    await c.node.meet(evil.node, b.node)
    await wait_for(lambda: c.statements.all(StatementType.TAG) == [new], 10)
    assert b.statements.all(StatementType.TAG) == [new]
    assert a.statements.all(StatementType.TAG) == [new]


async def test_mix_and_match_what_says_another_namespace_or_another_time_is_passed_over(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    await b.node.meet(a.node)
    await trio.sleep(1)
    now_s = int(wall_s())

    def tag(**fields: object) -> bytes:
        values = {"sequence": now_s * 1000, "issued": now_s, "expires": 0, "namespace": bytes(MINE.id)} | fields
        return sign_statement(Tag(name="x", number=1, artifact=bytes(32), **values), key_of("a")).envelope  # type: ignore[arg-type]

    bad = [
        tag(namespace=bytes(32)),
        tag(sequence=2**62),
        tag(issued=now_s + 700),
        tag(expires=now_s - 1),
        tag()[:-1] + b"\0",
        b"no statement",
    ]
    a.statements.spread(MINE, bad)
    await trio.sleep(2)
    assert b.statements.all(StatementType.TAG) == []
    assert b.statements.counters["statements_misplaced"] == 1
    assert b.statements.counters["statements_untimely"] == 3
    assert b.statements.counters["statements_invalid"] == 2
    a.statements.spread(MINE, [tag()])
    await trio.sleep(1)
    assert len(b.statements.all(StatementType.TAG)) == 1


async def test_endless_data_of_one_member_holds_up_nobody(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    evil = await start_hearer(world, nursery, tmp_path, "evil")
    await b.node.meet(a.node, evil.node)
    now_s = int(wall_s())
    flood = [
        sign_statement(
            Revocation(
                sequence=now_s * 1000,
                issued=now_s,
                expires=0,
                kind="artifact",
                target=n.to_bytes(32, "big"),
                reason="",
            ),
            key_of("evil"),
        ).envelope
        for n in range(3000)
    ]
    await trio.sleep(1)
    evil.statements.spread(MINE, flood)
    await trio.sleep(1)
    artifact = ArtifactHash(b"a" * 32)
    await a.revoke_artifact(artifact)
    await wait_for(lambda: any(s.signer == a.who.key.public for s in b.statements.all(StatementType.REVOCATION)), 20)
    assert len(b.statements.all(StatementType.REVOCATION)) <= 1 + 16, "a stranger has room for 16"
    assert b.statements.counters["statements_dropped"] > 500


async def test_freeze_while_a_revocation_is_held_back_its_signers_artifacts_are_not_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, evil, c = await frozen(world, nursery, tmp_path)
    added = await a.node.add(TOKENS)
    wrong = await a.node.add(TOKENS[::-1])
    await evil.node.meet(a.node)
    await evil.node.fetch(added.record.hash)
    await trio.sleep(1)
    world.partition([a.node.network], [evil.node.network, c.node.network])
    await trio.sleep(200)
    revoked = await a.revoke_artifact(wrong.record.hash)
    await c.node.meet(evil.node)
    await trio.sleep(1)
    evil.statements.spread(MINE, [page_of(a, revoked.body.sequence, 1)])
    await trio.sleep(2)
    refusal = c.who.policy().judge(added.record.manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revocation_withheld"
    with pytest.raises(TrustError, match="nobody has told this node what"):
        await c.node.fetch(added.record.hash)

    world.heal()
    await c.node.meet(a.node)
    await wait_for(lambda: not isinstance(c.who.policy().judge(added.record.manifest), Refusal), 30)
    assert (await c.node.fetch(added.record.hash)).record.complete
    assert isinstance(c.who.policy().judge(wrong.record.manifest), Refusal)


async def test_freeze_of_an_earlier_revocation_behind_a_later_one_is_found_out_too(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, evil, c = await frozen(world, nursery, tmp_path)
    good, bad = await a.node.add(TOKENS), await a.node.add(TOKENS[::-1])
    held_back = await a.revoke_artifact(bad.record.hash)
    later = await a.revoke_artifact(ArtifactHash(b"o" * 32))
    await c.node.meet(evil.node)
    await trio.sleep(1)
    evil.statements.spread(MINE, [later.envelope, page_of(a, later.body.sequence, 2)])
    await trio.sleep(2)
    assert [each.envelope for each in c.statements.all(StatementType.REVOCATION)] == [later.envelope]
    refusal = c.who.policy().judge(good.record.manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revocation_withheld"
    evil.statements.spread(MINE, [held_back.envelope])
    await trio.sleep(2)
    assert not isinstance(c.who.policy().judge(good.record.manifest), Refusal)
    assert isinstance(c.who.policy().judge(bad.record.manifest), Refusal)


async def frozen(world: World, nursery: trio.Nursery, tmp_path: Path) -> tuple[Hearer, Hearer, Hearer]:
    """A publisher, a member that tells what it likes, and one that trusts the publisher."""
    a = await start_hearer(world, nursery, tmp_path, "a")
    evil = await start_hearer(world, nursery, tmp_path, "evil", trusts=("a",))
    return a, evil, await start_hearer(world, nursery, tmp_path, "c", trusts=("a",))


def page_of(a: Hearer, latest: int, count: int) -> bytes:
    """A page of a node's, as somebody else passes it on."""
    now_s = int(wall_s())
    record = ProviderRecord(
        sequence=now_s * 1000,
        issued=now_s,
        expires=now_s + 3600,
        namespace=MINE.id,
        peer=a.node.network.peer_id,
        addresses=(),
        page=0,
        entries=(),
        revocations=latest,
        n_revocations=count,
    )
    return sign_statement(record, key_of(a.node.name)).envelope


# --- the guard --------------------------------------------------------------------------------------------------------


async def test_what_comes_after_its_revocation_is_not_offered(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    added = await a.node.add(TOKENS)
    record, manifest = added.record, added.record.manifest
    a.node.exchange.removed(record.hash)
    a.guard._seen.clear()
    await a.revoke_artifact(record.hash)
    await trio.sleep(1)
    assert a.guard.revoked == frozenset()
    a.node.exchange.published(record, block_keys(MINE.prefix_root(manifest.fingerprint.hash), TOKENS))
    await trio.sleep(1)
    assert a.guard.revoked == {record.hash}
    assert len(a.node.exchange._server) == 0


async def test_an_engine_that_does_not_answer_keeps_no_guard_from_its_work(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")

    async def fail() -> None:
        raise EngineError("the engine is gone")

    monkeypatch.setattr("kvnet.exchange.revoking.MAX_SEEN", 2)
    guard = RevocationGuard(a.node.store, a.node.lane, a.who, a.statements, None, fail)
    for length in (300, 400, 500):
        await a.node.add(TOKENS[:length])
    await nursery.start(guard.run)
    assert len(guard._seen) == 2, "memory is given for so many"
    for artifact in list(guard._seen):
        await a.revoke_artifact(artifact)
        await trio.sleep(1)
    assert len(guard.revoked) == 2
    assert "live caches not dropped: the engine is gone" in caplog.text
