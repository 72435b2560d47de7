"""Keeping a store within its bounds: making room for those who add, and garbage collection when nobody waits."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvnet.errors import StoreFullError
from kvnet.format.hashes import ArtifactHash
from kvnet.store.compacting import Compacting
from kvnet.store.eviction import is_fresh, too_late_s
from kvnet.store.failures import storage_errors
from kvnet.store.interface import Collected
from kvnet.store.opening import Parts
from kvnet.store.placing import MAX_LOG_BYTES
from kvnet.store.presence import Gate
from kvnet.store.removing import Removing

_log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_PACKS = 64
"""Packs looked at under one hold of the lock: a few thousand chunks."""


class Collector:
    """Lets go of what has to go. The store's lock is held for one artifact or pack at a time, and never over a file.

    Args:
        gate: the store's lock.
        parts: the open store.
        now: seconds since 1970.

    Attributes:
        removing: how artifacts and packs go.
        compacting: how packs are written anew.
    """

    def __init__(self, gate: Gate, parts: Parts, now: Callable[[], float]) -> None:
        self._gate = gate
        self._parts = parts
        self._now = now
        self.removing = Removing(gate, parts)
        self.compacting = Compacting(gate, parts)

    # --- room for somebody who waits ----------------------------------------------------------------------------------

    def with_room(self, need_bytes: int, then: Callable[[], T]) -> T:
        """Make room, and do what needs it, under the lock, before anybody else can take it.

        Only when nothing else helps are packs written anew for it.

        Raises:
            StoreFullError: it does not fit; when that is known beforehand, nothing is evicted.
            StoreError: the disk failed.
        """
        while True:
            with self._gate:
                if self._parts.space.lack(need_bytes) <= 0:
                    return then()
            try:
                self.make_room(need_bytes)
            except StoreFullError:
                if not self.compacting.run():
                    raise

    def make_room(self, need_bytes: int) -> list[ArtifactHash]:
        """Let go of what may go until so many more bytes fit; returns the artifacts that were evicted.

        Raises:
            StoreFullError: they cannot; when that is known beforehand, nothing is evicted.
            StoreError: the disk failed.
        """
        if self._lack(need_bytes) <= 0:
            return []
        self.removing.collect()
        with self._gate:
            self._parts.index.checkpoint()
            lack = self._parts.space.lack(need_bytes)
            if lack <= 0:
                return []
            victims = self._parts.space.victims_for(need_bytes, lack)
            partials = self._parts.partials.take_oldest(lack)
        self.removing.remove_partials(partials)
        evicted = [artifact for artifact in victims if self.removing.evict(artifact)]
        with self._gate:
            self._parts.index.checkpoint()
            if self._parts.space.lack(need_bytes) > 0:
                raise self._parts.space.full(need_bytes)
        if evicted:
            _log.info("store: %d artifacts evicted to make room", len(evicted))
        return evicted

    def _lack(self, need_bytes: int) -> int:
        with self._gate:
            return self._parts.space.lack(need_bytes)

    # --- while nobody waits -------------------------------------------------------------------------------------------

    def compact(self) -> int:
        """See the store's interface."""
        with self._gate:
            before = self._parts.index.pack_bytes()
        self.compacting.run()
        with self._gate:
            return max(0, before - self._parts.index.pack_bytes())

    def collect_garbage(self, *, everything: bool) -> Collected:
        """See the store's interface."""
        with self._gate:
            before = self._parts.space.held_bytes()
            unpinned = [artifact for artifact, _ in self._parts.index.unpinned()] if everything else []
        removed = self._let_go(unpinned, also_fresh=True)
        self.removing.collect()
        self._empty_quarantine()
        self._remove_expired(float("inf") if everything else self._now())
        self.compacting.run()
        removed += self.make_room(0)
        return self._collected(removed, before)

    def tidy(self, *, unused_s: float) -> Collected:
        """See the store's interface."""
        now_s = self._now()
        with self._gate:
            before = self._parts.space.held_bytes()
            self._parts.index.correct_uses(too_late_s(now_s), now_s)
            expired = self._parts.space.unused_since(now_s - unused_s)
        self._remove_expired(now_s)
        removed = self._let_go(expired)
        self.compacting.run()
        removed += self._let_go(self._surplus())
        return self._collected(removed, before)

    def _surplus(self) -> list[ArtifactHash]:
        """What has to go above the upper mark; looked up in steps, since with many chunks it takes long.

        What has changed meanwhile is looked at again before each of them goes.
        """
        space, index = self._parts.space, self._parts.index
        with self._gate:
            lack_bytes = space.surplus_bytes()
            if not lack_bytes:
                return []
            packs = index.packs()
        ids = sorted(pack.id for pack in packs)
        users: list[tuple[int, ArtifactHash]] = []
        for start in range(0, len(ids), STEP_PACKS):
            some = ids[start : start + STEP_PACKS]
            self._gate.give_way()
            with self._gate:
                users += index.pack_users(some[0], some[-1])
        with self._gate:
            choose = space.choice(packs, users)
        # When all together would not suffice, what is pinned is the reason, and nothing else pays for it.
        return choose(lack_bytes) or []

    def _collected(self, removed: Sequence[ArtifactHash], before_bytes: int) -> Collected:
        with self._gate:
            if self._may_empty_log():
                self._parts.index.checkpoint()
            return Collected(tuple(removed), max(0, before_bytes - self._parts.space.held_bytes()))

    def _may_empty_log(self) -> bool:
        """Whether the index's log may be emptied, which waits for the medium under the lock.

        Whoever fills a pack comes for the lock at any moment, and empties a long log itself when the pack is placed.
        """
        filling = self._parts.space.leases and self._parts.index.log_bytes() <= MAX_LOG_BYTES
        return not (self._gate.waiting or filling)

    def _let_go(self, victims: Sequence[ArtifactHash], *, also_fresh: bool = False) -> list[ArtifactHash]:
        """Evict, one after the other; whoever wants the store meanwhile comes first."""
        removed = []
        for artifact in victims:
            self._gate.give_way()
            if self.removing.evict(
                artifact, spare=lambda row: not also_fresh and is_fresh(row.last_used_s, self._now())
            ):
                removed.append(artifact)
        if removed:
            _log.info("store: %d artifacts let go", len(removed))
        return removed

    def _remove_expired(self, now_s: float) -> None:
        with self._gate:
            expired = self._parts.partials.take_expired(now_s)
        self.removing.remove_partials(expired)

    def _empty_quarantine(self) -> None:
        """Remove what was set aside; it was reported when that happened."""
        freed_bytes = 0
        with storage_errors("emptying the quarantine"):
            for path in self._parts.paths.quarantine.iterdir():
                if path.is_file() or path.is_symlink():
                    freed_bytes += 0 if path.is_symlink() else path.lstat().st_size
                    self._parts.files.unlink(path)
        self._gate.while_away(lambda: self._parts.space.gone(freed_bytes))
