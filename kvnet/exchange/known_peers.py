"""Who a node is connected with, and whom the DHT names to it."""

from collections.abc import Iterable
from dataclasses import dataclass

import trio

from kvnet.exchange.bulk import BulkTransport
from kvnet.exchange.peer_sessions import PeerSessions
from kvnet.format.hashes import ArtifactHash
from kvnet.network.interface import Network, PeerInfo, ProviderHint
from kvnet.protocol.ids import PeerId
from kvnet.trust.namespace import Namespace


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer.

    Attributes:
        info: who and where.
        member: it has proved to share a namespace with this node.
        agent: its program and version.
        chunks: how chunks come from it, in words; "" when none have been fetched.
    """

    info: PeerInfo
    member: bool
    agent: str
    chunks: str = ""


def connected_peers(network: Network, sessions: PeerSessions, bulk: BulkTransport | None) -> list[KnownPeer]:
    """All of them, members or not."""
    known = []
    for info in network.connected():
        session = sessions.with_peer(info.peer)
        member, agent = (bool(session.slots), session.opened.agent) if session is not None else (False, "")
        known.append(KnownPeer(info, member, agent, bulk.way_of(info.peer) if bulk is not None else ""))
    return known


async def providers_in_dht(
    network: Network, namespaces: Iterable[Namespace], artifact: ArtifactHash, *, timeout_s: float
) -> list[ProviderHint]:
    """Whoever the DHT names for an artifact in any of some namespaces; hints, each peer once."""
    found: dict[PeerId, ProviderHint] = {}

    async def find(key: bytes) -> None:
        for hint in await network.find_providers(key, timeout_s=timeout_s):
            found.setdefault(hint.peer, hint)

    async with trio.open_nursery() as nursery:
        for namespace in namespaces:
            nursery.start_soon(find, bytes(namespace.keyed_artifact(artifact)))
    return list(found.values())
