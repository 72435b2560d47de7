"""Who is around: neighbours on the local network, and members met before; for a running node."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.neighbours import Neighbour, Neighbours
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.peer_book import PeerRemembrance
from kvnet.protocol.ids import PeerId, parse_peer_text
from kvnet_node.neighbours_text import neighbour_line
from kvnet_node.peer_store import PeerStore
from kvnet_node.session_reasons import explain_no_session

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

    from kvnet.network.lan.discovery import LanDiscovery
    from kvnet.network.lan.records import Sighting
    from kvnet_node.invocation import Settings

TELL_S = 1.0
"""How often it is looked for neighbours that nobody was told about."""
MAX_TOLD = 16
"""Neighbours a running node tells of; the rest is in ``kvnet peers``."""

DISCOVERY_OFF = "off (lan.discovery)"


class Surroundings:
    """Finds neighbours, and reaches members again.

    Args:
        settings: of the node.
        node: it is for; running.
    """

    def __init__(self, settings: "Settings", node: ExchangeNode) -> None:
        config = settings.config
        self._node = node
        # Somebody who asked for nothing on disk is not remembered by others' addresses there either.
        keeper = None if config.ram_only else PeerStore(settings.paths.peers_file)
        self._remembered = PeerRemembrance(
            node.network, node.sessions, node.session_with, lane=ThreadLane(), keeper=keeper
        )
        node.greet_with(self._remembered.greet)
        keep = frozenset(_peer_of(address) for address in config.bootstrap)
        self._neighbours = Neighbours(node.network, node.session_with, keep=keep)
        self._discovery = self._discover() if config.lan_discovery else None

    def _discover(self) -> "LanDiscovery":
        # A node that is told not to look around loads nothing for it.
        from kvnet.network.lan.discovery import LanDiscovery, LanEvents

        events = LanEvents(self._sighted, self._neighbours.gone, self.network_changed)
        return LanDiscovery(self._node.peer_id, self._node.network.listening, events, random=secrets.token_bytes)

    @property
    def discovery(self) -> str:
        """Where neighbours are looked for, or why they are not."""
        return DISCOVERY_OFF if self._discovery is None else self._discovery.status

    @property
    def hears_itself(self) -> bool | None:
        """Whether this node's own multicast came back to it; None while nothing is said."""
        return self._discovery.hears_itself if self._discovery is not None else None

    def neighbours(self) -> list[Neighbour]:
        """Who is there, and how it stands with them; of those connected without a session also why."""
        return [self._explained(each) for each in self._neighbours.list()]

    def _explained(self, neighbour: Neighbour) -> Neighbour:
        error = self._node.session_error(neighbour.peer) if neighbour.state == "connected" else None
        if error is None:
            return neighbour
        outcome, detail = explain_no_session(error)
        return replace(neighbour, state="other version" if outcome == "version" else "no session", reason=detail)

    def remembered(self) -> int:
        """Members met before."""
        return len(self._remembered.book)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Look around until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._remembered.run)
            await nursery.start(self._neighbours.run)
            if self._discovery is not None:
                await nursery.start(self._discovery.run)
            task_status.started()

    def network_changed(self) -> None:
        """This machine is on another network, or awake again: say anew where it is, and try everybody."""
        self._node.network_changed()
        self._remembered.network_changed()
        self._neighbours.retry_all()

    def namespaces_changed(self) -> None:
        """This node is in other namespaces: strangers may be members now."""
        self._neighbours.retry_all()

    def _sighted(self, sighting: "Sighting") -> None:
        self._remembered.moved(sighting.peer, sighting.addresses)
        self._neighbours.sighted(sighting)

    async def tell(self, say: Callable[[str], None]) -> None:
        """Say of each neighbour once what it is and what to do about it; until cancelled."""
        told: set[tuple[PeerId, str]] = set()
        while len(told) < MAX_TOLD:
            for each in self.neighbours():
                if (each.peer, each.state) not in told and (line := neighbour_line(each)):
                    told.add((each.peer, each.state))
                    say(line)
            await trio.sleep(TELL_S)
        say("there are more neighbours: kvnet peers lists them")


def _peer_of(address: str) -> PeerId:
    return parse_peer_text(address.rpartition("/p2p/")[2])
