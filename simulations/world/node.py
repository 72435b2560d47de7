"""One node of the world: what it has, what it does, and what it has counted."""

from collections import deque
from dataclasses import dataclass

from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.ids import PeerId
from kvnet.protocol.scoring import ScoreLimits
from simulations.policies.policy import Policy
from simulations.workload.requests import Request
from simulations.world.holdings import Held, Holdings
from simulations.world.setup import NodeSetup
from simulations.world.spans import Span
from simulations.world.store import SimStore
from simulations.world.swift import Bucket, Scores
from simulations.world.tree import Path, PromptTree


class Job:
    """A request on its way through a node.

    Attributes:
        request: what was asked.
        path: of its prompt.
        epoch: of the node when it arrived; another one means that the node crashed meanwhile.
        held_tokens: what was here when it was looked up.
        own_tokens: of what is restored from disk, those that were there before peers sent anything.
        fetched_tokens: up to where peers sent what was missing; 0 when they did not.
        fetched_bytes: that they sent.
        queued_s: since when it waits for the engine.
        waited_s: how long it did.
        reused_tokens, live_tokens: what it continued from, and how much of that was in RAM.
        prefill_s, cold_s: seconds of prefill, and what they would be without any reuse.
        attempts: offers that were tried for it.
    """

    __slots__ = (
        "attempts", "cold_s", "epoch", "fetched_bytes", "fetched_tokens", "held_tokens", "live_tokens", "own_tokens",
        "path", "prefill_s", "queued_s", "request", "reused_tokens", "waited_s",
    )  # fmt: skip

    def __init__(self, request: Request, path: Path, epoch: int) -> None:
        self.request = request
        self.path = path
        self.epoch = epoch
        self.held_tokens = self.own_tokens = self.fetched_tokens = self.fetched_bytes = 0
        self.reused_tokens = self.live_tokens = self.attempts = 0
        self.queued_s = self.waited_s = self.prefill_s = self.cold_s = 0.0


@dataclass(slots=True)
class Counted:
    """What a node has done so far; as in `NodeResult`, with messages as they add up over time."""

    requests: int = 0
    served_bytes: int = 0
    ssd_written_bytes: int = 0
    kept_bytes: int = 0
    announce_messages: float = 0.0
    lookup_messages: int = 0
    busy_s: float = 0.0


class LiveCaches:
    """K/V that stays in RAM between requests, as the engine's shelf keeps it.

    Args:
        tree: of all prompts.
        cap_bytes: the most that is kept.
        token_bytes: of one token.
    """

    __slots__ = ("_token_bytes", "cap_bytes", "holdings", "used_bytes")

    def __init__(self, tree: PromptTree, cap_bytes: int, token_bytes: int) -> None:
        self.holdings = Holdings(tree)
        self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self._token_bytes = token_bytes

    def use(self, path: Path, now_s: float) -> None:
        """What a prompt continues from was used."""
        one = self.holdings.user_of(path)
        if one is not None:
            self.holdings.touch(one, now_s)

    def put(self, path: Path, now_s: float, *, system: bool = False) -> None:
        """Keep state; what it contains goes, then what was not used for longest, system prompts last."""
        size = path[0][1] * self._token_bytes
        if size > self.cap_bytes:
            return
        before = self.holdings.held.get(path[0][0])
        if before is not None:
            if before.tokens >= path[0][1]:
                self.holdings.touch(before, now_s)
                return
            self.used_bytes += size - before.tokens * self._token_bytes
            self.holdings.extend(before, path, now_s)
            self._make_room(0)
            return
        if not system:
            for part in self.holdings.parts_of(path):
                if not part.system:
                    self._drop(part)
        self._make_room(size)
        self.holdings.add(Held(path[0][0], path, now_s, system=system))
        self.used_bytes += size

    def _make_room(self, n_bytes: int) -> None:
        """Let go of others; what was used last is what just came."""
        held = self.holdings.held
        while self.used_bytes + n_bytes > self.cap_bytes:
            self._drop(next((one for one in held.values() if not one.system), None) or next(iter(held.values())))

    def clear(self) -> None:
        """Forget everything."""
        for one in list(self.holdings.held.values()):
            self._drop(one)

    def _drop(self, one: Held) -> None:
        self.holdings.remove(one.segment)
        self.used_bytes -= one.tokens * self._token_bytes


class Node:
    """A machine with its engine, its RAM, its disk and its links.

    Args:
        number: of the node.
        setup: what it is.
        policy: what it does.
        tree: of all prompts.
        store: its disk.
        decode_bytes_s: raw bytes decoded per second; infinite for a codec that needs none.

    Attributes:
        present: whether it is there.
        epoch: grows whenever what runs on it is lost.
        members: the peers it keeps sessions with, by number.
        waiting: requests that wait for the engine; `busy` says whether it computes.
        fetching: by the segment that is fetched, the request that it is for and those that wait for it.
    """

    __slots__ = (
        "block_bytes", "budget", "busy", "counted", "decode_bytes_s", "down", "epoch", "fetching",
        "live", "machine", "members", "number", "peer", "present", "scores", "setup", "store", "up",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, number: int, setup: NodeSetup, policy: Policy, tree: PromptTree, store: SimStore, decode_bytes_s: float
    ) -> None:
        self.number = number
        self.setup = setup
        self.machine = setup.machine
        self.peer = PeerId(number.to_bytes(4, "big"))
        self.store = store
        self.block_bytes = store.block_bytes
        self.decode_bytes_s = decode_bytes_s
        self.live = LiveCaches(tree, setup.live_bytes, setup.kv_bytes_per_token)
        day_bytes = policy.write_budget_bytes_day
        day_bytes = setup.write_budget_bytes_day if day_bytes is None else day_bytes
        self.budget = Bucket(day_bytes, 0.0)
        self.scores = Scores(ScoreLimits(doubt_s=policy.doubt_s))
        self.up, self.down = Span(setup.link.up_bytes_s), Span(setup.link.down_bytes_s)
        self.present = True
        self.epoch = 0
        self.members: frozenset[int] = frozenset()
        self.waiting: deque[Job] = deque()
        self.busy = False
        self.fetching: dict[int, list[Job]] = {}
        self.counted = Counted()

    def raw_bytes(self, n_tokens: int) -> int:
        """Bytes of K/V in RAM."""
        return n_tokens * self.setup.kv_bytes_per_token

    def stored_tokens(self, path: Path, limit: int) -> int:
        """Tokens of a prompt that its disk has; at most `limit`."""
        found = self.store.holdings.longest(path)
        if found < BLOCK_TOKENS:
            return 0
        return min(found, limit)
