"""A request looks for the prefix of its prompt: in RAM and on disk, among members, in the DHT; and fetches what pays.

As `kvnet.exchange.prefix_reuse` and `kvnet.exchange.finder` do, by the node's own code: whether peers are asked and
what of an offer is fetched (`kvnet.protocol.cost`, `kvnet.exchange.planning`), and whom from
(`kvnet.protocol.scoring`).
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvnet.exchange.finder import MAX_CANDIDATES, MIN_LOOKUP_S, WORTH_ASKING_S
from kvnet.exchange.lookups import DHT_SHARE, NAMED_SHARE
from kvnet.exchange.planning import SHOWING_ROUND_TRIPS, asking_could_win, link_to
from kvnet.format.prefix import BLOCK_TOKENS, TOKEN_SIZE_BYTES
from kvnet.protocol.cost import EvenOffer, best_cut
from kvnet.protocol.speeds import Link
from simulations.world.announcing import Announcing
from simulations.world.dht import walk
from simulations.world.node import Job, Node
from simulations.world.offers import Heard, Offered, local_seconds
from simulations.world.replicas import Replicator
from simulations.world.state import WorldState
from simulations.world.transfers import Brought, Wanted
from simulations.world.tree import PromptTree

SESSION_ROUND_TRIPS: Final = 3
"""To dial somebody new: TCP, Noise, and the proof of membership; the question itself comes on top."""


class PrefixReuse:
    """Looks up and fetches.

    Args:
        state: of the world.
        announcing: counts what a node's keys cost.
        queue: what a request does next, with what was found: wait for the engine.
    """

    def __init__(self, state: WorldState, announcing: Announcing, queue: Callable[[Node, Job], None]) -> None:
        self._state = state
        self._announcing = announcing
        self._queue = queue
        self._walk = walk(len(state.nodes) - 1)
        self._replicator = Replicator(state) if state.policy.replication is not None else None

    def look_up(self, node: Node, job: Job) -> None:
        """Ask peers, if that can pay; then fetch, if that does; then the engine."""
        if job.epoch != node.epoch:
            self._state.lose_request()
            return
        now_s, n_prompt = self._state.clock.now, job.request.n_input
        live = min(node.live.holdings.longest(job.path), n_prompt - 1)
        stored = node.stored_tokens(job.path, n_prompt - 1)
        job.held_tokens = held = max(live, stored)
        left_s = node.machine.prefill.seconds(held, n_prompt)
        if held >= n_prompt - 1 or left_s < WORTH_ASKING_S or job.attempts >= MAX_CANDIDATES:
            self._queue(node, job)
            return
        local_s = local_seconds(node.machine, n_prompt, live, stored, node.setup.kv_bytes_per_token)
        offered, spent_s = self._ask(node, job, left_s, local_s)
        if offered is None:
            self._state.clock.at(now_s + spent_s, self._queue, node, job)
            return
        rtts_s = [self._state.places.rtt_s(node, each) for each in offered.providers]
        for each, each_s in zip(offered.providers, rtts_s, strict=True):
            node.scores.answered(each.peer, each_s, now_s)
        link = link_to((each.peer for each in offered.providers), node.scores, now_s, node.decode_bytes_s)
        shown = Link(link.peer, link.rtt_s * (1 + SHOWING_ROUND_TRIPS), link.bytes_s, link.decode_bytes_s)
        cut, _ = best_cut(node.machine, n_prompt, held, self._offer(node, offered, shown, stored), local_s)
        if not cut:
            self._state.counts["turned_down"] += 1
            self._state.clock.at(now_s + spent_s, self._queue, node, job)
            return
        shown_s = now_s + spent_s + SHOWING_ROUND_TRIPS * min(rtts_s)
        self._state.clock.at(shown_s, self._fetch, node, job, offered, local_s)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, node: Node, job: Job, left_s: float, local_s: float) -> tuple[Offered | None, float]:
        """The best that members or the DHT offer, and the seconds until it is known.

        Args:
            node: that asks.
            job: for which; what is held here is known.
            left_s: seconds to compute what is not held.
            local_s: seconds to the first token without peers.
        """
        policy, n_prompt = self._state.policy, job.request.n_input
        longest_s = min(policy.max_lookup_s, max(MIN_LOOKUP_S, policy.lookup_share * left_s))
        spent_s, heard = 0.0, self._state.directory.among_members(node, job, self._state.clock.now)
        offered = heard.offered
        if heard.asked:
            asked = offered.providers if offered is not None else ()
            if self._could_win(node, asked, n_prompt, job.held_tokens, local_s):
                spent_s = self._answers_s(node, heard, longest_s)
            else:
                self._state.counts["not_asked"] += 1
                offered = None
        if offered is None and policy.dht and left_s >= policy.dht_worth_s and len(self._state.nodes) > 1:
            offered, more_s = self._ask_dht(node, job, longest_s - spent_s)
            spent_s += more_s
        return offered, spent_s

    def _could_win(self, node: Node, asked: Sequence[Node], n_prompt: int, held: int, local_s: float) -> bool:
        """Whether asking those who are to be asked can pay; as long as the rate of one is not known, it can."""
        link = link_to((each.peer for each in asked), node.scores, self._state.clock.now)
        return asking_could_win(
            node.machine, n_prompt, held, local_s, raw_bytes_per_token=node.setup.kv_bytes_per_token, link=link
        )

    def _answers_s(self, node: Node, heard: Heard, longest_s: float) -> float:
        """How long answers take: a round trip, or all the time of a lookup where the best says nothing."""
        node.counted.lookup_messages += heard.asked
        farthest_s = self._state.farthest_s[node.number]
        if not heard.silent:
            return min(longest_s, farthest_s)
        self._state.counts["waited_for_silent"] += 1
        if heard.offered is not None and self._state.policy.patience_s is not None:
            return min(longest_s, farthest_s + self._state.policy.patience_s)
        return longest_s

    def _ask_dht(self, node: Node, job: Job, left_s: float) -> tuple[Offered | None, float]:
        """Who the DHT names, dialled and asked; nobody when there is no time for it."""
        node.counted.lookup_messages += round(
            self._walk.requests * len(self._state.directory.dht_depths(job.request.n_input))
        )
        round_s, limit_s = self._dht_round_s(node), NAMED_SHARE * DHT_SHARE * max(0.0, left_s)
        # A walk ends when all of the closest have answered, or when its time is over: it then says whom it was named.
        found_s = min(self._walk.rounds * round_s, limit_s)
        offered = None
        if self._walk.named_rounds * round_s <= limit_s:
            offered = self._state.directory.in_dht(node, job, self._state.clock.now)
        if offered is None:
            return None, found_s
        dialled_s = found_s + (SESSION_ROUND_TRIPS + 1) * self._state.places.rtt_s(node, offered.providers[0])
        if dialled_s > left_s:
            return None, left_s
        self._state.counts["found_in_dht"] += 1
        return offered, dialled_s

    def _dht_round_s(self, node: Node) -> float:
        """Seconds in which some servers answer: most of them are dialled first, where there are more than members."""
        if len(self._state.nodes) == len(node.members) + 1:
            return self._state.farthest_s[node.number]
        return (SESSION_ROUND_TRIPS + 1) * self._state.setup.dht_rtt_s

    # --- fetching -----------------------------------------------------------------------------------------------------

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

    def _fetch(self, node: Node, job: Job, offered: Offered, local_s: float) -> None:
        """What was offered has been shown: decide again, by what is missing now, and begin."""
        if job.epoch != node.epoch:
            self._state.lose_request()
            return
        underway = node.fetching.get(offered.segment)
        if underway is not None:
            # One fetch for all who wait: see what it brought when it is over.
            underway.append(job)
            self._state.counts["shared_fetches"] += 1
            return
        now_s, n_prompt = self._state.clock.now, job.request.n_input
        providers = [each for each in offered.providers if self._state.places.reachable(node, each)]
        stored = node.stored_tokens(job.path, n_prompt - 1)
        link = link_to((each.peer for each in providers), node.scores, now_s, node.decode_bytes_s)
        offer = self._offer(node, offered, link, stored)
        cut, _ = best_cut(node.machine, n_prompt, job.held_tokens, offer, local_s)
        if not cut or not providers or offer.stored_bytes(cut) > node.store.quota_bytes:
            self._queue(node, job)
            return
        job.own_tokens = stored
        node.fetching[offered.segment] = [job]
        rtt_s = min(self._state.places.rtt_s(node, each) for each in providers)

        def done(brought: Brought) -> None:
            self._fetched(node, job, offered, brought)

        self._state.transfers.begin(
            Wanted(node, providers, n_prompt, job.held_tokens, cut, offer, local_s, rtt_s, done)
        )

    def _fetched(self, node: Node, job: Job, offered: Offered, brought: Brought) -> None:
        waiting = node.fetching.pop(offered.segment)[1:]
        job.fetched_bytes += brought.n_bytes
        if brought.ended_early:
            self._state.counts["given_up"] += 1
        if brought.provider is not None and brought.n_bytes:
            node.counted.ssd_written_bytes += brought.n_bytes
            node.budget.spend(brought.n_bytes, self._state.clock.now)
        if brought.n_tokens > job.held_tokens and brought.provider is not None:
            # Whole blocks of it are there for others too; behind the last, tokens of a block that only begins alike.
            path = PromptTree.cut(job.path, brought.n_tokens)
            self._announcing.count(node)
            theirs = brought.provider.store.origins
            if node.store.keep(path, brought.provider.number, self._state.clock.now, theirs) >= 0:
                job.fetched_tokens = brought.n_tokens
                node.store.tidy(self._state.clock.now)
            self._state.checks.stored(node)
            if self._replicator is not None:
                self._replicator.fetched(node, job.request, path)
        job.attempts += 1
        self.look_up(node, job) if brought.provider is None else self._queue(node, job)
        for other in waiting:
            self.look_up(node, other)
