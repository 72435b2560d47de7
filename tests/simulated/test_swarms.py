"""Swarms: inviting, joining, removing, and what members and strangers get."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import KvnetError, NotFoundError, PeerRefusedError, StoreError, TrustError, UsageError
from kvnet.exchange.enrolment import enrol
from kvnet.exchange.sharing import share
from kvnet.format.hashes import ArtifactHash, NamespaceId
from kvnet.network.memory import World
from kvnet.protocol.enrolment import make_enrol
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.trust.envelope import StatementType
from kvnet.trust.invitation import parse_invitation_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import PUBLIC
from kvnet.trust.statement_bodies import Membership, Removal
from kvnet.trust.statements import sign_statement
from kvnet_node.inviter import reach
from tests.simulated.members import Member, met, start_member
from tests.simulated.nodes import NOW_S, wall_s

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]


async def share_new(member: Member, swarm: str = "team", tokens: list[int] = TOKENS) -> ArtifactHash:
    """Add something on a node and share it; the hash in the swarm."""
    added = await member.node.add(tokens)
    namespace = member.identity.swarms.named(swarm)
    assert namespace is not None
    shared = share(member.node.store, member.identity, added.record.hash, namespace, created_s=NOW_S)
    member.node.exchange.published(shared.record, shared.keys)
    return shared.record.hash


async def test_what_is_shared_on_a_node_is_found_by_one_that_met_another_member_only(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite())
    await c.join(await b.invite())
    await met(a, b, c)
    artifact = await share_new(a)
    await b.node.fetch(artifact)
    world.kill(a.node.network)
    await trio.sleep(60)
    fetched = await c.node.fetch(artifact)
    assert fetched.record.complete
    assert fetched.record.manifest.publisher == a.publisher
    assert a.members() == b.members() == c.members() == {"a", "b", "c"}


async def test_strangers_get_the_same_answers_for_what_is_there_and_what_is_not(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, stranger = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "stranger")]
    await b.join(await a.invite())
    await share_new(a)
    await stranger.node.meet(a.node, b.node)
    search = await stranger.node.exchange.finder.search(stranger.node.engine.info, [*TOKENS, 5], 0)
    other = await stranger.node.exchange.finder.search(stranger.node.engine.info, [*reversed(TOKENS), 5], 0)
    assert (search.fetched, search.rejected, search.reasons) == (other.fetched, other.rejected, other.reasons)
    assert search.fetched is None
    # Also when it makes up the lookups that only a member can make.
    session = stranger.node.exchange.session_with(a.node.network.peer_id)
    assert session is not None
    assert session.slots == {}


async def test_invitation_is_good_for_as_many_guests_as_it_says(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c, d = [await start_member(world, nursery, tmp_path, name) for name in "abcd"]
    text = await a.invite(uses=2)
    await b.join(text)
    assert (await b.join(text)).changed is False
    await c.join(text)
    with pytest.raises(TrustError, match="refuses"):
        await d.join(text)
    assert a.members() == {"a", "b", "c"}


async def test_invitation_that_has_expired_meanwhile_is_refused_by_both_sides(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    text = await a.invite(lifetime_s=60)
    await trio.sleep(61)
    with pytest.raises(TrustError, match="expired"):
        await b.join(text)
    signed, invitation = parse_invitation_text(text)
    session = await reach(b.node.exchange, invitation)
    with pytest.raises(TrustError, match="refuses"):
        await enrol(session, signed, invitation, b.identity.signing_key(), "b", now_s=wall_s())


async def test_guest_that_never_got_the_answer_joins_with_the_same_invitation(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    text = await a.invite()
    signed, invitation = parse_invitation_text(text)
    session = await reach(b.node.exchange, invitation)
    # The answer comes, and the guest's machine loses power before it has written anything.
    await enrol(session, signed, invitation, b.identity.signing_key(), "b", now_s=wall_s())
    assert (await b.join(text)).changed is True
    assert a.members() == {"a", "b"}
    assert len(a.statements.all(StatementType.MEMBERSHIP)) == 2


async def test_wrong_relayed_and_unknown_proofs_get_one_answer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, m = [await start_member(world, nursery, tmp_path, name) for name in "abm"]
    signed, invitation = parse_invitation_text(await a.invite())
    await m.node.meet(a.node)
    await b.node.meet(m.node)
    at_a = m.node.exchange.session_with(a.node.network.peer_id)
    at_m = b.node.exchange.session_with(m.node.network.peer_id)
    assert at_a is not None
    assert at_m is not None
    honest = make_enrol(invitation, at_m.occasion, b.identity.signing_key(), "b")
    made_up = make_enrol(
        msgspec.structs.replace(invitation, secret=b"w" * 32), at_a.occasion, m.identity.signing_key(), "m"
    )
    unknown = make_enrol(
        msgspec.structs.replace(invitation, id=b"n" * 16), at_a.occasion, m.identity.signing_key(), "m"
    )
    for attempt in (honest, made_up, unknown):
        with pytest.raises(PeerRefusedError) as refused:
            await at_a.ask(attempt)
        assert refused.value.reason == RefusalReason.UNKNOWN
    # Nothing of it has used the invitation up.
    assert a.identity.invitations.count(NamespaceId(invitation.namespace)) == 1
    with pytest.raises(TrustError, match="another peer"):
        await enrol(at_m, signed, invitation, b.identity.signing_key(), "b", now_s=wall_s())


async def test_attempts_without_end_are_put_off_and_honest_guests_come_in_afterwards(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, m = [await start_member(world, nursery, tmp_path, name) for name in "abm"]
    text = await a.invite()
    _, invitation = parse_invitation_text(text)
    await m.node.meet(a.node)
    session = m.node.exchange.session_with(a.node.network.peer_id)
    assert session is not None
    wrong = msgspec.structs.replace(invitation, secret=b"w" * 32)
    reasons = []
    for _ in range(200):
        with pytest.raises(PeerRefusedError) as refused:
            await session.ask(make_enrol(wrong, session.occasion, m.identity.signing_key(), "m"))
        reasons.append(refused.value.reason)
    assert reasons.count(RefusalReason.UNKNOWN) < 40
    assert reasons[-1] == RefusalReason.BUSY
    await trio.sleep(5)
    await b.join(text)


async def test_own_invitation_and_a_name_that_is_taken_are_refused_before_it_is_used(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    text = await a.invite()
    await a.memberships.leave("team")
    with pytest.raises(UsageError, match="of this node"):
        await a.join(text)
    text = await a.invite()
    await b.invite("team")
    with pytest.raises(UsageError, match="no swarm"):
        await b.join(text)
    assert (await b.join(text, name="others")).namespace.name == "others"
    assert b.members("others") == {"a", "b"}
    assert b.members("team") == {"b"}


async def test_device_shares_mine_and_a_used_mine_is_kept(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    added = await a.node.add(TOKENS)
    joined = await b.join(await a.invite("mine"))
    assert (joined.kept, joined.role) == (None, "device")
    await met(a, b)
    assert (await b.node.fetch(added.record.hash)).record.complete
    held = await c.node.add(TOKENS[:700])
    before = c.identity.swarms.mine.id
    text = await a.invite("mine")
    with pytest.raises(StoreError, match="holds 1 artifact"):
        await c.join(text)
    joined = await c.join(text, keep_old=True)
    assert joined.kept == before
    assert c.identity.swarms.mine.id == a.identity.swarms.mine.id
    assert c.node.store.find_prefix(before, [held.record.manifest.last_prefix_key])


async def test_colleagues_get_nothing_of_mine(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await a.node.ask(("user", "what was said here stays here " * 60))
    kept = a.node.store.artifacts()
    assert kept
    assert {record.manifest.namespace for record in kept} == {a.identity.swarms.mine.id}
    with pytest.raises(NotFoundError):
        await b.node.fetch(kept[0].hash)
    assert (await b.node.generate([*a.node.store.tokens_of(kept[0].hash), 5])).reused_tokens == 0


async def test_shared_artifact_is_another_one_over_the_same_chunks(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    added = await a.node.add(TOKENS)
    before = a.node.store.usage()
    artifact = await share_new(a)
    after = a.node.store.usage()
    assert artifact != added.record.hash
    assert after.chunks == before.chunks
    assert after.held_bytes - before.held_bytes < added.record.size_bytes / 4
    assert await share_new(a) == artifact
    await met(a, b)
    prompt = [*TOKENS, 5, 6, 7]
    warm = await b.node.generate(prompt)
    assert warm.reused_tokens == len(TOKENS)
    assert warm.text == (await b.node.generate(prompt, reuse=False)).text


async def test_what_somebody_else_computed_is_shared_under_both_names(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, device, colleague = [await start_member(world, nursery, tmp_path, name) for name in ("a", "device", "c")]
    added = await a.node.add(TOKENS)
    await device.join(await a.invite("mine"))
    await met(a, device)
    await device.node.fetch(added.record.hash)
    await colleague.join(await device.invite("team"))
    await met(device, colleague)
    team = device.identity.swarms.named("team")
    assert team is not None
    shared = share(device.node.store, device.identity, added.record.hash, team, created_s=NOW_S)
    device.node.exchange.published(shared.record, shared.keys)
    (span,) = shared.record.manifest.derived_from
    assert (span.artifact, span.publisher) == (added.record.hash, a.publisher)
    # Nobody in the swarm knows the machine that computed it.
    with pytest.raises(TrustError, match="come from an artifact signed by"):
        await colleague.node.fetch(shared.record.hash)
    await a.join(await device.invite("team"))
    await met(a, device, colleague)
    assert (await colleague.node.fetch(shared.record.hash)).record.complete


async def test_removed_member_gets_nothing_new_and_sleeping_ones_follow_when_they_wake(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c, sleeper = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "c", "sleeper")]
    for guest in (b, c, sleeper):
        await guest.join(await a.invite())
    await met(a, b, c, sleeper)
    early = await share_new(b, tokens=TOKENS[:900])
    await c.node.fetch(early)
    nets = [each.node.network for each in (a, b, c)]
    world.partition(nets, [sleeper.node.network])
    team, old_secret = a.identity.swarms.named("team"), b.identity.swarms.named("team")
    assert team is not None
    assert old_secret is not None
    await a.memberships.remove("team", "b")
    await met(a, c)
    assert a.members() == c.members() == {"a", "c", "sleeper"}
    new = await share_new(a)
    await c.node.fetch(new)
    # It still proves what it knows, and that opens nothing.
    with pytest.raises(KvnetError):
        await b.node.fetch(new)
    assert (await b.node.generate([*TOKENS, 5])).reused_tokens in {0, 900}
    for each in (a, c):
        session = each.node.exchange.session_with(b.node.network.peer_id)
        assert session is None or session.slots == {}
    assert b.publisher not in a.identity.policy().members[team.id]
    world.heal()
    await sleeper.node.meet(a.node)
    await met(a, c, sleeper)
    assert sleeper.members() == {"a", "c", "sleeper"}
    assert (await sleeper.node.fetch(new)).record.complete
    # A new invitation lets it in again; an old one would not.
    await b.memberships.leave("team")
    await b.join(await a.invite())
    assert (await b.node.fetch(new)).record.complete


async def test_removed_member_learns_that_it_is_out_and_no_name_of_who_came_later(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, late = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "late")]
    await b.join(await a.invite())
    await met(a, b)
    await a.memberships.remove("team", "b")
    await late.join(await a.invite())
    await b.node.meet(late.node)
    await trio.sleep(600)
    roster = b.memberships.roster_of("team")[1]
    assert set(roster.removed) == {b.publisher}
    # Whom the secret is sealed for is in the rekeying, by publisher id alone.
    assert b.members() == {"a", ""}
    told = [statement.body for statement in b.statements.all(StatementType.MEMBERSHIP)]
    assert late.publisher not in {body.member for body in told if isinstance(body, Membership)}
    with pytest.raises(TrustError, match="was removed"):
        await b.invite()


async def test_invitations_that_a_removed_member_has_used_are_given_up(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, other = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "other")]
    text = await a.invite(uses=5)
    await b.join(text)
    await a.memberships.remove("team", "b")
    with pytest.raises(TrustError, match="refuses"):
        await other.join(text)


async def test_only_the_founder_removes_colleagues_and_every_device_removes_devices(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    for swarm in ("team", "mine"):
        await b.join(await a.invite(swarm))
        await c.join(await a.invite(swarm))
    await met(a, b, c)
    with pytest.raises(TrustError, match="the founder of team"):
        await b.memberships.remove("team", "c")
    with pytest.raises(TrustError, match="cannot be removed"):
        await b.memberships.remove("mine", "a")
    with pytest.raises(UsageError, match="this node itself"):
        await b.memberships.remove("mine", "b")
    with pytest.raises(UsageError, match="one member called 'nobody'"):
        await b.memberships.remove("mine", "nobody")
    await b.memberships.remove("mine", "c")
    await met(a, b)
    assert a.members("mine") == b.members("mine") == {"a", "b"}
    assert a.identity.swarms.mine.lookup_secret == b.identity.swarms.mine.lookup_secret
    assert a.identity.swarms.mine.lookup_secret != c.identity.swarms.mine.lookup_secret


async def test_guest_let_in_by_somebody_who_slept_through_a_removal_gets_the_new_secret(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c, late = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "c", "late")]
    await b.join(await a.invite())
    await c.join(await a.invite())
    await met(a, b, c)
    world.partition([a.node.network, c.node.network], [b.node.network, late.node.network])
    await a.memberships.remove("team", "c")
    await late.join(await b.invite())
    world.heal()
    await b.node.meet(a.node)
    await late.node.meet(a.node)
    await trio.sleep(300)
    assert a.members() == b.members() == late.members() == {"a", "b", "late"}
    secrets = {each.identity.swarms.named("team") for each in (a, b, late)}
    assert len(secrets) == 1


async def test_what_a_member_signs_with_a_new_key_is_believed_and_goes_with_its_machine(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    old = b.publisher
    b.identity.new_key()
    await b.memberships.rekeyer.follow()
    await met(a, b)
    artifact = await share_new(b)
    assert (await a.node.fetch(artifact)).record.manifest.publisher == b.publisher != old
    _, gone = await a.memberships.remove("team", "b")
    assert {each.publisher for each in gone} == {old, b.publisher}
    assert a.members() == {"a"}


async def test_eight_members_in_a_chain_of_invitations_all_find_what_the_first_shares(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    members = [await start_member(world, nursery, tmp_path, name) for name in "abcdefgh"]
    for inviter, guest in pairwise(members):
        await guest.join(await inviter.invite())
    await trio.sleep(300)
    assert all(member.members() == set("abcdefgh") for member in members)
    artifact = await share_new(members[0])
    await trio.sleep(60)
    for member in members[1:]:
        assert (await member.node.fetch(artifact)).record.complete
    await members[0].memberships.remove("team", "d")
    await trio.sleep(300)
    stay = [member for member in members if member.name != "d"]
    assert all(member.members() == set("abcefgh") for member in stay)
    assert len({member.identity.swarms.named("team") for member in stay}) == 1


async def take_back(member: Member, artifact: ArtifactHash, namespace: bytes | None = None) -> None:
    """Have an artifact removed from all machines of the owner."""
    mine = member.identity.swarms.mine
    body = Removal(sequence=0, issued=0, expires=0, namespace=namespace or mine.id, artifact=artifact)
    await member.memberships.rosters.say(mine, member.identity.signing_key(), body)


async def test_what_one_machine_takes_back_goes_from_the_others_from_sleeping_ones_when_they_wake(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, sleeper = [await start_member(world, nursery, tmp_path, name) for name in ("a", "b", "sleeper")]
    for guest in (b, sleeper):
        await guest.join(await a.invite("mine"))
    await met(a, b, sleeper)
    added = await a.node.add(TOKENS)
    for each in (b, sleeper):
        await each.node.fetch(added.record.hash)
    world.partition([a.node.network, b.node.network], [sleeper.node.network])
    await take_back(a, added.record.hash)
    await met(a, b)
    assert a.node.store.get(added.record.hash) is None
    assert b.node.store.get(added.record.hash) is None
    assert sleeper.node.store.get(added.record.hash) is not None
    world.heal()
    await sleeper.node.meet(b.node)
    await met(b, sleeper)
    assert sleeper.node.store.get(added.record.hash) is None


async def test_colleagues_take_nothing_of_others_back(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b = [await start_member(world, nursery, tmp_path, name) for name in "ab"]
    await b.join(await a.invite())
    await met(a, b)
    mine = await a.node.add(TOKENS)
    shared = await share_new(a)
    team = b.identity.swarms.named("team")
    assert team is not None
    for artifact, namespace in ((mine.record.hash, a.identity.swarms.mine.id), (shared, team.id)):
        body = Removal(sequence=0, issued=0, expires=0, namespace=namespace, artifact=artifact)
        forged = sign_statement(
            msgspec.structs.replace(body, sequence=NOW_S * 1000, issued=NOW_S), b.identity.signing_key()
        )
        a.statements.take([forged.envelope], team)
    await met(a)
    assert a.node.store.get(mine.record.hash) is not None
    assert a.node.store.get(shared) is not None


async def test_public_artifact_is_fetched_by_whoever_trusts_its_publisher_and_no_prompt_asks_for_it(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, private = [
        await start_member(world, nursery, tmp_path, name, public=name != "private") for name in ("a", "b", "private")
    ]
    added = await a.node.add(TOKENS)
    shared = share(a.node.store, a.identity, added.record.hash, PUBLIC, created_s=NOW_S)
    a.node.exchange.published(shared.record, shared.keys)
    await b.node.meet(a.node)
    await private.node.meet(a.node)
    with pytest.raises(TrustError, match="not among the trusted"):
        await b.node.fetch(shared.record.hash)
    b.identity.trust(publisher_text(a.publisher), "")
    assert (await b.node.generate([*TOKENS, 5])).reused_tokens == 0
    assert (await b.node.fetch(shared.record.hash)).record.complete
    assert (await b.node.generate([*TOKENS, 5])).reused_tokens == len(TOKENS)
    with pytest.raises(NotFoundError):
        await private.node.fetch(shared.record.hash)
