"""Nodes that tell each other tables, and what tests about them share."""

from collections.abc import Sequence
from pathlib import Path

import trio

from kvnet.exchange.lookups import LookedUp
from kvnet.format.hashes import blake3_hash
from kvnet.format.prefix import BLOCK_TOKENS, checkpoints
from kvnet.network.memory import World
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import LookupQuery
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import HeldEntry, ProviderRecord
from kvnet.trust.statements import sign_statement
from tests.simulated.nodes import MINE, Node, identity, seed, start_node, wall_s

TOKENS = [3 + (i * 7919) % 251 for i in range(1500)]
PROMPT = [*TOKENS, 5, 6, 7]
NAMES = ("a", "b", "c", "d", "e", "f", "g", "h", "evil", "ghost")


async def member(world: World, nursery: trio.Nursery, path: Path, name: str, **options: object) -> Node:
    """A node that trusts all the others and tells its tables."""
    who = identity(name, trusts=[other for other in NAMES if other != name])
    return await start_node(world, nursery, path, name, who=who, tables=True, **options)  # type: ignore[arg-type]


def query_of(node: Node, tokens: Sequence[int]) -> LookupQuery:
    """The query for a prompt in the node's one namespace."""
    fingerprint = node.engine.info.fingerprint
    assert fingerprint is not None
    [query] = node.exchange.finder.queries(fingerprint, tokens, ())
    return query


async def look_up(node: Node, tokens: Sequence[int], *, within_s: float = 3.0, dht: bool = True) -> LookedUp:
    """What the node's members have of a prompt."""
    return await node.exchange.finder.lookups.find(query_of(node, tokens), 0, trio.current_time() + within_s, dht=dht)


def record_of(
    peer: PeerId,
    addresses: Sequence[str],
    entries: Sequence[HeldEntry],
    *,
    signer: str,
    page: int = 0,
    ahead_s: float = 0.0,
    life_s: float = 3600.0,
) -> bytes:
    """A signed page about a peer.

    Args:
        peer: whom it is about.
        addresses: of the peer.
        entries: what it is said to hold.
        signer: name of the test node whose key signs.
        page: number of the page.
        ahead_s: how far in the future its sequence lies.
        life_s: seconds until it expires.
    """
    record = ProviderRecord(
        sequence=int((wall_s() + ahead_s) * 1000),
        issued=int(wall_s()) - 10,
        expires=int(wall_s() + life_s),
        namespace=bytes(MINE.id),
        peer=bytes(peer),
        addresses=tuple(addresses),
        page=page,
        entries=tuple(entries),
        revocations=0,
        n_revocations=0,
    )
    return sign_statement(record, PublisherKey(seed(signer))).envelope


def entry_of(query: LookupQuery, *, artifact: bytes, n_tokens: int) -> HeldEntry:
    """An entry of an artifact that begins as a prompt does, and after that is something else."""
    depths = dict(zip(query.n_blocks, query.keys, strict=True))
    shared = n_tokens if n_tokens == query.n_tokens else n_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    keys = [
        bytes(depths[count]) if min(count * BLOCK_TOKENS, n_tokens) <= shared else blake3_hash(artifact)
        for count in checkpoints(n_tokens)
    ]
    return HeldEntry(artifact=artifact, n_tokens=n_tokens, codec="raw", size_bytes=n_tokens * 256, keys=tuple(keys))
