"""Nodes that hear what is revoked, and what tests about them share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from kvnet.exchange.measured import Measurements
from kvnet.exchange.revoking import RevocationGuard
from kvnet.exchange.statements import Statements
from kvnet.network.memory import World
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import KeyRotation, Revocation
from kvnet.trust.statements import SignedStatement, rotation_message
from tests.simulated.nodes import MINE, Node, seed, start_node

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]


def key_of(name: str) -> PublisherKey:
    """The publisher key of a test node."""
    return PublisherKey(seed(name))


class HearingIdentity:
    """An identity for which counts what statements say.

    Args:
        name: of the node.
        trust: its policy without statements.
        members: its namespaces.
    """

    def __init__(self, name: str, trust: TrustPolicy, members: tuple[Namespace, ...] = (MINE,)) -> None:
        self.key = key_of(name)
        self.trust = trust
        self.members = members
        self.numerics = Measurements()
        self.statements: Statements | None = None

    def signing_key(self) -> PublisherKey:
        """The publisher key that signs what this node adds and says."""
        return self.key

    def policy(self) -> TrustPolicy:
        """Whose artifacts may be used now."""
        return self.trust if self.statements is None else self.statements.applied(self.trust)

    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace of this identity; the first is ``mine``."""
        return self.members

    def former(self) -> tuple[Namespace, ...]:
        """None."""
        return ()


@dataclass
class Hearer:
    """A node, what it has heard, and what stops it."""

    node: Node
    who: HearingIdentity
    statements: Statements
    guard: RevocationGuard

    async def revoke_artifact(self, artifact: bytes) -> SignedStatement:
        """Revoke an artifact."""
        return await self.statements.say(
            lambda sequence, issued: Revocation(
                sequence=sequence, issued=issued, expires=0, kind="artifact", target=artifact, reason="wrong"
            )
        )

    async def revoke_key(self, key: bytes) -> SignedStatement:
        """Revoke a publisher key."""
        return await self.statements.say(
            lambda sequence, issued: Revocation(
                sequence=sequence, issued=issued, expires=0, kind="publisher", target=key, reason="lost"
            )
        )

    async def rotate_to(self, new: PublisherKey) -> SignedStatement:
        """Give way to another key."""
        old = self.who.key.public

        def body(sequence: int, issued: int) -> KeyRotation:
            signature = new.sign(rotation_message(old, new.public, sequence))
            return KeyRotation(sequence=sequence, issued=issued, expires=0, new=new.public, new_signature=signature)

        return await self.statements.say(body)


async def start_hearer(
    world: World,
    nursery: trio.Nursery,
    path: Path,
    name: str,
    *,
    trusts: tuple[str, ...] = (),
    members: tuple[Namespace, ...] = (MINE,),
    trust: Mapping[str, object] | None = None,
    **options: object,
) -> Hearer:
    """A node that tells its tables and hears statements; it ends with the nursery."""
    own = frozenset({key_of(name).public})
    policy = TrustPolicy("trusted", own, frozenset(key_of(other).public for other in trusts))
    who = HearingIdentity(name, replace(policy, **(trust or {})), members)  # type: ignore[arg-type]
    node = await start_node(world, nursery, path, name, who=who, tables=True, **options)  # type: ignore[arg-type]
    assert node.told is not None
    who.statements = node.told.statements
    guard = RevocationGuard(node.store, node.lane, who, node.told.statements, node.exchange, node.engine.drop_live)
    await nursery.start(guard.run)
    return Hearer(node, who, node.told.statements, guard)
