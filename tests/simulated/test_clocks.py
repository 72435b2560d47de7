"""Clocks that were wrong for a while: what is said when they are right again counts."""

import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import StoreError
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.rosters import Rosters, Scope
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statements import Statements
from kvnet.network.memory import World
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import Membership, Revocation
from kvnet.trust.statements import CLOCK_SKEW_S, open_statement, sign_statement
from tests.simulated.members import met, start_member
from tests.simulated.nodes import MINE, NOW_S, identity, wall_s


class Clock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self) -> None:
        self.now_s = float(NOW_S)

    def __call__(self) -> float:
        return self.now_s


async def start_statements(nursery: trio.Nursery, name: str, clock: Clock) -> Statements:
    trusts = [other for other in "ab" if other != name]
    statements = Statements(identity(name, trusts=trusts), RamKeep(), InlineLane(), now=clock, random=os.urandom)
    await nursery.start(statements.run)
    return statements


async def revoke(statements: Statements, target: bytes) -> bytes:
    said = await statements.say(
        lambda sequence, issued: Revocation(
            sequence=sequence, issued=issued, expires=0, kind="artifact", target=target, reason=""
        )
    )
    return said.envelope


async def test_revocation_counts_with_others_though_an_earlier_one_was_said_by_a_clock_hours_ahead(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    here, there = Clock(), Clock()
    a, b = await start_statements(nursery, "a", here), await start_statements(nursery, "b", there)
    here.now_s += 10 * 3600
    early = await revoke(a, b"x" * 32)
    here.now_s = there.now_s
    late = await revoke(a, b"y" * 32)
    # What pages tell of it must not be from the future either: nobody would take the pages.
    assert a.own_revocations(MINE) == (open_statement(late).body.sequence, 1)
    b.take([early, late], MINE)
    await b.settled()
    targets = [each.body.target for each in b.all(StatementType.REVOCATION) if isinstance(each.body, Revocation)]
    assert targets == [b"y" * 32]
    there.now_s += 10 * 3600
    b.take([early, late], MINE)
    await b.settled()
    assert len(b.all(StatementType.REVOCATION)) == 2


async def test_member_whose_clock_was_ahead_is_told_so_and_not_that_its_disk_is_full(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    clock = Clock()
    who = identity("a")
    statements = await start_statements(nursery, "a", clock)
    key = who.signing_key()
    rosters = Rosters(statements, lambda: (Scope(MINE, key.public, True),), lambda: [key], now=clock)
    body = Membership(
        sequence=0, issued=0, expires=0, namespace=MINE.id, member=key.public, peers=(), role="device", label="a"
    )
    clock.now_s += 10 * 3600
    await rosters.say(MINE, key, body)
    clock.now_s -= 10 * 3600
    with pytest.raises(StoreError, match="in the future"):
        await rosters.say(MINE, key, body)
    clock.now_s += 10 * 3600
    await rosters.say(MINE, key, body)


async def test_removal_by_a_clock_that_is_behind_takes_the_member_out_or_says_that_the_clock_is_wrong(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    clock = Clock()
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite())
    await c.join(await b.invite())
    await met(a, b, c)
    a.memberships.rosters._now = clock
    clock.now_s = wall_s() - 300
    await a.memberships.remove("team", "c")
    await met(a, b)
    assert a.members() == b.members() == {"a", "b"}
    clock.now_s = 86_400.0
    with pytest.raises(StoreError, match="in the future") as caught:
        await a.memberships.remove("team", "b")
    assert "set this machine's clock right" in caught.value.hint
    clock.now_s = wall_s()
    await a.memberships.remove("team", "b")
    assert a.members() == {"a"}


async def test_member_that_dates_its_words_as_late_as_can_be_does_not_hold_up_a_removal(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a, b, c = [await start_member(world, nursery, tmp_path, name) for name in "abc"]
    await b.join(await a.invite())
    await c.join(await a.invite())
    await met(a, b, c)
    latest = int(wall_s() + CLOCK_SKEW_S)
    key = b.identity.signing_key()
    team = a.identity.swarms.named("team")
    assert team is not None
    late = [
        Membership(
            sequence=latest * 1000 + 999,
            issued=latest,
            expires=0,
            namespace=team.id,
            member=who,
            peers=(),
            role="colleague",
            label=label,
        )
        for who, label in ((b.publisher, "b"), (c.publisher, "c"))
    ]
    a.statements.take([sign_statement(body, key).envelope for body in late], team)
    await a.statements.settled()
    with pytest.raises(StoreError, match="in the future"):
        # B vouches for C at a date above which nothing counts: said, and not passed over.
        await a.memberships.remove("team", "c")
    # Its own date saves nobody, and its word goes with it.
    await a.memberships.remove("team", "b")
    assert a.members() == {"a", "c"}
    await a.memberships.remove("team", "c")
    assert a.members() == {"a"}
