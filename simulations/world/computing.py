"""The engines: requests wait for them in order, continue from what is here, and are answered."""

from collections.abc import Callable
from typing import Final

from simulations.policies.policy import Reach
from simulations.results import RequestResult
from simulations.world.node import Job, LiveCaches, Node
from simulations.world.state import WorldState
from simulations.world.tree import Path, PromptTree

MIN_SYSTEM_TOKENS: Final = 64
"""Shorter system prompts have no live cache of their own; as in `kvnet.engine.mlx.states`."""

LeaveBehind = Callable[[Node, Job, int], None]
"""Told of a node, of a request whose answer ends, and of the node's epoch when its first token came."""


class Engines:
    """What every node's engine does.

    Args:
        state: of the world.
        leave_behind: keeps what is worth it, when an answer ends.
    """

    def __init__(self, state: WorldState, leave_behind: LeaveBehind) -> None:
        self._state = state
        self._leave_behind = leave_behind

    def queue(self, node: Node, job: Job) -> None:
        """A request waits until the engine is free."""
        if job.epoch != node.epoch:
            self._state.lose_request()
            return
        job.queued_s = self._state.clock.now
        if node.busy:
            node.waiting.append(job)
        else:
            self._compute(node, job)

    def _compute(self, node: Node, job: Job) -> None:
        """The engine begins with a request: it continues from RAM, or from disk where that holds more."""
        now_s, n_prompt = self._state.clock.now, job.request.n_input
        node.busy = True
        job.waited_s = now_s - job.queued_s
        restore_s = 0.0
        if self._state.policy.reach is Reach.CENTRAL:
            job.reused_tokens = min(self._state.checks.truth.longest(job.path), n_prompt - 1)
        elif self._state.policy.reach is not Reach.NOTHING:
            live = min(node.live.holdings.longest(job.path), n_prompt - 1)
            stored = node.stored_tokens(job.path, n_prompt - 1)
            if stored > live:
                raw_bytes = node.raw_bytes(stored)
                restore_s = node.machine.restore_s(raw_bytes) + raw_bytes / node.decode_bytes_s
                job.reused_tokens, job.live_tokens = stored, 0
                used = node.store.holdings.user_of(job.path)
                if used is not None:
                    node.store.holdings.touch(used, now_s)
            else:
                job.reused_tokens = job.live_tokens = live
                if live:
                    node.live.use(job.path, now_s)
        self._state.checks.continued(job)
        job.cold_s = node.machine.prefill.seconds(0, n_prompt)
        job.prefill_s = job.cold_s - node.machine.prefill.seconds(0, job.reused_tokens)
        work_s = restore_s + job.prefill_s
        node.counted.busy_s += work_s
        self._state.clock.at(now_s + work_s, self._first_token, node, job, node.epoch)

    def _first_token(self, node: Node, job: Job, epoch: int) -> None:
        if epoch != node.epoch:
            self._state.lose_request()
            return
        request, now_s = job.request, self._state.clock.now
        own_ram, own_disk, peer = self._sources(job)
        self._state.recorder.request(
            request.number,
            RequestResult(
                own_ram, own_disk, peer, now_s - request.arrival_s, job.fetched_bytes, job.prefill_s,
                job.cold_s, job.waited_s,
            ),
        )  # fmt: skip
        node.counted.requests += 1
        self._state.ended += 1
        node.busy = False
        self._state.checks.truth.computed(job.path)
        if self._state.policy.stores:
            if request.n_shared >= MIN_SYSTEM_TOKENS and job.reused_tokens < request.n_shared:
                self._live_system(node.live, job.path, request.n_shared, now_s)
            node.live.put(job.path, now_s)
        if self._state.policy.stores or self._state.setup.stream.answers_follow:
            self._state.clock.at(
                now_s + request.n_output / node.setup.answer_tokens_s, self._leave_behind, node, job, epoch
            )
        if node.waiting:
            self._compute(node, node.waiting.popleft())

    def _sources(self, job: Job) -> tuple[int, int, int]:
        """Tokens that a request continued from: of the node's RAM, of its disk, and of peers."""
        if self._state.policy.reach is Reach.CENTRAL:
            return 0, 0, job.reused_tokens
        if job.live_tokens:
            return job.reused_tokens, 0, 0
        peer = max(0, min(job.reused_tokens, job.fetched_tokens) - job.own_tokens) if job.fetched_tokens else 0
        return 0, job.reused_tokens - peer, peer

    @staticmethod
    def _live_system(live: LiveCaches, path: Path, n_shared: int, now_s: float) -> None:
        shared = PromptTree.cut(path, n_shared)
        if shared and shared[0][0] != path[0][0]:
            live.put(shared, now_s, system=True)
