"""What all parts of a run have in common: who is there, what joins them, what time it is, and what is counted."""

from collections import Counter

from kvnet.format.codecs import Codec
from kvnet.format.prefix import BLOCK_TOKENS
from simulations.checkers import Checkers, Truth
from simulations.chips import STORED_SHARE
from simulations.policies.policy import Policy
from simulations.results import Recorder
from simulations.workload.churn import Change
from simulations.world.chunked import ChunkTransfers
from simulations.world.clock import Clock
from simulations.world.node import Node
from simulations.world.offers import Directory
from simulations.world.places import Places, choose_members
from simulations.world.setup import WorldSetup
from simulations.world.store import Holders, SimStore
from simulations.world.transfers import FluidTransfers, Transfers
from simulations.world.tree import PromptTree


class WorldState:
    """What is there when a run begins, and what becomes of it.

    Args:
        setup: what is given.
        policy: how nodes behave.
        seed: of what is drawn.
        clock: of virtual time.
        recorder: takes the results.
        exact_transfers: every chunk goes through the node's fetch machine; otherwise bytes flow.

    Attributes:
        tree: of all prompts.
        holders: of each segment.
        nodes: by number.
        places: who can reach whom, and in what time.
        directory: who has what.
        transfers: what is under way.
        checks: what must be true.
        counts: what happened, by name.
        asked: requests that have arrived.
        ended: of those, how many were answered or lost.
        farthest_s: of each node, seconds of a round trip to the farthest of its members.
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
        choose_members(self.nodes, setup.members, seed)
        self.farthest_s = [
            max((self.places.rtt_s(node, self.nodes[number]) for number in node.members), default=0.0)
            for node in self.nodes
        ]
        for number in {change.node for change in setup.changes if change.kind is Change.JOIN}:
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

    def lose_request(self) -> None:
        """A request went with its node."""
        self.counts["lost_requests"] += 1
        self.ended += 1
