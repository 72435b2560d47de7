"""Copies of beginnings that several nodes needed, made before more nodes ask: a policy that the node does not have."""

from collections import Counter
from collections.abc import Callable

from kvnet.format.prefix import BLOCK_TOKENS, TOKEN_SIZE_BYTES
from kvnet.protocol.cost import EvenOffer
from kvnet.protocol.speeds import Link
from simulations.workload.requests import Request
from simulations.world.node import Node
from simulations.world.state import WorldState
from simulations.world.transfers import Brought, Wanted
from simulations.world.tree import Path, PromptTree


class Replicator:
    """Counts fetches of shared beginnings, and copies those that are hot to nodes of the same site.

    Args:
        state: of the world.
    """

    def __init__(self, state: WorldState) -> None:
        assert state.policy.replication is not None  # noqa: S101 - made only then
        self._state = state
        self._replication = state.policy.replication
        self._fetches: Counter[int] = Counter()

    def fetched(self, node: Node, request: Request, path: Path) -> None:
        """A node has fetched a prefix; some of it may be what others begin with."""
        shared = PromptTree.cut(path, request.n_shared)
        if not shared or shared[0][1] < BLOCK_TOKENS:
            return
        segment = shared[0][0]
        self._fetches[segment] += 1
        if self._fetches[segment] == self._replication.after_fetches:
            for other in self._lacking(node, segment):
                self._copy(node, other, shared)

    def _lacking(self, node: Node, segment: int) -> list[Node]:
        """Nodes nearby that have none of it, the emptiest first."""
        state = self._state
        holders = state.holders.get(segment, {})
        near = [
            state.nodes[number]
            for number in node.members
            if number not in holders and state.nodes[number].setup.site == node.setup.site
        ]
        near = [other for other in near if state.places.reachable(node, other)]
        near.sort(key=lambda other: (other.store.used_bytes / other.store.quota_bytes, other.number))
        return near[: self._replication.copies]

    def _copy(self, node: Node, other: Node, shared: Path) -> None:
        state, n_tokens = self._state, shared[0][1]
        offer = EvenOffer(
            Link(node.peer, 0.0, 1.0), n_tokens, 0, other.block_bytes, TOKEN_SIZE_BYTES * n_tokens,
            other.setup.kv_bytes_per_token,
        )  # fmt: skip
        rtt_s = state.places.rtt_s(node, other)
        # Nobody waits for it: however slow, it is not given up.
        wanted = Wanted(
            other, [node], n_tokens, 0, n_tokens, offer, 0.0, rtt_s, self._done(other, shared), urgent=False
        )
        state.counts["copies"] += 1
        state.transfers.begin(wanted)

    def _done(self, other: Node, shared: Path) -> Callable[[Brought], None]:
        def done(brought: Brought) -> None:
            if brought.provider is None or brought.n_tokens < BLOCK_TOKENS:
                return
            other.counted.ssd_written_bytes += brought.n_bytes
            path = PromptTree.cut(shared, brought.n_tokens)
            other.store.keep(path, brought.provider.number, self._state.clock.now, brought.provider.store.origins)
            other.store.tidy(self._state.clock.now)
            self._state.checks.stored(other)

        return done
