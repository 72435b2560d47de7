"""What happens: a request arrives, looks for a prefix, waits for the engine, is answered, and leaves something behind.

The order is that of `kvnet.exchange.completion`; what is decided on the way is decided by the node's own code: whether
peers are asked and what of an offer is fetched (`kvnet.protocol.cost`, `kvnet.exchange.planning`), whom from
(`kvnet.protocol.scoring`), when a fetch is given up, what is kept (`kvnet.exchange.admission`, `write_budget`) and what
has to go for it (`kvnet.store.eviction`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from kvnet.engine.interface import Boundary, BoundaryKind
from kvnet.exchange.admission import Signals
from kvnet.exchange.finder import MAX_CANDIDATES, MIN_LOOKUP_S, WORTH_ASKING_S
from kvnet.exchange.lookups import DHT_SHARE, NAMED_SHARE
from kvnet.exchange.planning import SHOWING_ROUND_TRIPS, asking_could_win, link_to
from kvnet.format.codecs import Codec
from kvnet.format.prefix import BLOCK_TOKENS, TOKEN_SIZE_BYTES
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.cost import EvenOffer, best_cut
from kvnet.protocol.speeds import Link
from simulations.checkers import Checkers, Truth
from simulations.chips import STORED_SHARE
from simulations.policies.policy import Policy, Reach
from simulations.results import NodeResult, Recorder, RequestResult
from simulations.workload.churn import Change, PresenceChange
from simulations.workload.requests import Request
from simulations.world.chunked import ChunkTransfers
from simulations.world.clock import Clock
from simulations.world.dht import walk
from simulations.world.node import Job, LiveCaches, Node
from simulations.world.offers import Directory, Heard, Offered, local_seconds
from simulations.world.places import Places, choose_members
from simulations.world.replicas import Replicator
from simulations.world.setup import WorldSetup
from simulations.world.store import Holders, SimStore
from simulations.world.transfers import Brought, FluidTransfers, Transfers, Wanted
from simulations.world.tree import Path, PromptTree

SILENCE_S: Final = 75.0
"""A peer that is gone without a word keeps its session for so long: 60 s of silence, then 15 s for a ping
(`kvnet.protocol.session.SessionLimits`). Until then it is asked for what its table names."""
SESSION_ROUND_TRIPS: Final = 3
"""To dial somebody new: TCP, Noise, and the proof of membership; the question itself comes on top."""
_ANNOUNCING: Final = AnnounceLimits()
MIN_SYSTEM_TOKENS: Final = 64
"""Shorter system prompts have no live cache of their own; as in `kvnet.engine.mlx.states`."""


Report = Callable[[int, int], None]
"""Told how many requests of how many have arrived."""
REPORT_EVERY: Final = 64
"""Requests between two reports."""


class World:
    """One run.

    Args:
        setup: what is given.
        policy: how nodes behave.
        seed: of what is drawn.
        clock: of virtual time.
        recorder: takes the results.
        exact_transfers: every chunk goes through the node's fetch machine; otherwise bytes flow.
    """

    def __init__(
        self,
        setup: WorldSetup,
        policy: Policy,
        seed: int,
        clock: Clock,
        recorder: Recorder,
        *,
        exact_transfers: bool = False,
    ) -> None:
        self.setup = setup
        self.policy = policy
        self.clock = clock
        self.recorder = recorder
        self.tree = PromptTree(setup.stream)
        self.holders: Holders = {}
        self.nodes = self._nodes()
        self.places = Places(setup, self.nodes)
        self.directory = Directory(self.nodes, self.holders, self.places, policy)
        self.transfers: Transfers = FluidTransfers(clock, self.places.spans)
        if exact_transfers:
            self.transfers = ChunkTransfers(clock, self.places.spans, self.places.rtt_s)
        self.checks = Checkers(Truth())
        self.counts: Counter[str] = Counter()
        self.asked = self.ended = 0
        self._walk = walk(len(self.nodes) - 1)
        self._announced_s = [0.0] * len(self.nodes)
        self._follow = setup.stream.answers_follow
        self._stores, self._peers = policy.stores, policy.peers
        self._replicator = Replicator(self) if policy.replication is not None else None
        choose_members(self.nodes, setup.members, seed)
        self._farthest_s = [
            max((self.places.rtt_s(node, self.nodes[number]) for number in node.members), default=0.0)
            for node in self.nodes
        ]
        for partition in setup.partitions:
            clock.at(partition.begin_s, self.places.cut, partition)
            clock.at(partition.end_s, self.places.join, partition)
        absent = {change.node for change in setup.changes if change.kind is Change.JOIN}
        for number in absent:
            self.nodes[number].present = False

    def _nodes(self) -> list[Node]:
        nodes: list[Node] = []
        for number, each in enumerate(self.setup.nodes):
            block_bytes = round(each.kv_bytes_per_token * BLOCK_TOKENS * STORED_SHARE[self.policy.codec])
            quota_bytes = each.quota_bytes if self.policy.quota_bytes is None else self.policy.quota_bytes
            store = SimStore(self.tree, number, self.holders, quota_bytes, block_bytes, self.policy)
            decode_bytes_s = each.machine.decode_bytes_s.get(self.policy.codec, float("inf"))
            if self.policy.codec is Codec.RAW:
                decode_bytes_s = float("inf")
            nodes.append(Node(number, each, self.policy, self.tree, store, decode_bytes_s))
        return nodes

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self, report: Report) -> None:
        """Let everything happen, and look whether it was as it must be."""
        changes, at = self.setup.changes, 0
        for request in self.setup.stream:
            while at < len(changes) and changes[at].at_s <= request.arrival_s:
                self._change(changes[at])
                at += 1
            self.clock.run_until(request.arrival_s)
            self.checks.time(self.clock.now)
            self._arrive(request)
            if request.number % REPORT_EVERY == 0:
                report(request.number, len(self.setup.stream))
        for change in changes[at:]:
            self._change(change)
        self.clock.run()
        for node in self.nodes:
            self._count_announcing(node)
            self.recorder.node(node.number, _result(node))
        self.checks.finish(self.nodes, self.transfers.ledger, self.clock.now, asked=self.asked, ended=self.ended)
        self.counts["evicted"] = sum(node.store.evicted for node in self.nodes)
        self.counts["expired"] = sum(node.store.expired for node in self.nodes)
        self.counts["fetches"] = self.transfers.ledger.transfers
        self.counts["lost_bytes"] = self.transfers.ledger.lost

    def _change(self, change: PresenceChange) -> None:
        self.clock.run_until(change.at_s)
        node = self.nodes[change.node]
        match change.kind:
            case Change.JOIN | Change.WAKE:
                node.present = True
                node.store.show()
                self._announced_s[node.number] = self.clock.now
            case Change.SLEEP | Change.CRASH | Change.LEAVE:
                if node.present:
                    self._gone(node, change.kind)

    def _gone(self, node: Node, kind: Change) -> None:
        self._count_announcing(node)
        node.present = False
        node.epoch += 1
        node.busy = False
        for _ in range(len(node.waiting) + sum(len(jobs) for jobs in node.fetching.values())):
            self._lost()
        node.waiting.clear()
        node.fetching.clear()
        self.transfers.node_gone(node)
        if kind is not Change.SLEEP:
            node.live.clear()
        if kind is Change.LEAVE:
            node.store.forget()
            return
        self.clock.at(self.clock.now + SILENCE_S, self._noticed, node, node.epoch)

    @staticmethod
    def _noticed(node: Node, epoch: int) -> None:
        """Members know that a node is gone, and look for nothing there any more."""
        if not node.present and node.epoch == epoch:
            node.store.hide()

    def _lost(self) -> None:
        """A request went with its node."""
        self.counts["lost_requests"] += 1
        self.ended += 1

    # --- looking for a prefix -----------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        node = self.nodes[request.node]
        self.asked += 1
        if not node.present:
            self.counts["away_requests"] += 1
            self.ended += 1
            return
        job = Job(request, self.tree.path(request.segment, request.n_input), node.epoch)
        if self._peers:
            self._look_up(node, job)
        else:
            self._queue(node, job)

    def _look_up(self, node: Node, job: Job) -> None:
        """Ask peers, if that can pay; then fetch, if that does; then the engine."""
        if job.epoch != node.epoch:
            self._lost()
            return
        now_s, n_prompt = self.clock.now, job.request.n_input
        live = min(node.live.holdings.longest(job.path), n_prompt - 1)
        stored = node.stored_tokens(job.path, n_prompt - 1)
        job.held_tokens = held = max(live, stored)
        left_s = node.machine.prefill.seconds(held, n_prompt)
        if held >= n_prompt - 1 or left_s < WORTH_ASKING_S or job.attempts >= MAX_CANDIDATES:
            self._queue(node, job)
            return
        local_s = local_seconds(node.machine, n_prompt, live, stored, node.setup.kv_bytes_per_token)
        longest_s = min(self.policy.max_lookup_s, max(MIN_LOOKUP_S, self.policy.lookup_share * left_s))
        spent_s, heard = 0.0, self.directory.among_members(node, job, now_s)
        offered = heard.offered
        if heard.asked:
            asked = offered.providers if offered is not None else ()
            if self._could_win(node, asked, n_prompt, held, local_s):
                spent_s = self._answers_s(node, heard, longest_s)
            else:
                self.counts["not_asked"] += 1
                offered = None
        if offered is None and self.policy.dht and left_s >= self.policy.dht_worth_s and len(self.nodes) > 1:
            offered, more_s = self._ask_dht(node, job, longest_s - spent_s)
            spent_s += more_s
        if offered is None:
            self.clock.at(now_s + spent_s, self._queue, node, job)
            return
        rtts_s = [self.places.rtt_s(node, each) for each in offered.providers]
        rtt_s = min(rtts_s)
        for each, each_s in zip(offered.providers, rtts_s, strict=True):
            node.scores.answered(each.peer, each_s, now_s)
        link = link_to((each.peer for each in offered.providers), node.scores, now_s, node.decode_bytes_s)
        shown = Link(link.peer, link.rtt_s * (1 + SHOWING_ROUND_TRIPS), link.bytes_s, link.decode_bytes_s)
        cut, _ = best_cut(node.machine, n_prompt, held, self._offer(node, offered, shown, stored), local_s)
        if not cut:
            self.counts["turned_down"] += 1
            self.clock.at(now_s + spent_s, self._queue, node, job)
            return
        self.clock.at(now_s + spent_s + SHOWING_ROUND_TRIPS * rtt_s, self._fetch, node, job, offered, local_s)

    @staticmethod
    def _offer(node: Node, offered: Offered, link: Link, stored: int) -> EvenOffer:
        return EvenOffer(
            link=link,
            n_tokens=offered.n_tokens,
            first_block=min(stored, offered.n_tokens) // BLOCK_TOKENS,
            block_bytes=node.block_bytes,
            head_bytes=TOKEN_SIZE_BYTES * offered.n_tokens,
            raw_bytes_per_token=node.setup.kv_bytes_per_token,
        )

    def _could_win(self, node: Node, asked: Sequence[Node], n_prompt: int, held: int, local_s: float) -> bool:
        """Whether asking those who are to be asked can pay; as long as the rate of one is not known, it can."""
        link = link_to((each.peer for each in asked), node.scores, self.clock.now)
        return asking_could_win(
            node.machine, n_prompt, held, local_s, raw_bytes_per_token=node.setup.kv_bytes_per_token, link=link
        )

    def _answers_s(self, node: Node, heard: Heard, longest_s: float) -> float:
        """How long answers take: a round trip, or all the time of a lookup where the best says nothing."""
        node.counted.lookup_messages += heard.asked
        farthest_s = self._farthest_s[node.number]
        if not heard.silent:
            return min(longest_s, farthest_s)
        self.counts["waited_for_silent"] += 1
        if heard.offered is not None and self.policy.patience_s is not None:
            return min(longest_s, farthest_s + self.policy.patience_s)
        return longest_s

    def _ask_dht(self, node: Node, job: Job, left_s: float) -> tuple[Offered | None, float]:
        """Who the DHT names, dialled and asked; nobody when there is no time for it."""
        node.counted.lookup_messages += round(self._walk.requests * len(self.directory.dht_depths(job.request.n_input)))
        round_s, limit_s = self._dht_round_s(node), NAMED_SHARE * DHT_SHARE * max(0.0, left_s)
        # A walk ends when all of the closest have answered, or when its time is over: it then says whom it was named.
        found_s = min(self._walk.rounds * round_s, limit_s)
        offered = None
        if self._walk.named_rounds * round_s <= limit_s:
            offered = self.directory.in_dht(node, job, self.clock.now)
        if offered is None:
            return None, found_s
        dialled_s = found_s + (SESSION_ROUND_TRIPS + 1) * self.places.rtt_s(node, offered.providers[0])
        if dialled_s > left_s:
            return None, left_s
        self.counts["found_in_dht"] += 1
        return offered, dialled_s

    def _dht_round_s(self, node: Node) -> float:
        """Seconds in which some servers answer: most of them are dialled first, where there are more than members."""
        if len(self.nodes) == len(node.members) + 1:
            return self._farthest_s[node.number]
        return (SESSION_ROUND_TRIPS + 1) * self.setup.dht_rtt_s

    # --- fetching -----------------------------------------------------------------------------------------------------

    def _fetch(self, node: Node, job: Job, offered: Offered, local_s: float) -> None:
        """What was offered has been shown: decide again, by what is missing now, and begin."""
        if job.epoch != node.epoch:
            self._lost()
            return
        underway = node.fetching.get(offered.segment)
        if underway is not None:
            # One fetch for all who wait: see what it brought when it is over.
            underway.append(job)
            self.counts["shared_fetches"] += 1
            return
        now_s, n_prompt = self.clock.now, job.request.n_input
        providers = [each for each in offered.providers if self.places.reachable(node, each)]
        stored = node.stored_tokens(job.path, n_prompt - 1)
        link = link_to((each.peer for each in providers), node.scores, now_s, node.decode_bytes_s)
        offer = self._offer(node, offered, link, stored)
        cut, _ = best_cut(node.machine, n_prompt, job.held_tokens, offer, local_s)
        if not cut or not providers or offer.stored_bytes(cut) > node.store.quota_bytes:
            self._queue(node, job)
            return
        job.own_tokens = stored
        node.fetching[offered.segment] = [job]
        rtt_s = min(self.places.rtt_s(node, each) for each in providers)

        def done(brought: Brought) -> None:
            self._fetched(node, job, offered, brought)

        self.transfers.begin(Wanted(node, providers, n_prompt, job.held_tokens, cut, offer, local_s, rtt_s, done))

    def _fetched(self, node: Node, job: Job, offered: Offered, brought: Brought) -> None:
        waiting = node.fetching.pop(offered.segment)[1:]
        job.fetched_bytes += brought.n_bytes
        if brought.ended_early:
            self.counts["given_up"] += 1
        if brought.provider is not None and brought.n_bytes:
            node.counted.ssd_written_bytes += brought.n_bytes
            node.budget.spend(brought.n_bytes, self.clock.now)
        if brought.n_tokens > job.held_tokens and brought.provider is not None:
            # Whole blocks of it are there for others too; behind the last, tokens of a block that only begins alike.
            path = PromptTree.cut(job.path, brought.n_tokens)
            self._count_announcing(node)
            theirs = brought.provider.store.origins
            if node.store.keep(path, brought.provider.number, self.clock.now, theirs) >= 0:
                job.fetched_tokens = brought.n_tokens
                node.store.tidy(self.clock.now)
            self.checks.stored(node)
            if self._replicator is not None:
                self._replicator.fetched(node, job.request, path)
        job.attempts += 1
        self._look_up(node, job) if brought.provider is None else self._queue(node, job)
        for other in waiting:
            self._look_up(node, other)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _queue(self, node: Node, job: Job) -> None:
        if job.epoch != node.epoch:
            self._lost()
            return
        job.queued_s = self.clock.now
        if node.busy:
            node.waiting.append(job)
        else:
            self._compute(node, job)

    def _compute(self, node: Node, job: Job) -> None:
        """The engine begins with a request: it continues from RAM, or from disk where that holds more."""
        now_s, n_prompt = self.clock.now, job.request.n_input
        node.busy = True
        job.waited_s = now_s - job.queued_s
        restore_s = 0.0
        if self.policy.reach is Reach.CENTRAL:
            job.reused_tokens = min(self.checks.truth.longest(job.path), n_prompt - 1)
        elif self.policy.reach is not Reach.NOTHING:
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
        self.checks.continued(job)
        job.cold_s = node.machine.prefill.seconds(0, n_prompt)
        job.prefill_s = job.cold_s - node.machine.prefill.seconds(0, job.reused_tokens)
        work_s = restore_s + job.prefill_s
        node.counted.busy_s += work_s
        self.clock.at(now_s + work_s, self._first_token, node, job, node.epoch)

    def _first_token(self, node: Node, job: Job, epoch: int) -> None:
        if epoch != node.epoch:
            self._lost()
            return
        request, now_s = job.request, self.clock.now
        own_ram = own_disk = peer = 0
        if job.live_tokens or self.policy.reach is Reach.CENTRAL:
            own_ram = job.reused_tokens
        else:
            peer = max(0, min(job.reused_tokens, job.fetched_tokens) - job.own_tokens) if job.fetched_tokens else 0
            own_disk = job.reused_tokens - peer
        if self.policy.reach is Reach.CENTRAL:
            own_ram, peer = 0, own_ram
        self.recorder.request(
            request.number,
            RequestResult(
                own_ram, own_disk, peer, now_s - request.arrival_s, job.fetched_bytes, job.prefill_s,
                job.cold_s, job.waited_s,
            ),
        )  # fmt: skip
        node.counted.requests += 1
        self.ended += 1
        node.busy = False
        self.checks.truth.computed(job.path)
        if self._stores:
            if request.n_shared >= MIN_SYSTEM_TOKENS and job.reused_tokens < request.n_shared:
                self._live_system(node.live, job.path, request.n_shared, now_s)
            node.live.put(job.path, now_s)
        if self._stores or self._follow:
            self.clock.at(now_s + request.n_output / node.setup.answer_tokens_s, self._answered, node, job, epoch)
        if node.waiting:
            self._compute(node, node.waiting.popleft())

    @staticmethod
    def _live_system(live: LiveCaches, path: Path, n_shared: int, now_s: float) -> None:
        shared = PromptTree.cut(path, n_shared)
        if shared and shared[0][0] != path[0][0]:
            live.put(shared, now_s, system=True)

    # --- what an answer leaves behind ---------------------------------------------------------------------------------

    def _answered(self, node: Node, job: Job, epoch: int) -> None:
        """Keep what is worth it, as `kvnet.exchange.keeping` does."""
        if epoch != node.epoch:
            return
        request, now_s, path = job.request, self.clock.now, job.path
        if self._follow and request.n_output:
            path = self.tree.longer(path, request.segment, request.n_input + request.n_output)
            self.checks.truth.computed(path)
        if not self._stores:
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
        keep_tokens = self.policy.admission.decide(signals).keep_tokens
        if not keep_tokens:
            self.counts["not_kept"] += 1
            return
        self._count_announcing(node)
        kept = PromptTree.cut(path, keep_tokens)
        n_bytes = node.store.keep(kept, node.number, now_s)
        if n_bytes < 0:
            self.counts["no_room"] += 1
            return
        self.counts["kept"] += 1
        node.counted.ssd_written_bytes += n_bytes
        node.counted.kept_bytes += n_bytes
        node.budget.spend(n_bytes, now_s)
        node.store.supersede(kept)
        if self._peers:
            node.counted.announce_messages += len(node.members)
        node.store.tidy(now_s)
        self.checks.stored(node)

    @staticmethod
    @cache
    def _boundaries(n_shared: int) -> tuple[Boundary, ...]:
        return (Boundary(n_shared, BoundaryKind.SYSTEM, 1),) if n_shared else ()

    def _count_announcing(self, node: Node) -> None:
        """Messages since the last time: each key is announced again and again, no faster than the pace allows."""
        now_s, number = self.clock.now, node.number
        elapsed_s = now_s - self._announced_s[number]
        self._announced_s[number] = now_s
        if self._peers and self.policy.dht and node.present and elapsed_s > 0:
            keys = elapsed_s * min(node.store.n_keys / self.policy.reprovide_s, 1 / _ANNOUNCING.interval_s)
            checks = elapsed_s / _ANNOUNCING.verify_s if node.store.n_keys else 0.0
            node.counted.announce_messages += keys * self._walk.announcement + checks * self._walk.requests
            self.counts["dht_announcements"] += round(keys)


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
