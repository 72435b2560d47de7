"""What announcing costs: counted for stretches of time in which a node's store stays as it is."""

from typing import Final

from kvnet.protocol.announce import AnnounceLimits
from simulations.world.dht import walk
from simulations.world.node import Node
from simulations.world.state import WorldState

_ANNOUNCING: Final = AnnounceLimits()


class Announcing:
    """Counts the messages to the DHT.

    Args:
        state: of the world.
    """

    def __init__(self, state: WorldState) -> None:
        self._state = state
        self._walk = walk(len(state.nodes) - 1)
        self._counted_s = [0.0] * len(state.nodes)

    def begin(self, node: Node) -> None:
        """A node is there from now on."""
        self._counted_s[node.number] = self._state.clock.now

    def count(self, node: Node) -> None:
        """Messages since the last time: each key is announced again and again, no faster than the pace allows.

        To be called before a node's keys change, and before it goes.
        """
        policy, now_s = self._state.policy, self._state.clock.now
        elapsed_s = now_s - self._counted_s[node.number]
        self._counted_s[node.number] = now_s
        if policy.peers and policy.dht and node.present and elapsed_s > 0:
            keys = elapsed_s * min(node.store.n_keys / policy.reprovide_s, 1 / _ANNOUNCING.interval_s)
            checks = elapsed_s / _ANNOUNCING.verify_s if node.store.n_keys else 0.0
            node.counted.announce_messages += keys * self._walk.announcement + checks * self._walk.requests
            self._state.counts["dht_announcements"] += round(keys)
