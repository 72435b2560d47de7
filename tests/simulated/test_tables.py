"""Tables of who holds what, told among members: whole nodes that look up, lie, come, go and move."""

from dataclasses import replace
from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.meeting import MeetLimits
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statement_talk import TELL_AGAIN_S, TELL_PAUSES_S
from kvnet.format.hashes import ArtifactHash, blake3_hash
from kvnet.format.prefix import block_keys
from kvnet.network.memory import World
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.messages.statements import Tell
from kvnet.protocol.provider_pages import PageLimits
from kvnet.trust.statement_bodies import HeldEntry, ProviderRecord, Revocation
from kvnet.trust.statements import open_statement
from tests.simulated.nodes import MINE, OTHER, Node, identity, start_node
from tests.simulated.revoking import HearingIdentity
from tests.simulated.telling import PROMPT, TOKENS, look_up, member, query_of, record_of


async def test_what_is_added_is_told_at_once_and_found_with_one_query_to_its_holder(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name) for name in "abc"]
    await c.meet(a, b)
    await trio.sleep(2)
    await a.add(TOKENS)
    await trio.sleep(0.2)
    found = await look_up(c, PROMPT)
    assert (found.rounds, found.asked, found.dht_queries) == (1, [a.network.peer_id], 0)
    assert [candidate.providers for candidate in found.candidates] == [(a.network.peer_id,)]
    warm = await c.generate(PROMPT)
    assert warm.reused_tokens == len(TOKENS)


async def test_an_artifact_that_goes_is_told_of_no_more(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, c = [await member(world, nursery, tmp_path, name) for name in "ac"]
    await c.meet(a)
    added = await a.add(TOKENS)
    await trio.sleep(1)
    assert (await look_up(c, PROMPT)).candidates
    a.store.remove(added.record.hash)
    a.exchange.removed(added.record.hash)
    await trio.sleep(1)
    found = await look_up(c, PROMPT, dht=False)
    assert (found.candidates, found.rounds) == ([], 0)
    await trio.sleep(5)
    assert not c.exchange.fetcher.scores.liar(a.network.peer_id, trio.current_time())
    assert c.exchange.fetcher.scores.standing(a.network.peer_id, trio.current_time()) == 1.0


async def test_a_member_known_from_another_member_is_dialled_and_found(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name) for name in "abc"]
    await a.add(TOKENS)
    await a.meet(b)
    await trio.sleep(1)
    await c.meet(b)
    await trio.sleep(5)
    assert a.network.peer_id in [session.peer for session in c.exchange.sessions()]
    assert b.network.peer_id in [session.peer for session in c.exchange.sessions()]
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)


async def test_who_is_not_connected_is_found_through_a_record_in_a_reply(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name, meet=MeetLimits(wanted=0)) for name in "abc"]
    await a.meet(b)
    await c.meet(b)
    await trio.sleep(2)
    # Only B hears of this; what C was told when it came does not have it.
    await a.add(TOKENS)
    await trio.sleep(1)
    assert [session.peer for session in c.exchange.sessions()] == [b.network.peer_id]
    assert c.tables.claims(query_of(c, PROMPT), 0) == []
    found = await look_up(c, PROMPT, dht=False)
    assert found.rounds == 2
    assert [candidate.providers for candidate in found.candidates] == [(a.network.peer_id,)]
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)


async def test_the_longest_prefix_is_found_though_tables_name_only_checkpoints(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name) for name in "abc"]
    long = [3 + (i * 7919) % 251 for i in range(20 * 256)]
    # Both have the checkpoints of 8 blocks; one shares 9 blocks of the prompt, the other 13.
    await a.add([*long[: 9 * 256], *[200] * (8 * 256)])
    await b.add([*long[: 13 * 256], *[201] * (4 * 256)])
    await c.meet(a, b)
    await trio.sleep(2)
    found = await look_up(c, long)
    assert found.candidates[0].reusable_tokens == 13 * 256
    assert found.candidates[0].providers == (b.network.peer_id,)
    assert (found.rounds, len(found.asked)) == (1, 2)


async def test_a_peer_that_tells_no_tables_is_asked_as_before(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    old = await start_node(world, nursery, tmp_path, "a")
    c = await member(world, nursery, tmp_path, "c")
    await c.meet(old)
    await old.add(TOKENS)
    await trio.sleep(1)
    found = await look_up(c, PROMPT)
    assert (found.rounds, len(found.asked)) == (1, 1)
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)


async def test_a_table_signed_by_a_stranger_counts_for_nothing_and_its_peer_is_asked(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    stranger = await start_node(world, nursery, tmp_path, "x", who=identity("x", trusts=["a"]), tables=True)
    a, c = [await member(world, nursery, tmp_path, name) for name in "ac"]
    added = await a.add(TOKENS)
    await stranger.meet(a)
    await stranger.fetch(added.record.hash)
    world.kill(a.network)
    await c.meet(stranger)
    await trio.sleep(2)
    assert stranger.network.peer_id not in c.tables.members()
    assert c.tables.counters["records_of_strangers"] > 0
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)


async def test_records_of_a_revoked_signer_are_dropped_and_its_artifacts_no_longer_told(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name) for name in "abc"]
    added = await a.add(TOKENS)
    await b.meet(a)
    await b.fetch(added.record.hash)
    await c.meet(a, b)
    await trio.sleep(2)
    assert {claim.peer for claim in c.tables.claims(query_of(c, PROMPT), 0)} == {
        a.network.peer_id,
        b.network.peer_id,
    }
    for node in (b, c):
        revoked = replace(node.identity.trust, revoked=frozenset({a.identity.key.public}))
        object.__setattr__(node.identity, "trust", revoked)
    assert {claim.peer for claim in c.tables.claims(query_of(c, PROMPT), 0)} == {b.network.peer_id}
    await trio.sleep(10)
    assert c.tables.claims(query_of(c, PROMPT), 0) == []
    assert set(c.tables.members()) == {b.network.peer_id}
    assert (await c.generate(PROMPT)).reused_tokens == 0


async def test_what_a_node_told_before_its_restart_is_taken_back(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b, c = [await member(world, nursery, tmp_path, name) for name in "bc"]
    a = await member(world, nursery, tmp_path, "a")
    added = await a.add(TOKENS)
    held = HeldEntry(
        artifact=bytes(MINE.keyed_artifact(added.record.hash)),
        n_tokens=1500,
        codec="raw",
        size_bytes=1,
        keys=(bytes(query_of(c, PROMPT).keys[-1]),),
    )
    # Signed when its clock was ahead.
    former = record_of(a.network.peer_id, [a.network.address], [held], signer="a", page=7, ahead_s=60.0)
    for node in (b, c):
        assert node.told is not None
        node.told.statements.take([former], MINE)
    await trio.sleep(1)
    a.store.remove(added.record.hash)
    a.exchange.removed(added.record.hash)
    assert c.tables.claims(query_of(c, PROMPT), 0)
    await c.meet(b)
    await a.meet(b)
    await trio.sleep(5)
    for node in (b, c):
        assert node.tables.claims(query_of(c, PROMPT), 0) == []
    assert not c.exchange.fetcher.scores.liar(a.network.peer_id, trio.current_time())


async def test_a_partition_leaves_records_until_they_expire_and_heals_by_itself(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    pages = PageLimits(renew_s=60.0)
    a, b = [await member(world, nursery, tmp_path, name, pages=pages) for name in "ab"]
    await a.add(TOKENS)
    await b.meet(a)
    await trio.sleep(2)
    world.partition([a.network], [b.network])
    await trio.sleep(300)
    assert b.exchange.sessions() == []
    assert b.tables.claims(query_of(b, PROMPT), 0)
    began = trio.current_time()
    assert (await b.generate(PROMPT)).reused_tokens == 0
    assert trio.current_time() - began < 4
    await trio.sleep(pages.life_s)
    assert b.tables.claims(query_of(b, PROMPT), 0) == []
    world.heal()
    await b.meet(a)
    await trio.sleep(5)
    assert (await b.generate(PROMPT)).reused_tokens == len(TOKENS)


async def test_renewals_keep_a_member_known_for_as_long_as_it_is_there(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await member(world, nursery, tmp_path, name) for name in "ab"]
    await a.add(TOKENS)
    await b.meet(a)
    signed = 0
    for _ in range(2):
        await trio.sleep(1800)
        assert b.tables.claims(query_of(b, PROMPT), 0)
        assert a.tables.own.n_signed > signed
        signed = a.tables.own.n_signed
    # One page of its own, told every 11 to 15 minutes.
    assert signed < 8


async def test_members_that_come_and_go_leave_lookups_right_and_quick(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    prompt = [3 + (i * 7919) % 251 for i in range(8 * 256)]
    asker = await member(world, nursery, tmp_path, "a")
    alive: dict[str, Node] = {}
    for turn, name in enumerate("bcdefgh"):
        came = alive[name] = await member(world, nursery, tmp_path, name, bootstrap=(asker.network.address,))
        # Each has a little more of the prompt than whoever came before.
        await came.add([*prompt[: 256 * (turn + 1)], *[20 + turn] * 300])
        await trio.sleep(4)
        if turn % 2:
            gone = alive.pop(max(alive))
            world.kill(gone.network)
            await trio.sleep(1)
        began = trio.current_time()
        found = await look_up(asker, prompt)
        assert trio.current_time() - began < 0.5
        best = found.candidates[0]
        deepest = max(alive)
        assert best.providers == (alive[deepest].network.peer_id,)
        assert found.rounds <= 2
    assert {session.peer for session in asker.exchange.sessions()} == {each.network.peer_id for each in alive.values()}


async def test_a_member_of_a_namespace_that_was_left_is_known_no_more(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await member(world, nursery, tmp_path, name) for name in "ab"]
    await a.add(TOKENS)
    await b.meet(a)
    await trio.sleep(2)
    assert b.tables.members()
    object.__setattr__(b.identity, "members", (OTHER,))
    await b.exchange.reload()
    await trio.sleep(10)
    assert b.tables.members() == {}
    assert b.tables.cost_bytes == 0
    assert b.tables.envelopes(MINE) == []


async def test_ten_thousand_artifacts_are_told_at_a_pace_that_members_take(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await member(world, nursery, tmp_path, name) for name in "ab"]
    added = await a.add(TOKENS)
    await b.meet(a)
    await trio.sleep(2)
    fingerprint = a.engine.info.fingerprint
    assert fingerprint is not None
    keys = block_keys(MINE.prefix_root(fingerprint.hash), TOKENS)
    record = added.record
    for number in range(10_000):
        # One record under many names: what is told of it is what would be told of as many artifacts.
        name = ArtifactHash(blake3_hash(number.to_bytes(4, "big")))
        a.tables.own.hold(replace(record, hash=name), keys)
    await trio.sleep(120)
    assert [session.peer for session in b.exchange.sessions()] == [a.network.peer_id]
    [told] = b.tables.members().values()
    assert told.n_artifacts == 10_001
    assert b.tables.cost_bytes < 8 * 1024 * 1024
    assert (await look_up(b, PROMPT)).candidates[0].reusable_tokens == 1280


async def test_who_serves_nothing_now_is_passed_over_for_the_next_best(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name) for name in "abc"]
    await a.add(TOKENS)
    await b.add(TOKENS[:1024])
    await c.meet(a, b)
    await trio.sleep(2)
    c.exchange.ask_only(lambda peer: peer != a.network.peer_id)
    found = await look_up(c, PROMPT)
    assert [candidate.providers for candidate in found.candidates] == [(b.network.peer_id,)]
    assert found.rounds == 1


async def test_a_member_that_does_not_answer_is_dialled_ever_more_rarely(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    c = await member(world, nursery, tmp_path, "c")
    gone = world.network("gone")
    assert c.told is not None
    assert c.tables.shown([record_of(gone.peer_id, [gone.address], [], signer="a")], MINE) == 1
    await trio.sleep(1000)
    # After 0, 60, 180, 420 and 900 seconds or so.
    assert 3 <= c.told.meetings._tried[gone.peer_id].failures <= 6
    await nursery.start(gone.run)
    await trio.sleep(1000)
    assert gone.peer_id in [info.peer for info in c.network.connected()]


async def test_that_there_is_a_new_revocation_is_told_with_page_0_at_once(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, c = [await member(world, nursery, tmp_path, name) for name in "ac"]
    await c.meet(a)
    await trio.sleep(2)
    assert a.told is not None
    said = await a.told.statements.say(
        lambda sequence, issued: Revocation(
            sequence=sequence, issued=issued, expires=0, kind="artifact", target=b"\7" * 32, reason="a test"
        )
    )
    await trio.sleep(7)
    [page] = [open_statement(each).body for each in a.tables.own.envelopes(MINE)]
    assert isinstance(page, ProviderRecord)
    assert page.revocations == said.body.sequence
    assert set(a.tables.own.envelopes(MINE)) < set(c.tables.envelopes(MINE))


async def test_what_a_newcomer_holds_counts_as_soon_as_it_is_believed(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    who = HearingIdentity("c", identity("c").policy())
    a = await member(world, nursery, tmp_path, "a")
    c = await start_node(world, nursery, tmp_path, "c", who=who, tables=True)  # type: ignore[arg-type]
    await a.add(TOKENS)
    await c.meet(a)
    await trio.sleep(10)
    assert c.tables.counted()["tables_records_of_strangers"] > 0
    assert c.tables.claims(query_of(c, PROMPT)) == []
    # That it was let in is heard only now.
    who.trust = identity("c", trusts="a").policy()
    await trio.sleep(10)
    assert len(c.tables.claims(query_of(c, PROMPT))) == 1


async def test_who_was_too_busy_to_be_told_is_told_when_it_is_not(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, c = [await member(world, nursery, tmp_path, name) for name in "ac"]
    await c.meet(a)
    await trio.sleep(2)
    listens = c.exchange._answerers._by_kind[Tell]
    refused = []

    def busy(session: PeerSession, request: Request) -> Reply:
        refused.append(session)
        return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)

    c.exchange.answer_with(Tell, busy)
    await a.add(TOKENS)
    await trio.sleep(15)
    assert len(refused) == len(TELL_PAUSES_S)
    c.exchange.answer_with(Tell, listens)
    await trio.sleep(TELL_AGAIN_S)
    assert len(c.tables.claims(query_of(c, PROMPT))) == 1
