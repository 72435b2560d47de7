"""Members that turn bad: what they say takes nothing from others, and saves nobody from being removed."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import KvnetError, PeerRefusedError, elsewhere
from kvnet.exchange import rosters
from kvnet.network.memory import World
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.protocol.messages.statements import GetStatements
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey, publisher_text
from kvnet.trust.statement_bodies import KeyRotation, Membership
from kvnet.trust.statements import rotation_message, sign_statement
from kvnet_node.ousting import seats_of, take_out
from tests.simulated.members import Member, met, start_member
from tests.simulated.nodes import NOW_S

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]


async def calls_itself(
    member: Member, peers: tuple[bytes, ...], label: str = "", key: PublisherKey | None = None
) -> None:
    """A member says of itself what it likes."""
    team = member.identity.swarms.named("team")
    assert team is not None
    key = key or member.identity.signing_key()
    body = Membership(
        sequence=0,
        issued=0,
        expires=0,
        namespace=team.id,
        member=key.public,
        peers=peers,
        role="colleague",
        label=label,
    )
    await member.memberships.rosters.say(team, key, body)


async def test_member_that_claims_the_machines_of_others_is_removed_and_nobody_with_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite())
    await c.join(await a.invite())
    await met(a, b, c)
    await calls_itself(b, (bytes(a.node.network.peer_id), bytes(c.node.network.peer_id)), "c", b.identity.signing_key())
    await met(a, b, c)
    _, gone = await a.memberships.remove("team", publisher_text(b.publisher))
    await met(a, c)
    assert [each.publisher for each in gone] == [b.publisher]
    assert a.members() == c.members() == {"a", "c"}


async def test_member_that_rotated_and_calls_itself_another_machine_is_removed_with_all_its_keys(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    new = PublisherKey(b"n" * 32)

    def body(sequence: int, issued: int) -> KeyRotation:
        signature = new.sign(rotation_message(b.publisher, new.public, sequence))
        return KeyRotation(sequence=sequence, issued=issued, expires=0, new=new.public, new_signature=signature)

    await b.statements.say(body)
    await met(a, b)
    await calls_itself(b, (b"elsewhere",), "somebody", new)
    await met(a, b)
    assert a.members() == {"a", "b", "somebody"}
    await a.memberships.remove("team", "b")
    assert a.members() == {"a"}


async def test_removal_that_was_told_in_another_swarm_first_counts_when_it_is_told_in_its_own(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, victim = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "victim")]
    await b.join(await a.invite())
    await victim.join(await a.invite())
    await victim.join(await b.invite("other"))
    await met(a, b, victim)
    world.partition([a.node.network], [victim.node.network])
    await a.memberships.remove("team", "b")
    await met(a, b, victim)
    # Whoever is removed is shown the removal, and tells it where it does not belong, before anybody tells it rightly.
    (removal,) = a.statements.all(StatementType.REKEY)
    other = victim.identity.swarms.named("other")
    assert other is not None
    victim.statements.take([removal.envelope], other)
    await met(victim)
    world.heal()
    await victim.node.meet(a.node)
    await met(a, victim)
    assert victim.members() == {"a", "victim"}
    assert b.publisher in victim.memberships.roster_of("team")[1].removed


async def test_membership_told_in_another_swarm_counts_in_neither(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await a.invite("other")
    team, other = (a.identity.swarms.named(name) for name in ("team", "other"))
    assert team is not None
    assert other is not None
    body = Membership(
        sequence=NOW_S * 1000,
        issued=NOW_S,
        expires=0,
        namespace=other.id,
        member=PublisherKey(b"x" * 32).public,
        peers=(),
        role="colleague",
        label="x",
    )
    forged = sign_statement(body, b.identity.signing_key())
    inside = sign_statement(msgspec.structs.replace(body, namespace=team.id), b.identity.signing_key())
    a.statements.take([forged.envelope], team)
    a.statements.take([inside.envelope], other)
    a.statements.take([forged.envelope], other)
    await met(a)
    assert a.members("other") == {"a"}
    assert a.members() == {"a", "b"}


async def test_removed_member_that_proves_the_old_secret_counts_as_no_member(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    await a.memberships.remove("team", "b")
    await met(a, b)
    session = a.node.exchange.session_with(b.node.network.peer_id)
    assert session is not None
    assert [namespace.former for namespace in session.opened.namespaces.values()] == [True]
    # So it is neither told how this node is, nor asked for its models.
    assert (session.slots, session.member_slots) == ({}, [])


async def test_member_whose_disk_takes_nothing_lives_on_and_follows_a_rekeying_when_it_does_again(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite())
    await c.join(await a.invite())
    await met(a, b, c)
    place = tmp_path / "c-data" / "namespaces"
    aside = place.rename(tmp_path / "aside")
    place.write_bytes(b"no directory: nothing can be written here, not even by root")
    await a.memberships.remove("team", "b")
    await met(a, c)
    assert c.members() == {"a", "c"}
    place.unlink()
    aside.rename(place)
    await met(a, c)
    await met(a, c)
    assert c.identity.swarms.named("team") == a.identity.swarms.named("team")


async def test_new_session_is_no_new_allowance_for_asking(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    reasons = []
    for _ in range(3):
        session = await b.node.exchange.open_session(a.node.network.peer_id)
        assert session is not None
        (slot,) = session.slots.values()
        for _ in range(150):
            try:
                await session.ask(GetStatements(request_id=0, slot=slot, known=()))
            except PeerRefusedError as error:
                reasons.append(error.reason)
        session.close()
        await trio.sleep(2)
    assert set(reasons) == {RefusalReason.BUSY}
    assert len(reasons) > 150
    await trio.sleep(200)
    session = await b.node.exchange.open_session(a.node.network.peer_id)
    assert session is not None
    await session.ask(GetStatements(request_id=0, slot=next(iter(session.slots.values())), known=()))


async def test_stolen_machine_whose_key_is_revoked_fetches_nothing_from_any_other_within_a_minute(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, thief = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "thief")]
    for guest in (b, thief):
        await guest.join(await a.invite("mine"))
    await thief.join(await b.invite("team"), name="theirs")
    await met(a, b, thief)
    early = await b.node.add(TOKENS[:600])
    await thief.node.fetch(early.record.hash)
    late = await b.node.add(TOKENS)
    seats = seats_of(a.identity, a.memberships, thief.publisher)
    assert [(seat.namespace.name, seat.why_not) for seat in seats] == [("mine", "")]
    assert await take_out(a.identity, a.memberships, thief.publisher) == []
    await trio.sleep(59)
    assert thief.publisher not in b.identity.policy().devices
    for _ in range(3):
        with pytest.raises(KvnetError):
            await thief.node.fetch(late.record.hash)
        await thief.node.meet(a.node, b.node)
    # The swarm is another machine's to clean up, which is told how.
    assert seats_of(a.identity, a.memberships, thief.publisher) == []
    [left] = seats_of(b.identity, b.memberships, thief.publisher)
    assert (left.namespace.name, left.why_not) == ("team", "")
    [still] = seats_of(thief.identity, thief.memberships, b.publisher)[1:]
    assert "founder cannot be removed" in still.why_not


async def test_old_key_that_leaked_is_taken_out_alone_and_a_founders_is_said_to_stay(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite("mine"))
    await b.join(await a.invite("team"), name="team")
    await c.join(await a.invite("team"), name="team")
    await met(a, b, c)
    old = b.identity.signing_key()
    b.identity.new_key()
    new = b.identity.signing_key()
    await b.statements.say(
        lambda sequence, issued: KeyRotation(
            sequence=sequence,
            issued=issued,
            expires=0,
            new=new.public,
            new_signature=new.sign(rotation_message(old.public, new.public, sequence)),
        ),
        key=old,
    )
    await met(a, b, c)
    [left] = await take_out(b.identity, b.memberships, old.public)
    assert elsewhere(f"kvnet swarm remove {publisher_text(old.public)} --swarm team") in left.why_not
    await met(a, b)
    assert a.identity.policy().devices == {a.publisher, new.public}
    assert b.identity.swarms.mine.lookup_secret == a.identity.swarms.mine.lookup_secret
    [founded, *_] = seats_of(b.identity, b.memberships, a.publisher)
    assert founded.why_not.startswith("mine: it founded it")
    # A colleague that is no founder removes nobody.
    [of_others] = seats_of(c.identity, c.memberships, old.public)
    assert "its founder, a, alone can remove it" in of_others.why_not


async def test_thief_that_lets_in_keys_of_its_own_goes_with_them_or_they_are_named(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, thief, accomplice = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "t", "x")]
    for guest in (b, thief):
        await guest.join(await a.invite("mine"))
    await accomplice.join(await thief.invite("mine"))
    await met(a, b, thief, accomplice)
    roster = a.memberships.roster_of("mine")[1]
    assert roster.guests_of({thief.publisher}) == {accomplice.publisher}
    assert await take_out(a.identity, a.memberships, thief.publisher, guests=True) == []
    await met(a, b)
    assert a.members("mine") == b.members("mine") == {"a", "b"}
    late = await a.node.add(TOKENS)
    await b.node.fetch(late.record.hash)
    for gone in (thief, accomplice):
        with pytest.raises(KvnetError):
            await gone.node.fetch(late.record.hash)


async def test_member_that_always_says_something_new_has_it_worked_out_now_and_then_and_holds_up_no_removal(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    # As if every roster were a large one, after which a node rests for very long.
    monkeypatch.setattr(rosters, "FREE_S", -1.0)
    monkeypatch.setattr(rosters, "SHARE", 1e-9)
    a.memberships.rosters.renew()
    assert a.members() == {"a", "b"}
    for number in range(20):
        await calls_itself(b, (), f"b{number}")
        await trio.sleep(1)
        assert a.members() == {"a", "b"}, "what it said is known, and not worked out yet"
    assert 0 < a.memberships.rosters.settles_s < float("inf")
    await a.memberships.remove("team", publisher_text(b.publisher))
    assert a.members() == {"a"}


async def test_what_members_say_while_a_node_rests_counts_afterwards_without_another_word(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    monkeypatch.setattr(rosters, "FREE_S", -1.0)
    a.memberships.rosters.renew()
    assert a.members() == {"a", "b"}
    changed = a.memberships.rosters.next_change
    await calls_itself(b, (), "renamed")
    await trio.sleep(60)
    assert changed.is_set()
    assert a.members() == {"a", "renamed"}
