"""The seven ways of feeding a node stale or foreign statements, against one node whose statements are on disk.

Rollback, freeze, fast-forward, mix-and-match, endless data, wrong key, replay: each has a test of that name, here or
where what it is about is tested.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvnet.exchange.lane import InlineLane
from kvnet.exchange.statements import Statements
from kvnet.format import cbor
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.namespace import Namespace
from kvnet.trust.roster import Roster, build_roster
from kvnet.trust.statements import CLOCK_SKEW_S, MAX_STATEMENT_BYTES, SignedStatement, sign_statement
from kvnet_node.statement_store import StatementStore
from tests.simulated.nodes import NOW_S, identity, wall_s
from tests.unit.trust.members import key, lets_in, rekeys, rotates
from tests.unit.trust.samples import MINE

ATTACKS = ("rollback", "freeze", "fast_forward", "mix_and_match", "endless_data", "wrong_key", "replay")
SWARM = Namespace("team", bytes([21]) * 32, bytes([22]) * 32)
AT = NOW_S - 1000


@asynccontextmanager
async def hearing(directory: Path) -> AsyncIterator[Statements]:
    """One run of a node, as far as statements go; the next one in the same directory goes on with them."""
    store = StatementStore(directory / "statements.sqlite3")
    who = identity("here", namespaces=(MINE, SWARM))
    statements = Statements(who, store, InlineLane(), now=wall_s, random=bytes)
    await statements.load()
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        yield statements
        nursery.cancel_scope.cancel()
    store.close()


async def told(statements: Statements, *said: SignedStatement | bytes, where: Namespace = MINE) -> Roster:
    """Who is a member once these have been told."""
    statements.take([each if isinstance(each, bytes) else each.envelope for each in said], where)
    await statements.settled()
    kinds = (StatementType.MEMBERSHIP, StatementType.REKEY, StatementType.KEY_ROTATION)
    known: Sequence[SignedStatement] = [each for kind in kinds for each in statements.all(kind, namespace=MINE)]
    return build_roster(MINE.id, key("a").public, known, devices_remove=True)


ANN, CAT = lets_in("a", "b", AT), lets_in("a", "c", AT + 1)
BEFORE = rekeys("a", AT + 2, stay="abc", secret=b"1" * 32)
AFTER = rekeys("a", AT + 3, out="c", stay="ab", secret=b"2" * 32)


@pytest.mark.parametrize("lost", ["", "statements.sqlite3", "statements-copy.sqlite3"])
async def test_rollback_of_a_removal_is_refused_after_a_restart_and_after_a_file_was_lost(
    autojump_clock: MockClock, tmp_path: Path, lost: str
) -> None:
    async with hearing(tmp_path) as statements:
        await told(statements, ANN, CAT, BEFORE, AFTER)
    if lost:
        (tmp_path / lost).write_bytes(b"damaged" * 1000)
    async with hearing(tmp_path) as statements:
        roster = await told(statements, BEFORE, CAT)
    assert roster.rekey == AFTER
    assert key("c").public not in roster.members


async def test_replay_of_everything_in_any_order_changes_nothing(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with hearing(tmp_path) as statements:
        roster = await told(statements, ANN, CAT, BEFORE, AFTER)
        counted = statements.n_counted
        again = await told(statements, AFTER, BEFORE, CAT, ANN, CAT, BEFORE)
        assert again == roster
        assert statements.n_counted == counted


async def test_fast_forward_by_a_member_outranks_nothing_now_or_after_a_restart(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    far = rekeys("b", NOW_S + 10 * 365 * 86_400, out="c", stay="b")
    near = rekeys("b", int(wall_s()) + CLOCK_SKEW_S + 60, out="c", stay="b")
    async with hearing(tmp_path) as statements:
        roster = await told(statements, ANN, CAT, BEFORE, far, near)
        assert (roster.rekey, set(roster.removed)) == (BEFORE, set())
        assert statements.counters["statements_untimely"] == 2
    async with hearing(tmp_path) as statements:
        assert (await told(statements)).rekey == BEFORE


async def test_mix_and_match_of_types_and_namespaces_makes_no_member(autojump_clock: MockClock, tmp_path: Path) -> None:
    elsewhere = lets_in("a", "d", AT, namespace=SWARM.id)
    as_rekey = seal(StatementType.REKEY, cbor.encode_struct(ANN.body), key("a"))
    async with hearing(tmp_path) as statements:
        roster = await told(statements, elsewhere, as_rekey)
        assert set(roster.members) == {key("a").public}
        roster = await told(statements, ANN, where=SWARM)
        assert set(roster.members) == {key("a").public}, "told in a namespace that it does not name"
        roster = await told(statements, ANN)
        assert set(roster.members) == {key("a").public, key("b").public}


async def test_wrong_key_lets_nobody_in(autojump_clock: MockClock, tmp_path: Path) -> None:
    stranger = lets_in("x", "y", AT)
    forged = sign_statement(ANN.body, key("x")).envelope.replace(key("x").public, key("a").public)
    stolen = rotates("a", "e", AT + 5)
    one_sided = msgspec.structs.replace(stolen.body, new_signature=key("a").sign(b"by the old key"))
    async with hearing(tmp_path) as statements:
        roster = await told(statements, stranger, forged, sign_statement(one_sided, key("a")))
        assert set(roster.members) == {key("a").public}
        assert statements.counters["statements_invalid"] == 2


async def test_endless_data_is_refused_unread_and_remembered_in_a_bounded_place(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    huge = seal(StatementType.MEMBERSHIP, bytes(MAX_STATEMENT_BYTES + 1), key("b"))
    async with hearing(tmp_path) as statements:
        await told(statements, ANN, huge, *[huge[:-1] + bytes([n]) for n in range(200)])
        assert statements.counters["statements_invalid"] >= 200
        many = [lets_in("x", f"n{number}", AT + number) for number in range(300)]
        roster = await told(statements, CAT, *many)
        assert {key("b").public, key("c").public} <= set(roster.members)
        assert len(statements.all(StatementType.MEMBERSHIP)) <= 2 + 16, "a stranger has room for 16"


def test_each_of_the_seven_attacks_has_a_test_of_its_name() -> None:
    named = "\n".join(
        line
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for line in re.findall(r"def test_(\w+)", path.read_text())
    )
    assert [attack for attack in ATTACKS if not re.search(rf"^{attack}_", named, re.MULTILINE)] == []
