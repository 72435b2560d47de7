"""What a node learns when it looks for a prefix: who has most of it, by its members' tables and through the DHT.

Every member tells every other what it holds, so that a node knows whom to ask: as a rule one or a few, in one round
trip. A member that is gone without a word is asked too, as long as its session counts as open; nobody waits for it when
another that has as much has answered. Whom the tables do not name the DHT may.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from kvnet.exchange.lookups import MAX_DIALS
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.lookup import MAX_ASKED, MAX_DHT_QUERIES
from kvnet.protocol.speeds import Machine
from simulations.policies.policy import Policy
from simulations.world.dht import RECORDS_OF_A_KEY
from simulations.world.node import Job, Node
from simulations.world.places import Places
from simulations.world.store import Holders, alike
from simulations.world.tree import NOWHERE

MAX_PROVIDERS: Final = 4
"""Peers asked at the same time; `kvnet.protocol.fetch.FetchLimits.active_peers`."""


class Offered(NamedTuple):
    """A prefix that peers offer: up to how many tokens, in which segment it ends, and who has those very bytes."""

    n_tokens: int
    segment: int
    providers: tuple[Node, ...]


class Heard(NamedTuple):
    """What a round of questions brought.

    Attributes:
        offered: the best, if any.
        asked: how many were asked.
        silent: somebody whose table says that it has more does not answer.
    """

    offered: Offered | None = None
    asked: int = 0
    silent: bool = False


class Directory:
    """Finds out who has what.

    Args:
        nodes: of the world.
        holders: of each segment.
        places: who can reach whom.
        policy: what is announced.
    """

    def __init__(self, nodes: list[Node], holders: Holders, places: Places, policy: Policy) -> None:
        self._nodes = nodes
        self._holders = holders
        self._places = places
        self._checkpoints = policy.checkpoints
        self._announced = _Announced(policy.checkpoints)
        self._one_model = len({node.setup.model for node in nodes}) == 1
        self._depths: dict[int, list[int]] = {}

    def among_members(self, node: Node, job: Job, now_s: float) -> Heard:
        """What connected members offer beyond what is held."""
        members, asked, silent = node.members, 0, False
        for segment, end in job.path:
            if end // BLOCK_TOKENS * BLOCK_TOKENS <= job.held_tokens:
                break
            holders = self._holders.get(segment)
            # As a rule a conversation's own end is held by this node alone.
            if holders and (near := {n: extent for n, extent in holders.items() if n in members}):
                heard = self._of_segment(node, job, segment, end, near, now_s)
                asked += heard.asked
                silent |= heard.silent
                if heard.offered is not None:
                    return Heard(heard.offered, min(asked, MAX_ASKED), silent)
        return Heard(None, min(asked, MAX_ASKED), silent)

    def dht_depths(self, n_tokens: int) -> list[int]:
        """Tokens up to each checkpoint of a prompt that is looked for in the DHT."""
        n_tokens = alike(n_tokens)
        depths = self._depths.get(n_tokens)
        if depths is None:
            depths = [depth * BLOCK_TOKENS for depth in self._checkpoints(n_tokens)[-MAX_DHT_QUERIES:]]
            self._depths[n_tokens] = depths
        return depths

    def in_dht(self, node: Node, job: Job, now_s: float) -> Offered | None:
        """What others offer whom the DHT names: those under the prompt's own checkpoints.

        A checkpoint names all before it, so that it leads to holders of the segment that it lies in, as far as they
        announced the same one. Of each key the DHT keeps few records; the first that came.
        """
        depths = self.dht_depths(job.request.n_input)
        members, dialled = node.members, 0
        for at, (segment, end) in enumerate(job.path):
            begin = job.path[at + 1][1] if at + 1 < len(job.path) else 0
            if end // BLOCK_TOKENS * BLOCK_TOKENS <= job.held_tokens:
                return None
            holders = self._holders.get(segment)
            if not holders or (len(holders) == 1 and node.number in holders):
                continue
            named = self._named(holders, [depth for depth in depths if begin < depth <= end])
            found = [n for n in named if n not in members and n != node.number][: MAX_DIALS - dialled]
            dialled += len(found)
            extents = {n: holders[n] for n in found}
            offered = self._of_segment(node, job, segment, end, extents, now_s).offered
            if offered is not None or dialled >= MAX_DIALS:
                return offered
        return None

    def _named(self, holders: dict[int, int], depths: list[int]) -> list[int]:
        """Who announced any of these depths, the deepest first."""
        named: dict[int, None] = {}
        announced = self._announced
        for depth in reversed(depths):
            records, block = 0, depth // BLOCK_TOKENS
            for number, extent in holders.items():
                if extent >= depth and block in announced[extent // BLOCK_TOKENS]:
                    named[number] = None
                    records += 1
                    if records == RECORDS_OF_A_KEY:
                        break
        return list(named)

    def _of_segment(self, node: Node, job: Job, segment: int, end: int, extents: dict[int, int], now_s: float) -> Heard:
        """More tokens come first, then whom most have; copies of different origin are different bytes.

        `extents` says who is to be asked and up to where each holds the segment; it is used up.
        """
        least = (job.held_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        if extents and max(extents.values()) > end:
            extents = {number: min(extent, end) for number, extent in extents.items()}
        longest, found, asked, silent = 0, list[Node](), 0, False
        while extents and not found:
            longest = max(extents.values())
            if longest < least:
                break
            farthest = [number for number, extent in extents.items() if extent == longest]
            found = self._askable(node, farthest, now_s)
            asked += len(farthest)
            silent |= not found
            for number in farthest:
                del extents[number]
        n_tokens = min(longest, job.request.n_input - 1)
        if not found or n_tokens < BLOCK_TOKENS:
            return Heard(None, asked, silent)
        if len(found) == 1:
            return Heard(Offered(n_tokens, segment, (found[0],)), asked, silent)
        origins = [other.store.origins.get(segment, NOWHERE) for other in found]
        counted = Counter(origins)
        if len(counted) == 1:
            group = found
        else:
            best = min(counted, key=lambda origin: (-counted[origin], origin))
            group = [other for other, origin in zip(found, origins, strict=True) if origin == best]
        order = node.scores.order([other.peer for other in group], now_s) if len(group) > 1 else [group[0].peer]
        known = {other.peer: other for other in group}
        return Heard(Offered(n_tokens, segment, tuple(known[peer] for peer in order[:MAX_PROVIDERS])), asked, silent)

    def _askable(self, node: Node, numbers: list[int], now_s: float) -> list[Node]:
        """Those of some nodes that can be reached and are not banned."""
        others = [self._nodes[number] for number in numbers]
        if self._one_model and node.present and node.scores.all_welcome and not self._places.is_cut:
            return [other for other in others if other.present]
        reachable = [other for other in others if self._places.reachable(node, other)]
        return [other for other in reachable if not node.scores.banned(other.peer, now_s)]


class _Announced(dict[int, frozenset[int]]):
    """At which blocks an artifact of so many whole blocks is announced."""

    def __init__(self, checkpoints: Callable[[int], list[int]]) -> None:
        super().__init__()
        self._checkpoints = checkpoints

    def __missing__(self, n_blocks: int) -> frozenset[int]:
        known = self[n_blocks] = frozenset(self._checkpoints(n_blocks * BLOCK_TOKENS))
        return known


def local_seconds(machine: Machine, n_prompt: int, live_tokens: int, stored_tokens: int, token_bytes: int) -> float:
    """Seconds to the first token without peers: as `kvnet.exchange.planning.Weigher` has it."""
    if live_tokens and live_tokens >= stored_tokens:
        return machine.prefill.seconds(live_tokens, n_prompt)
    computed_s = machine.prefill.seconds(0, n_prompt)
    if not stored_tokens:
        return computed_s
    restored_s = machine.restore_s(stored_tokens * token_bytes) + machine.prefill.seconds(stored_tokens, n_prompt)
    return min(computed_s, restored_s)
