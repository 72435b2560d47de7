"""What happens: a request arrives, looks for a prefix, waits for the engine, is answered, and leaves something behind.

The order is that of `kvnet.exchange.completion`; what is decided on the way is decided by the node's own code. Nodes
come and go meanwhile.
"""

from collections.abc import Callable
from typing import Final

from simulations.results import NodeResult
from simulations.workload.churn import Change, PresenceChange
from simulations.workload.requests import Request
from simulations.world.announcing import Announcing
from simulations.world.computing import Engines
from simulations.world.keeping import Keeper
from simulations.world.node import Job, Node
from simulations.world.prefix_reuse import PrefixReuse
from simulations.world.state import WorldState

SILENCE_S: Final = 75.0
"""A peer that is gone without a word keeps its session for so long: 60 s of silence, then 15 s for a ping
(`kvnet.protocol.session.SessionLimits`). Until then it is asked for what its table names."""

Report = Callable[[int, int], None]
"""Told how many requests of how many have arrived."""
REPORT_EVERY: Final = 64
"""Requests between two reports."""


class World:
    """One run.

    Args:
        state: as it is when the run begins.
    """

    def __init__(self, state: WorldState) -> None:
        self._state = state
        self._announcing = Announcing(state)
        self._keeper = Keeper(state, self._announcing)
        self._engines = Engines(state, self._keeper.answered)
        self._reuse = PrefixReuse(state, self._announcing, self._engines.queue)
        for partition in state.setup.partitions:
            state.clock.at(partition.begin_s, state.places.cut, partition)
            state.clock.at(partition.end_s, state.places.join, partition)

    def run(self, report: Report) -> None:
        """Let everything happen, and look whether it was as it must be."""
        state = self._state
        changes, at = state.setup.changes, 0
        for request in state.setup.stream:
            while at < len(changes) and changes[at].at_s <= request.arrival_s:
                self._change(changes[at])
                at += 1
            state.clock.run_until(request.arrival_s)
            state.checks.time(state.clock.now)
            self._arrive(request)
            if request.number % REPORT_EVERY == 0:
                report(request.number, len(state.setup.stream))
        for change in changes[at:]:
            self._change(change)
        state.clock.run()
        for node in state.nodes:
            self._announcing.count(node)
            state.recorder.node(node.number, _result(node))
        state.checks.finish(state.nodes, state.transfers.ledger, state.clock.now, asked=state.asked, ended=state.ended)
        state.counts["evicted"] = sum(node.store.evicted for node in state.nodes)
        state.counts["expired"] = sum(node.store.expired for node in state.nodes)
        state.counts["fetches"] = state.transfers.ledger.transfers
        state.counts["lost_bytes"] = state.transfers.ledger.lost

    def _change(self, change: PresenceChange) -> None:
        self._state.clock.run_until(change.at_s)
        node = self._state.nodes[change.node]
        match change.kind:
            case Change.JOIN | Change.WAKE:
                node.present = True
                node.store.show()
                self._announcing.begin(node)
            case Change.SLEEP | Change.CRASH | Change.LEAVE:
                if node.present:
                    self._gone(node, change.kind)

    def _gone(self, node: Node, kind: Change) -> None:
        self._announcing.count(node)
        node.present = False
        node.epoch += 1
        node.busy = False
        for _ in range(len(node.waiting) + sum(len(jobs) for jobs in node.fetching.values())):
            self._state.lose_request()
        node.waiting.clear()
        node.fetching.clear()
        self._state.transfers.node_gone(node)
        if kind is not Change.SLEEP:
            node.live.clear()
        if kind is Change.LEAVE:
            node.store.forget()
            return
        self._state.clock.at(self._state.clock.now + SILENCE_S, self._noticed, node, node.epoch)

    @staticmethod
    def _noticed(node: Node, epoch: int) -> None:
        """Members know that a node is gone, and look for nothing there any more."""
        if not node.present and node.epoch == epoch:
            node.store.hide()

    def _arrive(self, request: Request) -> None:
        state = self._state
        node = state.nodes[request.node]
        state.asked += 1
        if not node.present:
            state.counts["away_requests"] += 1
            state.ended += 1
            return
        job = Job(request, state.tree.path(request.segment, request.n_input), node.epoch)
        if state.policy.peers:
            self._reuse.look_up(node, job)
        else:
            self._engines.queue(node, job)


def _result(node: Node) -> NodeResult:
    counted = node.counted
    return NodeResult(
        counted.requests,
        counted.served_bytes,
        counted.ssd_written_bytes,
        round(counted.announce_messages),
        counted.lookup_messages,
        counted.busy_s,
        node.store.used_bytes,
    )
