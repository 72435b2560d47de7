"""Tables and records that are not true: deep claims, other peers' names, squatted places, the dead and the replayed."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.meeting import MeetLimits
from kvnet.format.prefix import block_keys
from kvnet.network.interface import ProviderHint
from kvnet.network.memory import MemoryNetwork, World
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import dht_depths
from tests.simulated.nodes import MINE, Node
from tests.simulated.telling import PROMPT, TOKENS, entry_of, look_up, member, query_of, record_of

ALONE = MeetLimits(wanted=0)


async def hold_without_having(liar: Node, honest: Node, tokens: list[int]) -> None:
    """Have a node tell that it holds an artifact which only the other node has."""
    added = await honest.add(tokens)
    fingerprint = honest.engine.info.fingerprint
    assert fingerprint is not None
    liar.tables.own.hold(added.record, block_keys(MINE.prefix_root(fingerprint.hash), tokens))


async def test_who_claims_deeper_than_it_serves_is_passed_over_at_once_and_asked_last_after_the_second_lie(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, evil, elsewhere = [await member(world, nursery, tmp_path, name, meet=ALONE) for name in ("a", "evil", "d")]
    c = await member(world, nursery, tmp_path, "c", meet=ALONE)
    await c.meet(a, evil)
    scores, liar = c.exchange.fetcher.scores, evil.network.peer_id
    asked = []
    for turn in range(3):
        deep = [*TOKENS[:1280], *[10 + turn] * 1280]
        await a.add(deep[:1300])
        await hold_without_having(evil, elsewhere, deep)
        await trio.sleep(1)
        found = await look_up(c, deep)
        # Evil says it has all ten blocks; A has five.
        assert found.candidates[0].providers == (a.network.peer_id,)
        assert found.rounds == 1
        asked.append((found.asked[0], scores.liar(liar, trio.current_time())))
        await trio.sleep(5)
    assert asked == [(liar, False), (liar, False), (a.network.peer_id, True)]
    assert evil.network.peer_id in [session.peer for session in c.exchange.sessions()]


async def test_a_claim_under_keys_of_other_tokens_costs_standing_and_the_honest_peer_is_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, evil, c = [await member(world, nursery, tmp_path, name) for name in ("a", "evil", "c")]
    await a.add(TOKENS[:1200])
    # Signed by Evil, whom C trusts, over other tokens than the keys are of: only the token ids tell.
    evil.forge_keys([*[7] * 1500, 1], keys_of=[*TOKENS, 8])
    await c.meet(a, evil)
    await trio.sleep(2)
    answer = await c.generate(PROMPT)
    assert answer.reused_tokens == 1200
    scores, now = c.exchange.fetcher.scores, trio.current_time()
    assert scores.standing(evil.network.peer_id, now) < 0.5
    assert scores.standing(a.network.peer_id, now) == pytest.approx(1.0)


async def test_nobody_speaks_for_another_peer_once_that_has_spoken_for_itself(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, evil, c = [await member(world, nursery, tmp_path, name, meet=ALONE) for name in ("a", "evil", "c")]
    await c.meet(evil)
    await trio.sleep(1)
    made_up = entry_of(query_of(c, PROMPT), artifact=b"\7" * 32, n_tokens=1503)
    false = record_of(a.network.peer_id, [a.network.address], [made_up], signer="evil")
    assert evil.told is not None
    evil.told.statements.spread(MINE, [false])
    await trio.sleep(2)
    assert [claim.peer for claim in c.tables.claims(query_of(c, PROMPT), 0)] == [a.network.peer_id]
    # Asked for it, A is dialled, says what it holds itself, and is not blamed.
    await look_up(c, PROMPT)
    await trio.sleep(5)
    assert c.tables.claims(query_of(c, PROMPT), 0) == []
    assert not c.exchange.fetcher.scores.liar(a.network.peer_id, trio.current_time())
    assert c.exchange.fetcher.scores.standing(a.network.peer_id, trio.current_time()) == 1.0
    evil.told.statements.spread(MINE, [record_of(a.network.peer_id, [], [made_up], signer="evil", page=3)])
    await trio.sleep(2)
    assert c.tables.claims(query_of(c, PROMPT), 0) == []
    assert c.tables.counters["records_not_its_signer"] > 0


async def test_replayed_and_expired_records_are_refused(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, c = [await member(world, nursery, tmp_path, name, meet=ALONE) for name in "ac"]
    claimed = entry_of(query_of(c, PROMPT), artifact=b"\7" * 32, n_tokens=1503)
    peer, where = a.network.peer_id, [a.network.address]
    first = record_of(peer, where, [claimed], signer="a", life_s=7000.0)
    await trio.sleep(1)
    later = record_of(peer, where, [], signer="a", life_s=60.0)
    expired = record_of(peer, where, [claimed], signer="a", page=1, life_s=-1.0)
    early = record_of(peer, where, [claimed], signer="a", page=2, ahead_s=4000.0)
    changed = bytearray(record_of(peer, where, [claimed], signer="a", page=3))
    changed[-1] ^= 1
    assert c.tables.shown([first], MINE) == 1
    assert c.tables.claims(query_of(c, PROMPT), 0)
    assert c.tables.shown([later, expired, early, bytes(changed), b"junk"], MINE) == 1
    assert c.tables.claims(query_of(c, PROMPT), 0) == []
    assert c.tables.shown([first], MINE) == 0
    # The later one has expired; the one before it still may not come back.
    await trio.sleep(100)
    assert c.tables.shown([first], MINE) == 0
    assert c.tables.claims(query_of(c, PROMPT), 0) == []


async def test_nineteen_dead_providers_of_twenty_do_not_keep_a_fetch_from_starting_in_time(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await member(world, nursery, tmp_path, name, meet=ALONE) for name in "abc"]
    added = await a.add(TOKENS)
    await c.meet(b)
    query = query_of(c, PROMPT)
    entry = entry_of(query, artifact=bytes(MINE.keyed_artifact(added.record.hash)), n_tokens=1500)
    records = []
    for number in range(19):
        network = world.network(f"dead-{number}")
        await nursery.start(network.run)
        world.hang(network)
        records.append(record_of(network.peer_id, [network.address], [entry], signer="ghost"))
    await a.meet(b)
    assert b.told is not None
    b.told.statements.take(records, MINE)
    c.tables.shown(records, MINE)
    await trio.sleep(2)
    c.tables.shown(a.tables.envelopes(MINE), MINE)
    assert len(c.tables.claims(query, 0)) == 20
    began = trio.current_time()
    found = await look_up(c, PROMPT, within_s=1.5)
    assert [candidate.providers for candidate in found.candidates] == [(a.network.peer_id,)]
    assert trio.current_time() - began < 0.5
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)


async def squat(world: World, nursery: trio.Nursery, hub: MemoryNetwork, keys: list[bytes]) -> list[PeerId]:
    """Twenty peers that say in the DHT that they provide all these keys, and are no members of anything."""
    squatters = []
    for number in range(20):
        network = world.network(f"squatter-{number}", bootstrap=(hub.address,))
        await nursery.start(network.run)
        squatters.append(network)
    await trio.sleep(3)
    for network in squatters:
        for key in keys:
            await network.provide(key)
    await trio.sleep(5)
    return [network.peer_id for network in squatters]


async def test_squatted_places_in_the_dht_hide_no_honest_member(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    b = await member(world, nursery, tmp_path, "b", meet=ALONE)
    a = await member(world, nursery, tmp_path, "a", meet=ALONE)
    c = await member(world, nursery, tmp_path, "c", meet=ALONE, bootstrap=(b.network.address,))
    await trio.sleep(3)
    keys = [bytes(key) for _, key in dht_depths(query_of(c, PROMPT))]
    assert len(keys) <= 14
    squatters = await squat(world, nursery, b.network, keys)
    hints = await c.network.find_providers(keys[0])
    assert {hint.peer for hint in hints} == set(squatters)
    await a.meet(b)
    await trio.sleep(1)
    await a.add(TOKENS)
    await trio.sleep(1)
    found = await look_up(c, PROMPT)
    assert found.candidates[0].providers == (a.network.peer_id,)
    assert found.rounds <= 2
    assert found.dht_queries <= 14


async def test_the_dht_is_asked_for_all_checkpoints_at_once_and_whoever_it_names_once(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hub = world.network("hub")
    await nursery.start(hub.run)
    a, c = [await member(world, nursery, tmp_path, name, meet=ALONE, bootstrap=(hub.address,)) for name in "ac"]
    await a.add(TOKENS)
    await trio.sleep(60)
    found = await look_up(c, PROMPT)
    assert found.candidates[0].providers == (a.network.peer_id,)
    assert (found.rounds, len(found.asked)) == (2, 1)
    assert 3 <= found.dht_queries <= 14


async def test_member_said_to_be_somewhere_else_every_second_is_dialled_now_and_then_and_keeps_nobody_waiting(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evil, c = [await member(world, nursery, tmp_path, name) for name in ("evil", "c")]
    d = await member(world, nursery, tmp_path, "d")
    await c.meet(evil)
    await trio.sleep(1)
    dialled: list[PeerId] = []
    connect_hint = c.network.connect_hint

    async def counting(hint: ProviderHint, *, timeout_s: float = 5.0) -> PeerId:
        dialled.append(hint.peer)
        return await connect_hint(hint, timeout_s=timeout_s)

    monkeypatch.setattr(c.network, "connect_hint", counting)
    ghosts = [PeerId(f"ghost {number}".encode()) for number in range(12)]
    for second in range(60):
        told = [
            record_of(ghost, [f"/memory/{second}-{number}"], [], signer="evil", ahead_s=second)
            for number, ghost in enumerate(ghosts)
        ]
        if second == 30:
            told.append(record_of(d.network.peer_id, [d.network.address], [], signer="evil", ahead_s=second))
        assert c.told is not None
        c.told.statements.take(told, MINE)
        await trio.sleep(1)
    assert c.exchange.session_with(d.network.peer_id) is not None
    assert max(dialled.count(ghost) for ghost in ghosts) <= 7
