"""Live caches: K/V kept in RAM between requests, found again by the tokens it belongs to.

An entry on the shelf is never written to. A request borrows one and gets a private copy, or takes the entry off the
shelf altogether; what it makes of it comes back as a new entry. Arrays on the shelf are evaluated, so that any thread
may read them.

Where every layer is a ``KVCache`` an entry serves each of its prefixes. Other layers (a ring, recurrent state) cannot
be cut: their state is kept at a few *points*, and an entry serves exactly those and its own end.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray

from kvnet.engine.interface import LiveCaches
from kvnet.engine.kv_state import Origin
from kvnet.engine.mlx.caches import copy_rows, with_room
from kvnet.engine.mlx.unfilled import clear_cache
from kvnet.errors import EngineError

MIN_MOVE_BYTES = 16 << 20
"""Smaller entries are copied rather than moved: the copy costs milliseconds, and others can continue from them too."""

MAX_POINTS = 16
"""Points kept of one entry: the first four, where system prompt and tools end, and the newest."""

Points = Mapping[int, Sequence[Any]]
"""Points: token count to the state of the layers that cannot be cut, in layer order."""

TokenArray = NDArray[np.uint32]


def as_token_array(tokens: Sequence[int]) -> TokenArray:
    """Token ids as they are compared: a hundred thousand in microseconds."""
    return np.asarray(tokens, np.uint32)


def common_prefix(first: TokenArray, second: TokenArray) -> int:
    """How many tokens both begin with."""
    n = min(len(first), len(second))
    differs = first[:n] != second[:n]
    position = int(differs.argmax()) if n else 0
    return position if n and differs[position] else n


def cuttable(caches: Sequence[Any]) -> bool:
    """Whether the state of any prefix can be had from these caches; on the exact class, as for an export."""
    return all(type(cache) is KVCache for cache in caches)


def point_of(caches: Sequence[Any]) -> list[Any]:
    """The state, as it is now, of the layers that cannot be cut; evaluated caches.

    Arrays get handles of their own and share memory until one side writes: MLX then copies.
    """
    return [copy.deepcopy(cache) for cache in caches if type(cache) is not KVCache]


def size_of(caches: Sequence[Any]) -> int:
    """Bytes of the buffers, unused rows included."""
    return sum(int(cache.nbytes) for cache in caches)


@dataclass(slots=True, eq=False)
class Entry:
    """K/V of ``tokens``.

    Attributes:
        tokens: the key, from position 0.
        caches: one per layer, evaluated, holding exactly these tokens.
        points: where else than at its end an entry that cannot be cut may be continued.
        origins: artifacts its beginning was restored from.
        system: a system prompt's own entry: kept beside the conversations that begin with it, evicted last.
        used: grows with every use; the smallest was used longest ago.
        borrowers: who reads it at the moment.
    """

    tokens: TokenArray
    caches: list[Any]
    points: Points
    origins: tuple[Origin, ...]
    system: bool
    size_bytes: int
    used: int = 0
    borrowers: int = 0

    def usable(self, n_tokens: int) -> int:
        """The longest prefix of at most ``n_tokens`` tokens that can be continued; 0 when there is none."""
        if cuttable(self.caches):
            return min(n_tokens, len(self.tokens))
        ends = [n for n in (*self.points, len(self.tokens)) if n <= n_tokens]
        return max(ends, default=0)

    def points_to(self, n_tokens: int) -> dict[int, Sequence[Any]]:
        """Points a continuation from ``n_tokens`` has behind it, that one included."""
        kept = {n: state for n, state in self.points.items() if n <= n_tokens}
        if n_tokens == len(self.tokens) and not cuttable(self.caches):
            kept[n_tokens] = point_of(self.caches)
        return kept

    def origins_to(self, n_tokens: int) -> tuple[Origin, ...]:
        """Origins of the first ``n_tokens`` tokens."""
        return tuple(Origin(origin.manifest, min(origin.n_tokens, n_tokens)) for origin in self.origins)


@dataclass(slots=True)
class Shelf:
    """All live caches of the process; every method may be called from any thread.

    Args:
        cap_bytes: most that is kept; 0 keeps nothing.
        min_move_bytes: entries from this size on are moved into a request that continues them, smaller ones copied.
    """

    cap_bytes: int
    min_move_bytes: int = MIN_MOVE_BYTES
    lock: threading.RLock = field(default_factory=threading.RLock)
    epoch: int = 0
    _entries: list[Entry] = field(default_factory=list)
    _clock: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        with self.lock:
            return sum(entry.size_bytes for entry in self._entries)

    def figures(self) -> LiveCaches:
        """How much is held."""
        with self.lock:
            return LiveCaches(len(self._entries), self.size_bytes, self.cap_bytes)

    def covered(self, tokens: Sequence[int]) -> int:
        """Of how many tokens, from the start, K/V is held that can be continued."""
        _, n_tokens = self._longest(as_token_array(tokens), len(tokens))
        return n_tokens

    def borrow(self, tokens: Sequence[int], limit: int) -> "Loan | None":
        """The entry with the longest usable prefix of at most ``limit`` tokens; to be given back or taken."""
        with self.lock:
            entry, n_tokens = self._longest(as_token_array(tokens), limit)
            if entry is None:
                return None
            self._touch(entry)
            entry.borrowers += 1
            return Loan(self, entry, n_tokens)

    def put(
        self,
        tokens: Sequence[int],
        caches: list[Any],
        *,
        points: Points,
        origins: tuple[Origin, ...],
        epoch: int,
        room_bytes: int,
        system: bool = False,
    ) -> int:
        """Keeps evaluated caches, which belong to the shelf from now on; how many tokens it then holds of them.

        Entries that the new one replaces go, then the least recently used, until all fit ``room_bytes`` and the cap.

        Raises:
            EngineError: the caches do not hold exactly these tokens.
        """
        _check_held(caches, len(tokens))
        points = _thinned(points, len(tokens))
        size = size_of(caches) + sum(size_of(state) for state in points.values())
        entry = Entry(as_token_array(tokens), list(caches), points, origins, system, size)
        with self.lock:
            room = min(room_bytes, self.cap_bytes)
            if epoch != self.epoch or not tokens or size > room:
                return 0
            if served := self._serving(entry):
                self._touch(served)
                return len(tokens)
            self._entries = [old for old in self._entries if not _replaces(entry, old)]
            self.reclaim(self.size_bytes + size - room)
            if self.size_bytes + size > room:
                return 0
            self._entries.append(entry)
            self._touch(entry)
            return len(tokens)

    def reclaim(self, size_bytes: int) -> int:
        """Drops entries nobody reads until so many bytes are free; how many that freed."""
        freed = self._evict(size_bytes)
        if freed:
            clear_cache()
        return freed

    def _evict(self, size_bytes: int) -> int:
        freed = 0
        with self.lock:
            idle = [entry for entry in self._entries if not entry.borrowers]
            for entry in sorted(idle, key=lambda entry: (entry.system, entry.used)):
                if freed >= size_bytes:
                    break
                self._entries.remove(entry)
                freed += entry.size_bytes
        return freed

    def drop(self) -> None:
        """Forgets everything, and what running requests would put back."""
        with self.lock:
            self.epoch += 1
            self._entries = []
        clear_cache()

    def _longest(self, tokens: TokenArray, limit: int) -> tuple[Entry | None, int]:
        best, best_tokens = None, 0
        with self.lock:
            for entry in self._entries:
                if len(entry.tokens) <= best_tokens:
                    continue
                n_tokens = entry.usable(min(common_prefix(entry.tokens, tokens), limit))
                if n_tokens > best_tokens:
                    best, best_tokens = entry, n_tokens
        return best, best_tokens

    def _serving(self, entry: Entry) -> Entry | None:
        """An entry that already serves all of this one and more."""
        longer = (old for old in self._entries if len(old.tokens) > len(entry.tokens))
        return None if entry.system else next((old for old in longer if _replaces(old, entry)), None)

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock


@dataclass(slots=True)
class Loan:
    """An entry somebody reads, of which the first ``n_tokens`` tokens are wanted. Give it back, once."""

    shelf: Shelf
    entry: Entry
    n_tokens: int
    _returned: bool = False

    @property
    def alone(self) -> bool:
        """Whether nobody else reads the entry."""
        with self.shelf.lock:
            return self.entry.borrowers == 1

    @property
    def continues(self) -> bool:
        """Whether all of the entry is wanted."""
        return self.n_tokens == len(self.entry.tokens)

    def give_back(self) -> None:
        """Ends the loan; nothing happens the second time."""
        with self.shelf.lock:
            if not self._returned:
                self._returned = True
                self.entry.borrowers -= 1

    def copied(self, capacity_tokens: int) -> list[Any]:
        """Private, evaluated caches of the wanted tokens with room for ``capacity_tokens``; ends the loan."""
        try:
            others = iter(self._others())
            return [
                copy_rows(cache, self.n_tokens, capacity_tokens) if type(cache) is KVCache else next(others)
                for cache in self.entry.caches
            ]
        finally:
            self.give_back()

    def moved(self, capacity_tokens: int) -> list[Any]:
        """The entry's own caches, cut to the wanted tokens, with room; the entry leaves the shelf, the loan ends."""
        with self.shelf.lock:
            if self.entry in self.shelf._entries:
                self.shelf._entries.remove(self.entry)
        others = iter(self._others())
        caches = [cache if type(cache) is KVCache else next(others) for cache in self.entry.caches]
        self.entry.caches = []
        self.give_back()
        for cache in caches:
            if type(cache) is KVCache:
                cache.offset = self.n_tokens
                with_room(cache, capacity_tokens)
        return caches

    def _others(self) -> list[Any]:
        if self.continues:
            return point_of(self.entry.caches)
        return copy.deepcopy(list(self.entry.points.get(self.n_tokens, ())))


def _check_held(caches: Sequence[Any], n_tokens: int) -> None:
    for layer, cache in enumerate(caches):
        offset = getattr(cache, "offset", n_tokens)
        if type(cache) is KVCache and offset != n_tokens:
            raise EngineError(f"layer {layer}: expected K/V of {n_tokens} tokens, found {offset}")


def _thinned(points: Points, n_tokens: int) -> dict[int, Sequence[Any]]:
    inside = sorted(n for n in points if n < n_tokens)
    if len(inside) > MAX_POINTS:
        inside = inside[:4] + inside[4 - MAX_POINTS :]
    return {n: points[n] for n in inside}


def _replaces(new: Entry, old: Entry) -> bool:
    """Whether ``new`` serves everything ``old`` does; a system prompt's own entry outlives conversations."""
    if old.borrowers or (old.system and not new.system):
        return False
    if common_prefix(new.tokens, old.tokens) != len(old.tokens):
        return False
    ends = () if cuttable(old.caches) else (*old.points, len(old.tokens))
    return all(new.usable(n) == n for n in ends)
