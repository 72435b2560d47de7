"""Whole nodes that invite and join: an identity on disk, statements in RAM, a simulated network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from blake3 import blake3

from kvnet.exchange.statements import Statements
from kvnet.network.memory import World
from kvnet.store.names import NameBook
from kvnet.trust.invitation import invitation_text, parse_invitation_text
from kvnet_node.identity import NodeIdentity
from kvnet_node.joined import Joined
from kvnet_node.membership import Memberships
from kvnet_node.paths import DataPaths
from kvnet_node.removals import Removals
from tests.simulated.nodes import Node, start_node, wall_s


@dataclass
class Member:
    """A node, and what it does as a member."""

    node: Node
    identity: NodeIdentity
    statements: Statements
    memberships: Memberships
    removals: Removals

    @property
    def name(self) -> str:
        """What the test calls it."""
        return self.node.name

    @property
    def publisher(self) -> bytes:
        """Its publisher id."""
        return self.identity.signing_key().public

    async def invite(self, swarm: str = "team", *, uses: int = 1, lifetime_s: float = 3600.0) -> str:
        """The text of a new invitation."""
        signed = await self.memberships.invite(
            swarm,
            lifetime_s=lifetime_s,
            uses=uses,
            guest_label="",
            own_label=self.name,
            peer=self.node.network.peer_id,
            addresses=self.node.exchange.addresses(),
        )
        return invitation_text(signed)

    async def join(self, text: str, *, name: str = "", keep_old: bool = False) -> Joined:
        """Join with the text of an invitation."""
        signed, invitation = parse_invitation_text(text)
        return await self.memberships.join(
            self.node.exchange,
            signed,
            invitation,
            name=name,
            label=self.name,
            keep_old=keep_old,
            count=self.node.store.count,
        )

    def members(self, swarm: str = "team") -> set[str]:
        """Labels of the members as this node sees them."""
        return {member.label for member in self.memberships.roster_of(swarm)[1].members.values()}


async def start_member(
    world: World,
    nursery: trio.Nursery,
    directory: Path,
    name: str,
    *,
    bootstrap: tuple[str, ...] = (),
    public: bool = False,
) -> Member:
    """A running node with an identity of its own; it ends with the nursery."""
    identity = NodeIdentity(DataPaths(directory / f"{name}-data"), "trusted", public=public)
    identity.load()
    counter = iter(range(1 << 30))

    def random(n_bytes: int) -> bytes:
        return blake3(b"member " + name.encode() + next(counter).to_bytes(8, "big")).digest(length=n_bytes)

    async def changed() -> None:
        node.store.index_prefixes(identity.keys_of)
        await node.exchange.reload()

    who: Any = identity
    node = await start_node(world, nursery, directory, name, who=who, bootstrap=bootstrap, tables=True)
    assert node.told is not None
    statements = node.told.statements
    memberships = Memberships(identity, statements, node.lane, changed=changed, random=random, now=wall_s)
    memberships.attach(node.exchange)
    await nursery.start(memberships.run)
    names = NameBook(directory / f"{name}-names")
    removals = Removals(identity, statements, node.store, names, node.lane, removed=node.exchange.removed)
    await nursery.start(removals.run)
    return Member(node, identity, statements, memberships, removals)


async def met(*members: Member) -> None:
    """Wait until sessions and statements have come to rest."""
    await trio.sleep(30)
    for member in members:
        await member.statements.settled()
