"""What a node holds: prefixes of the tree, the blocks they share counted once, and the least recently used first."""

from kvnet.format.prefix import BLOCK_TOKENS
from simulations.world.tree import Path, PromptTree


class Held:
    """One prefix that is held by itself: an artifact on disk, or a live cache.

    Attributes:
        segment: where in the tree it ends.
        tokens: of it.
        path: from its end to its beginning.
        kept_s: since when it is held.
        used_s: when it was last used.
        uses: how often.
        system: what several conversations begin with.
        n_keys: keys that it is announced under.
    """

    __slots__ = ("kept_s", "n_keys", "path", "segment", "system", "tokens", "used_s", "uses")

    def __init__(self, segment: int, path: Path, used_s: float, *, system: bool = False) -> None:
        self.segment = segment
        self.tokens = path[0][1]
        self.path = path
        self.kept_s = used_s
        self.used_s = used_s
        self.uses = self.n_keys = 0
        self.system = system


class Holdings:
    """Prefixes on one medium of one node.

    There is at most one of them a segment, which is the longest; a node's prompts of one conversation grow in one.

    Args:
        tree: of all prompts.

    Attributes:
        held: by segment, the least recently used first.
        extent: for each segment any of them runs through, how many tokens of a prompt are held up to there.
        through: for each segment, which of them run through it, and up to where.
        blocks: how many there are, those that several share counted once.
    """

    __slots__ = ("_first_block", "blocks", "extent", "held", "through")

    def __init__(self, tree: PromptTree) -> None:
        self._first_block = tree.first_block
        self.held: dict[int, Held] = {}
        self.extent: dict[int, int] = {}
        self.through: dict[int, dict[int, int]] = {}
        self.blocks = 0

    def longest(self, path: Path) -> int:
        """How many tokens of a prompt are held."""
        extent = self.extent
        for segment, end in path:
            found = extent.get(segment)
            if found is not None:
                return min(end, found)
        return 0

    def user_of(self, path: Path) -> Held | None:
        """One of those that the longest held prefix of a prompt is part of: the one used last."""
        for segment, _ in path:
            through = self.through.get(segment)
            if through:
                if segment in self.held:
                    return self.held[segment]
                return max((self.held[tip] for tip in through), key=lambda each: (each.used_s, each.segment))
        return None

    def new_blocks(self, path: Path) -> int:
        """How many blocks of a prefix are not held."""
        n_blocks = 0
        for segment, end in path:
            found = self.extent.get(segment)
            if found is None:
                n_blocks += end // BLOCK_TOKENS - self._first_block[segment]
            elif found < end:
                n_blocks += end // BLOCK_TOKENS - found // BLOCK_TOKENS
        return n_blocks

    def add(self, one: Held) -> list[int]:
        """Hold a prefix; the shorter one of the same segment is part of it. Returns the segments that reach farther."""
        tip, grown = one.segment, []
        self.held.pop(tip, None)
        self.held[tip] = one
        for segment, end in one.path:
            through = self.through.get(segment)
            if through is None:
                self.through[segment] = {tip: end}
                self.extent[segment] = end
                self.blocks += end // BLOCK_TOKENS - self._first_block[segment]
                grown.append(segment)
                continue
            through[tip] = end
            found = self.extent[segment]
            if end > found:
                self.extent[segment] = end
                self.blocks += end // BLOCK_TOKENS - found // BLOCK_TOKENS
                grown.append(segment)
        return grown

    def extend(self, one: Held, path: Path, now_s: float) -> bool:
        """A prefix that is held grows where it ends, to `path`. Returns whether its segment reaches farther by that."""
        segment, n_tokens = path[0]
        one.path = path
        one.tokens = n_tokens
        self.touch(one, now_s)
        self.through[segment][segment] = n_tokens
        before = self.extent[segment]
        if n_tokens <= before:
            return False
        self.extent[segment] = n_tokens
        self.blocks += n_tokens // BLOCK_TOKENS - before // BLOCK_TOKENS
        return True

    def remove(self, tip: int) -> list[int]:
        """Let go of a prefix. Returns the segments that do not reach as far any more."""
        one, shrunk = self.held.pop(tip), []
        for segment, _ in one.path:
            through, before = self.through[segment], self.extent[segment]
            del through[tip]
            after = max(through.values(), default=0)
            if after == before:
                continue
            shrunk.append(segment)
            if through:
                self.extent[segment] = after
                self.blocks -= before // BLOCK_TOKENS - after // BLOCK_TOKENS
            else:
                del self.through[segment], self.extent[segment]
                self.blocks -= before // BLOCK_TOKENS - self._first_block[segment]
        return shrunk

    def touch(self, one: Held, now_s: float) -> None:
        """It was used."""
        one.used_s = now_s
        one.uses += 1
        self.held[one.segment] = self.held.pop(one.segment)

    def size(self, segment: int) -> int:
        """How many blocks of a segment are held."""
        return self.extent[segment] // BLOCK_TOKENS - self._first_block[segment]

    def parts_of(self, path: Path) -> list[Held]:
        """Other prefixes held by themselves that are nothing but the beginning of this one."""
        found = []
        for segment, end in path[1:]:
            one = self.held.get(segment)
            if one is not None and one.tokens <= end:
                found.append(one)
        return found
