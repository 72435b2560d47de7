"""A node's disk: what it keeps within its quota, and who learns of it."""

from collections.abc import Mapping
from itertools import islice
from typing import Final, cast

from kvnet.format.hashes import ArtifactHash
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.store.eviction import FRESH_S, HIGH_SHARE, LOW_SHARE, Candidate, choose_victims
from simulations.policies.policy import Order, Policy
from simulations.world.holdings import Held, Holdings
from simulations.world.tree import Path, PromptTree

FEW: Final = 6
"""Artifacts that are looked at first when some have to go."""

Holders = dict[int, dict[int, int]]
"""For each segment, the nodes whose disk holds some of it, and up to how many tokens of a prompt."""


def alike(n_tokens: int) -> int:
    """The least number of tokens with the same whole and begun blocks: its checkpoints are the same."""
    begun = n_tokens % BLOCK_TOKENS
    return n_tokens - begun + 1 if begun else n_tokens


class SimStore:
    """Artifacts of one node.

    Args:
        tree: of all prompts.
        node: whose.
        holders: of all nodes; kept up to date here.
        quota_bytes: the most it may hold.
        block_bytes: stored bytes of a block.
        policy: who goes first, and when.

    Attributes:
        holdings: what it holds.
        origins: for each segment, which node computed what is held of it: copies of one origin are the same bytes.
        evicted: artifacts let go to make room, and because nobody used them.
        n_keys: keys that are announced for it.
    """

    __slots__ = (
        "_checkpoints", "_keys", "_node", "_order", "block_bytes", "evicted", "expired", "holders", "holdings",
        "keep_s", "n_keys", "origins", "quota_bytes",
    )  # fmt: skip

    def __init__(
        self, tree: PromptTree, node: int, holders: Holders, quota_bytes: int, block_bytes: int, policy: Policy
    ) -> None:
        self.holdings = Holdings(tree)
        self.holders = holders
        self.quota_bytes = quota_bytes
        self.block_bytes = block_bytes
        self.keep_s = policy.keep_s
        self.origins: dict[int, int] = {}
        self.evicted = 0
        self.expired = 0
        self.n_keys = 0
        self._node = node
        self._order = policy.order
        self._keys: dict[int, int] = {}
        self._checkpoints = policy.checkpoints

    @property
    def used_bytes(self) -> int:
        """What is held."""
        return self.holdings.blocks * self.block_bytes

    def longest(self, path: Path) -> int:
        """Tokens of a prompt that can be restored: a key names whole blocks, and behind one tokens are compared."""
        found = self.holdings.longest(path)
        return found if found >= BLOCK_TOKENS else 0

    def keep(self, path: Path, origin: int, now_s: float, origins: Mapping[int, int] | None = None) -> int:
        """Hold a prefix.

        Args:
            path: of it.
            origin: which node computed what is new of it.
            now_s: the time.
            origins: where it was fetched: who computed which segment.

        Returns:
            Bytes written; -1 when there is no room for it.
        """
        holdings = self.holdings
        # Whoever has to go may have held some of it: it is new then.
        while not self._fits(new_bytes := holdings.new_blocks(path) * self.block_bytes):
            if not self._make_room(new_bytes):
                return -1
        segment, n_tokens = path[0]
        before = holdings.held.get(segment)
        if before is not None:
            if before.tokens >= n_tokens:
                holdings.touch(before, now_s)
                return 0
            self.n_keys -= before.n_keys
            if holdings.extend(before, path, now_s):
                self.holders[segment][self._node] = n_tokens
            self.n_keys += self._keys_of(before)
            return new_bytes
        one = Held(segment, path, now_s)
        self.n_keys += self._keys_of(one)
        for segment in holdings.add(one):
            self.holders.setdefault(segment, {})[self._node] = holdings.extent[segment]
            self.origins.setdefault(segment, origins.get(segment, origin) if origins else origin)
        return new_bytes

    def supersede(self, path: Path) -> None:
        """Let go of artifacts that are the beginning of one that is held."""
        for part in self.holdings.parts_of(path):
            self._drop(part.segment)

    def tidy(self, now_s: float) -> None:
        """Let go of what nobody used for too long, and of what is over the high mark."""
        held = self.holdings.held
        while held:
            tip, oldest = next(iter(held.items()))
            if now_s - oldest.used_s <= self.keep_s:
                break
            self._drop(tip)
            self.expired += 1
        used = self.used_bytes
        if used > HIGH_SHARE * self.quota_bytes:
            for tip in self._choose(int(used - LOW_SHARE * self.quota_bytes) + 1) or []:
                if now_s - held[tip].used_s >= FRESH_S:
                    self._drop(tip)
                    self.evicted += 1

    def forget(self) -> None:
        """Be empty."""
        for tip in list(self.holdings.held):
            self._drop(tip)

    def hide(self) -> None:
        """Nobody can ask for it any more."""
        for segment in self.holdings.extent:
            self.holders[segment].pop(self._node, None)

    def show(self) -> None:
        """It can be asked for again."""
        for segment, extent in self.holdings.extent.items():
            self.holders.setdefault(segment, {})[self._node] = extent

    def _keys_of(self, one: Held) -> int:
        """Keys that an artifact is announced under: its checkpoints and itself."""
        tokens = alike(one.tokens)
        n_keys = self._keys.get(tokens)
        if n_keys is None:
            n_keys = self._keys[tokens] = len(self._checkpoints(tokens)) + 1
        one.n_keys = n_keys
        return n_keys

    def _fits(self, n_bytes: int) -> bool:
        return self.used_bytes + n_bytes <= self.quota_bytes

    def _make_room(self, n_bytes: int) -> bool:
        """Let go of others; whether there is room for so many bytes then, or at least less is held than before."""
        victims = self._choose(self.used_bytes + n_bytes - self.quota_bytes)
        for tip in victims or ():
            self._drop(tip)
            self.evicted += 1
        return bool(victims)

    def _choose(self, need_bytes: int) -> list[int] | None:
        """The node's own choice, made among the next to go; among more where those do not suffice."""
        held = self.holdings.held
        # By last use they are in order; any other order needs all.
        n_looked_at = FEW if self._order is Order.LEAST_RECENT else len(held)
        while True:
            victims = self._choose_among(list(islice(held.values(), n_looked_at)), need_bytes)
            if victims is not None or n_looked_at >= len(held):
                return victims
            n_looked_at *= 4

    def _choose_among(self, candidates: list[Held], need_bytes: int) -> list[int] | None:
        """Artifacts and packs go by the number of their segment here; a pack has the blocks of one segment."""
        holdings = self.holdings
        segments = {segment for one in candidates for segment, _ in one.path}
        users = {segment: frozenset(holdings.through[segment]) for segment in segments}
        sizes = {segment: holdings.size(segment) * self.block_bytes for segment in segments}
        return cast(
            "list[int] | None",
            choose_victims(
                [Candidate(cast("ArtifactHash", one.segment), self._rank(one)) for one in candidates],
                cast("dict[int, frozenset[ArtifactHash]]", users),
                sizes,
                need_bytes,
            ),
        )

    def _rank(self, one: Held) -> float:
        """The smaller goes sooner."""
        match self._order:
            case Order.LEAST_RECENT:
                return one.used_s
            case Order.LEAST_OFTEN:
                return one.uses * 1e9 + one.used_s
            case Order.OLDEST:
                return one.kept_s
            case Order.LONGEST:
                return float(-one.tokens)

    def _drop(self, tip: int) -> None:
        holdings = self.holdings
        self.n_keys -= holdings.held[tip].n_keys
        for segment in holdings.remove(tip):
            extent = holdings.extent.get(segment)
            if extent is None:
                self.holders[segment].pop(self._node, None)
                self.origins.pop(segment, None)
            elif self._node in self.holders[segment]:
                self.holders[segment][self._node] = extent
