"""What an answer leaves behind on disk, as `kvnet.exchange.keeping` has it.

What is kept is decided by the node's own code (`kvnet.exchange.admission`, `write_budget`), and so is what has to go
for it (`kvnet.store.eviction`).
"""

from functools import cache

from kvnet.engine.prompts import Boundary, BoundaryKind
from kvnet.exchange.admission import Signals
from simulations.world.announcing import Announcing
from simulations.world.node import Job, Node
from simulations.world.state import WorldState
from simulations.world.tree import PromptTree


class Keeper:
    """Keeps conversations.

    Args:
        state: of the world.
        announcing: counts what a node's keys cost.
    """

    def __init__(self, state: WorldState, announcing: Announcing) -> None:
        self._state = state
        self._announcing = announcing

    def answered(self, node: Node, job: Job, epoch: int) -> None:
        """Keep what is worth it, as `kvnet.exchange.keeping` does."""
        if epoch != node.epoch:
            return
        request, now_s, path = job.request, self._state.clock.now, job.path
        if self._state.setup.stream.answers_follow and request.n_output:
            path = self._state.tree.longer(path, request.segment, request.n_input + request.n_output)
            self._state.checks.truth.computed(path)
        if not self._state.policy.stores:
            return
        if path is not job.path:
            node.live.put(path, now_s)
        signals = Signals(
            prompt_tokens=request.n_input,
            stable_tokens=request.n_input,
            held_tokens=path[0][1] if path else 0,
            stored_tokens=node.store.longest(path),
            boundaries=self._boundaries(request.n_shared),
            token_bytes=node.setup.kv_bytes_per_token,
            left_bytes=node.budget.left_bytes(now_s),
            day_bytes=node.budget.day_bytes,
        )
        keep_tokens = self._state.policy.admission.decide(signals).keep_tokens
        if not keep_tokens:
            self._state.counts["not_kept"] += 1
            return
        self._announcing.count(node)
        kept = PromptTree.cut(path, keep_tokens)
        n_bytes = node.store.keep(kept, node.number, now_s)
        if n_bytes < 0:
            self._state.counts["no_room"] += 1
            return
        self._state.counts["kept"] += 1
        node.counted.ssd_written_bytes += n_bytes
        node.counted.kept_bytes += n_bytes
        node.budget.spend(n_bytes, now_s)
        node.store.supersede(kept)
        if self._state.policy.peers:
            node.counted.announce_messages += len(node.members)
        node.store.tidy(now_s)
        self._state.checks.stored(node)

    @staticmethod
    @cache
    def _boundaries(n_shared: int) -> tuple[Boundary, ...]:
        return (Boundary(n_shared, BoundaryKind.SYSTEM, 1),) if n_shared else ()
