"""Statements among simulated nodes: kept, told where they belong, and the same on all nodes in the end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import StoreError
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statement_signing import Saying
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import blake3_hash
from kvnet.network.memory import World
from kvnet.protocol.gossip import GossipLimits
from kvnet.protocol.messages.refusals import Refused
from kvnet.protocol.messages.statements import GetStatements, Tell
from kvnet.trust import statement_shares
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import Invitation, ProviderRecord, Revocation, Tag
from kvnet.trust.statement_places import PlaceKey, Row
from kvnet.trust.statements import SignedStatement, sign_statement
from kvnet_node.statement_store import StatementStore
from tests.simulated.nodes import MINE, NOW_S, identity, seed, wall_s
from tests.simulated.revoking import Hearer, HearingIdentity, key_of, start_hearer

SWARM = Namespace("team", bytes([11]) * 32, bytes([12]) * 32)
ANNS = Namespace("mine", bytes([21]) * 32, bytes([22]) * 32)
BOBS = Namespace("mine", bytes([31]) * 32, bytes([32]) * 32)
EVES = Namespace("mine", bytes([41]) * 32, bytes([42]) * 32)


def statements_of(name: str, keep: object, *, limits: GossipLimits | None = None) -> Statements:
    """Statements of a node that is on no network."""
    own = frozenset({key_of(name).public})
    trust = TrustPolicy("trusted", own, frozenset({key_of("a").public}))
    who = HearingIdentity(name, trust)
    made = Statements(who, keep, InlineLane(), now=wall_s, random=bytes, limits=limits)  # type: ignore[arg-type]
    who.statements = made
    return made


def tag(number: int, *, name: str = "project", namespace: Namespace = MINE) -> "Say":
    return Say(number, name, namespace)


class Say:
    """Makes tags for `Statements.say`."""

    def __init__(self, number: int, name: str, namespace: Namespace) -> None:
        self._number, self._name, self._namespace = number, name, namespace

    def __call__(self, sequence: int, issued: int) -> Tag:
        return Tag(
            sequence=sequence,
            issued=issued,
            expires=0,
            namespace=self._namespace.id,
            name=self._name,
            number=self._number,
            artifact=bytes(32),
        )


def signed_tag(number: int, *, sequence: int | None = None, expires: int = 0, key: str = "a") -> SignedStatement:
    body = tag(number)(NOW_S * 1000 if sequence is None else sequence, NOW_S)
    return sign_statement(msgspec.structs.replace(body, expires=expires), key_of(key))


def numbers(hearer: Hearer, namespace: Namespace = MINE) -> list[int]:
    return [s.body.number for s in hearer.statements.all(StatementType.TAG, namespace=namespace)]  # type: ignore[union-attr]


# --- one node ---------------------------------------------------------------------------------------------------------


async def test_what_was_said_and_heard_counts_after_a_restart(autojump_clock: MockClock, tmp_path: Path) -> None:
    store = StatementStore(tmp_path / "statements.sqlite3")
    before = statements_of("b", store)
    async with trio.open_nursery() as nursery:
        await nursery.start(before.run)
        own = await before.say(tag(1))
        heard = signed_tag(2, sequence=NOW_S * 1000 + 5)
        before.take([heard.envelope], MINE)
        await before.settled()
        nursery.cancel_scope.cancel()
    store.close()

    store = StatementStore(tmp_path / "statements.sqlite3")
    after = statements_of("b", store)
    told: list[Heard] = []
    after.subscribe(StatementType.TAG, told.append)
    await after.load()
    assert {each.statement.envelope for each in told} == {own.envelope, heard.envelope}
    assert after.latest(StatementType.TAG, own.body.subject, own.signer) == own
    async with trio.open_nursery() as nursery:
        await nursery.start(after.run)
        after.take([signed_tag(9, sequence=NOW_S * 1000 + 4).envelope], MINE)
        await after.settled()
        assert after.counters["statements_outranked"] == 1
        nursery.cancel_scope.cancel()
    store.close()


async def test_what_expired_while_the_node_was_off_is_not_told_of(autojump_clock: MockClock) -> None:
    keep = RamKeep()
    before = statements_of("b", keep)
    async with trio.open_nursery() as nursery:
        await nursery.start(before.run)
        before.take([signed_tag(1, expires=NOW_S + 100).envelope], MINE)
        await before.settled()
        nursery.cancel_scope.cancel()
    await trio.sleep(200)
    after = statements_of("b", keep)
    told: list[Heard] = []
    after.subscribe(StatementType.TAG, told.append)
    await after.load()
    assert told == []
    assert after.held(MINE) == {}
    async with trio.open_nursery() as nursery:
        await nursery.start(after.run)
        await trio.sleep(300)
        nursery.cancel_scope.cancel()
    assert [row.envelope for row in keep.rows()] == [b""], "its sequence stays"


async def test_row_that_does_not_say_what_its_statement_says_gives_nothing_and_takes_it_again(
    autojump_clock: MockClock,
) -> None:
    said, keep = signed_tag(1), RamKeep()
    row = Row(
        signer=said.signer,
        kind=said.kind.value,
        subject=b"of something else",
        sequence=said.body.sequence,
        hash=bytes(32),
        scopes=(bytes(MINE.id),),
        envelope=said.envelope,
    )
    keep.write([row], [])
    statements = statements_of("b", keep)
    await statements.load()
    assert statements.all(StatementType.TAG) == []
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        statements.take([said.envelope], MINE)
        await statements.settled()
        assert statements.all(StatementType.TAG) == [said]
        nursery.cancel_scope.cancel()


class _FullDisk(RamKeep):
    full = True

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        if self.full:
            raise StoreError("the drive is full")
        super().write(rows, gone)


async def test_what_cannot_be_written_counts_all_the_same_and_is_written_later(autojump_clock: MockClock) -> None:
    keep = _FullDisk()
    statements = statements_of("b", keep)
    told: list[Heard] = []
    statements.subscribe(StatementType.TAG, told.append)
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        statements.take([signed_tag(1).envelope], MINE)
        await statements.settled()
        assert len(told) == 1
        assert statements.counters["statements_not_written"] == 1
        keep.full = False
        await trio.sleep(300)
        nursery.cancel_scope.cancel()
    assert len(keep.rows()) == 1


async def test_own_sequences_go_up_within_a_millisecond(autojump_clock: MockClock) -> None:
    statements = statements_of("a", RamKeep())
    said = [await statements.say(tag(number)) for number in range(3)]
    assert [s.body.sequence - said[0].body.sequence for s in said] == [0, 1, 2]
    artifacts = [bytes([n]) * 32 for n in range(3)]
    revoked = [
        await statements.say(
            lambda sequence, issued, artifact=artifact: Revocation(  # type: ignore[misc]
                sequence=sequence, issued=issued, expires=0, kind="artifact", target=artifact, reason=""
            )
        )
        for artifact in artifacts
    ]
    assert [s.body.sequence - revoked[0].body.sequence for s in revoked] == [0, 1, 2], "one number stands for all"
    assert statements.own_revocations(MINE).latest == revoked[-1].body.sequence


async def test_too_many_own_statements_are_an_error(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_NOTES_OF_SIGNER", 1)
    statements = statements_of("a", RamKeep())
    await statements.say(tag(1))
    with pytest.raises(StoreError, match="room for one more tag"):
        await statements.say(tag(1, name="other"))


async def test_an_invitation_is_signed_and_neither_kept_nor_told(autojump_clock: MockClock) -> None:
    keep = RamKeep()
    statements = statements_of("a", keep)

    def invitation(sequence: int, issued: int) -> Invitation:
        return Invitation(
            sequence=sequence,
            issued=issued,
            expires=issued + 60,
            id=bytes(16),
            secret=bytes(32),
            role="device",
            swarm="mine",
            namespace=MINE.id,
            founder=bytes(32),
            peer=b"p",
            addresses=(),
            uses=1,
        )

    signed = await statements.say(invitation)
    assert signed.signer == key_of("a").public
    assert (keep.rows(), statements.held(MINE)) == ([], {})
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        statements.take([signed.envelope], MINE)
        await statements.settled()
        nursery.cancel_scope.cancel()
    assert statements.counters["statements_misplaced"] == 1


async def test_what_was_told_in_a_namespace_goes_with_it(autojump_clock: MockClock) -> None:
    keep = RamKeep()
    statements = statements_of("a", keep)
    await statements.say(tag(1))
    await statements.forget(MINE.id)
    assert (keep.rows(), statements.all(StatementType.TAG)) == ([], [])


async def test_a_full_inbox_takes_no_more_of_one_peer(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    await b.node.meet(a.node)
    await trio.sleep(1)
    [session] = b.node.exchange.sessions()
    small = GossipLimits(peer_queued_bytes=600, queued_bytes=900)
    envelopes = [signed_tag(n, sequence=NOW_S * 1000 + n).envelope for n in range(1, 9)]
    b.statements._inbox._limits = small
    assert b.statements.take(envelopes, MINE, session) == 600 // len(envelopes[0])
    assert b.statements.take(envelopes, MINE) == 8, "what was asked for is not limited"
    await b.statements.settled()
    assert numbers(b) == [8]


# --- several nodes ----------------------------------------------------------------------------------------------------


async def test_hundreds_of_statements_come_in_pages_both_ways(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a", trusts=("b",))
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    for number in range(1, 201):
        await a.statements.say(tag(number, name=f"a{number}"))
        await b.statements.say(tag(number, name=f"b{number}"))
    came: Counter[str] = Counter()
    a.statements.subscribe(StatementType.TAG, lambda _: came.update("a"))
    b.statements.subscribe(StatementType.TAG, lambda _: came.update("b"))
    await b.node.meet(a.node)
    await trio.sleep(2)
    assert len(numbers(a)) == len(numbers(b)) == 400
    assert came == {"a": 200, "b": 200}, "each came once"
    assert a.statements.counters["statements_dropped"] == 0


async def test_two_statements_under_one_sequence_end_in_the_same_one_everywhere(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    names = "abcd"
    hearers = [await start_hearer(world, nursery, tmp_path, name, trusts=tuple(names)) for name in names]
    one, other = signed_tag(1, key="a"), signed_tag(2, key="a")
    hearers[0].statements.take([one.envelope], MINE)
    hearers[3].statements.take([other.envelope], MINE)
    await trio.sleep(1)
    for left, right in ((0, 1), (2, 3), (1, 2)):
        await hearers[left].node.meet(hearers[right].node)
    await trio.sleep(2)
    winner = min((one, other), key=lambda each: blake3_hash(each.envelope))
    assert [numbers(each) for each in hearers] == [[winner.body.number]] * 4  # type: ignore[union-attr]


async def test_statements_are_told_in_their_namespace_and_in_ones_own(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    trusts = ("ann", "bob", "annslaptop", "eve")
    ann = await start_hearer(world, nursery, tmp_path, "ann", trusts=trusts, members=(ANNS, SWARM))
    laptop = await start_hearer(world, nursery, tmp_path, "annslaptop", trusts=trusts, members=(ANNS,))
    bob = await start_hearer(world, nursery, tmp_path, "bob", trusts=trusts, members=(BOBS, SWARM))
    eve = await start_hearer(world, nursery, tmp_path, "eve", trusts=trusts, members=(EVES,))
    for each in (laptop, bob, eve):
        await each.node.meet(ann.node)
    await trio.sleep(1)
    told = [ann.statements.listeners(scopes) for scopes in ((ANNS,), (SWARM,), (ANNS, SWARM), ())]
    assert told == [1, 1, 2, 0], "everybody who hears of it is counted, once"
    await bob.statements.say(tag(1, namespace=SWARM))
    await ann.statements.say(tag(2, namespace=ANNS))
    await bob.revoke_artifact(bytes(32))
    await trio.sleep(2)
    assert (numbers(ann, SWARM), numbers(ann, ANNS)) == ([1], [2])
    assert (numbers(bob, SWARM), numbers(laptop, ANNS)) == ([1], [2])
    assert not laptop.statements.all(StatementType.TAG, namespace=SWARM)
    assert len(laptop.statements.all(StatementType.REVOCATION)) == 1, "what bob revoked concerns ann's other machine"
    assert not eve.statements.all(StatementType.REVOCATION)
    assert not bob.statements.all(StatementType.TAG, namespace=ANNS)


async def test_requests_about_a_slot_that_is_not_proven_or_out_of_order_are_refused(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_hearer(world, nursery, tmp_path, "a")
    b = await start_hearer(world, nursery, tmp_path, "b", trusts=("a",))
    await a.statements.say(tag(1))
    await b.node.meet(a.node)
    await trio.sleep(1)
    [session] = a.node.exchange.sessions()
    talks = a.statements._talks
    [slot] = session.slots.values()
    elsewhere = next(number for number in range(8) if number != slot)
    unordered = (b"2" * 8, b"1" * 8)
    large = tuple(bytes(24_000) for _ in range(9))
    refused = [
        talks.answer_tell(session, Tell(request_id=1, slot=elsewhere, statements=())),
        talks.answer_ask(session, GetStatements(request_id=2, slot=elsewhere, known=())),
        talks.answer_ask(session, GetStatements(request_id=3, slot=slot, known=unordered)),
        talks.answer_tell(session, Tell(request_id=4, slot=slot, statements=large)),
    ]
    assert [each.reason for each in refused if isinstance(each, Refused)] == ["unknown", "unknown", "unknown", "busy"]
    asked = [talks.answer_ask(session, GetStatements(request_id=n, slot=slot, known=())) for n in range(300)]
    assert isinstance(asked[-1], Refused)
    assert asked[-1].reason == "busy"


async def test_records_that_tell_of_missing_revocations_have_nothing_worked_out_anew_but_that(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    who = identity("a", trusts=["b"])
    statements = Statements(who, RamKeep(), InlineLane(), now=wall_s, random=bytes)
    await nursery.start(statements.run)
    signer = PublisherKey(seed("b"))
    before = statements.applied(who.policy()).standing
    for number in range(1, 4):
        record = ProviderRecord(
            sequence=NOW_S * 1000 + number,
            issued=NOW_S,
            expires=NOW_S + 600,
            namespace=bytes(MINE.id),
            peer=b"peer",
            addresses=(),
            page=0,
            entries=(),
            revocations=NOW_S * 1000 + number,
            n_revocations=1,
        )
        statements.take([sign_statement(record, signer).envelope], MINE)
        await statements.settled()
        standing = statements.applied(who.policy()).standing
        assert standing.is_withheld(signer.public, MINE.id)
        assert standing.artifacts is before.artifacts


class NotingKeep(RamKeep):
    """Notes how much is written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        self.written.append(len(rows))
        super().write(rows, gone)


async def test_what_is_said_together_is_on_disk_together_and_told(autojump_clock: MockClock) -> None:
    keep = NotingKeep()
    statements = statements_of("a", keep)
    heard: list[Heard] = []
    statements.subscribe(StatementType.TAG, heard.append)
    said = await statements.say_all([Saying(tag(number, name=f"p{number}")) for number in (1, 2, 3)])
    assert keep.written == [3]
    assert [each.statement for each in heard] == said


async def test_of_what_is_said_together_all_before_one_that_finds_no_room_is_kept(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statement_shares, "MAX_NOTES_OF_SIGNER", 2)
    keep = NotingKeep()
    statements = statements_of("a", keep)
    with pytest.raises(StoreError):
        await statements.say_all([Saying(tag(number, name=f"p{number}")) for number in (1, 2, 3)])
    assert (keep.written, len(statements.all(StatementType.TAG))) == ([2], 2)
