"""What publishers call their artifacts: who counts, what is said once, and who is told."""

from collections.abc import Sequence

import trio
from trio.testing import MockClock

from kvnet.exchange.lane import InlineLane
from kvnet.exchange.shared_names import SharedNames
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statements import Statements
from kvnet.format.hashes import ArtifactHash
from kvnet.trust.envelope import StatementType
from kvnet.trust.namespace import PUBLIC, Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import Tag
from kvnet.trust.statements import sign_statement
from tests.simulated.nodes import MINE, NOW_S, wall_s
from tests.simulated.revoking import HearingIdentity, key_of

TEAM = Namespace("team", bytes([11]) * 32, bytes([12]) * 32)
ONE, OTHER = ArtifactHash(bytes([1]) * 32), ArtifactHash(bytes([2]) * 32)


def node(name: str, *trusted: str, namespaces: Sequence[Namespace] = (MINE, TEAM)) -> tuple[SharedNames, Statements]:
    """The names of a node that is on no network."""
    trust = TrustPolicy("trusted", frozenset({key_of(name).public}), frozenset(key_of(each).public for each in trusted))
    who = HearingIdentity(name, trust, tuple(namespaces))
    statements = Statements(who, RamKeep(), InlineLane(), now=wall_s, random=bytes)
    who.statements = statements
    return SharedNames(who, statements), statements


def told(by: str, name: str, artifact: ArtifactHash, *, number: int = 1, namespace: Namespace = TEAM) -> bytes:
    """A name as a peer tells it."""
    body = Tag(
        sequence=NOW_S * 1000 + number,
        issued=NOW_S,
        expires=0,
        namespace=namespace.id,
        name=name,
        number=number,
        artifact=artifact,
    )
    return sign_statement(body, key_of(by)).envelope


async def test_a_name_is_said_in_one_namespace_and_once(autojump_clock: MockClock) -> None:
    names, statements = node("a")
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        await names.say("project", 1, ONE, TEAM)
        first = statements.all(StatementType.TAG)
        await names.say("project", 1, ONE, TEAM)
        assert statements.all(StatementType.TAG) == first
        assert [(each.name, each.number, each.artifact, each.namespace) for each in names.known()] == [
            ("project", 1, ONE, TEAM)
        ]
        await names.say("project", 2, OTHER, TEAM)
        assert [(each.number, each.artifact) for each in names.called("project")] == [(2, OTHER)]
        assert names.called("project", 1) == []
        nursery.cancel_scope.cancel()


async def test_only_those_who_are_believed_there_name_anything(autojump_clock: MockClock) -> None:
    names, statements = node("a", "b")
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        next_told = names.next_told()
        statements.take([told("b", "project", ONE), told("mallory", "project", OTHER)], TEAM)
        await statements.settled()
        assert next_told.is_set()
        assert [(each.signer, each.artifact) for each in names.known()] == [(key_of("b").public, ONE)]
        nursery.cancel_scope.cancel()


async def test_two_who_use_one_name_are_both_known_and_what_is_public_is_not(autojump_clock: MockClock) -> None:
    names, statements = node("a", "b", "c", namespaces=(MINE, TEAM, PUBLIC))
    async with trio.open_nursery() as nursery:
        await nursery.start(statements.run)
        statements.take([told("b", "project", ONE), told("c", "project", OTHER, number=2)], TEAM)
        statements.take([told("b", "everybodys", ONE, namespace=PUBLIC)], PUBLIC)
        await statements.settled()
        assert {each.artifact for each in names.called("project")} == {ONE, OTHER}
        assert [each.artifact for each in names.called("project", 2)] == [OTHER]
        assert names.called("everybodys") == []
        nursery.cancel_scope.cancel()
