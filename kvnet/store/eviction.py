"""Who has to go when room is needed. Pure: a snapshot in, a choice out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvnet.format.hashes import ArtifactHash

HIGH_SHARE: Final = 0.95
LOW_SHARE: Final = 0.9
"""Above the first share of the quota, what was not used for longest goes in the background until the second is kept:
an add then finds room, and need not make it."""

FRESH_S: Final = 60.0
"""What was used within so many seconds is not let go in the background: somebody is about to use it again."""

AHEAD_S: Final = 24 * 3600.0
CLOCK_SET_S: Final = 1_735_689_600.0
"""The beginning of 2025, in seconds since 1970: a clock that shows less was not set yet, and says nothing."""


def too_late_s(now_s: float) -> float:
    """What was used later than this was used by a clock that was ahead: it counts as used now, not for years."""
    return now_s + AHEAD_S if now_s >= CLOCK_SET_S else float("inf")


def surplus_bytes(held_bytes: int, quota_bytes: int) -> int:
    """How much has to go in the background; 0 while no more than `HIGH_SHARE` of the quota is held."""
    if held_bytes <= HIGH_SHARE * quota_bytes:
        return 0
    return int(held_bytes - LOW_SHARE * quota_bytes) + 1


def is_fresh(used_s: float, now_s: float) -> bool:
    """Whether something was used just now; both in seconds since 1970. A use long ahead is a clock that was set."""
    return abs(now_s - used_s) <= FRESH_S


@dataclass(frozen=True, slots=True)
class Candidate:
    """An artifact that may be evicted: not pinned.

    Attributes:
        artifact: its hash.
        last_used_s: when it was last used.
    """

    artifact: ArtifactHash
    last_used_s: float


def choose_victims(
    candidates: Iterable[Candidate],
    pack_users: Mapping[int, frozenset[ArtifactHash]],
    pack_bytes: Mapping[int, int],
    need_bytes: int,
) -> list[ArtifactHash] | None:
    """Artifacts to evict so that at least ``need_bytes`` become free, the least recently used first.

    A pack becomes free when every artifact that uses it has gone, so an artifact whose packs others keep frees
    nothing by itself, and is spared unless its going lets a pack go together with others.

    Args:
        candidates: what may go.
        pack_users: for each pack, the artifacts that use it; a pack that must stay has one that is no candidate.
        pack_bytes: size of each pack.
        need_bytes: what must become free.

    Returns:
        The victims; none when nothing is needed, ``None`` when all candidates together do not free enough.
    """
    count = _Count(pack_users, pack_bytes)
    if count.freed_bytes >= need_bytes:
        return []
    chosen: list[ArtifactHash] = []
    for one in sorted(candidates, key=lambda one: (one.last_used_s, one.artifact)):
        chosen.append(one.artifact)
        count.take(one.artifact)
        if count.freed_bytes >= need_bytes:
            break
    else:
        return None
    # Those that free nothing needed are spared, the most recently used first.
    for artifact in reversed(chosen.copy()):
        count.put_back(artifact)
        if count.freed_bytes >= need_bytes:
            chosen.remove(artifact)
        else:
            count.take(artifact)
    return chosen


class _Count:
    """How much is free once some artifacts have gone; each step costs only the packs of one artifact."""

    def __init__(self, pack_users: Mapping[int, frozenset[ArtifactHash]], pack_bytes: Mapping[int, int]) -> None:
        self.freed_bytes = sum(pack_bytes[pack] for pack, users in pack_users.items() if not users)
        self._pack_bytes = pack_bytes
        self._left = {pack: len(users) for pack, users in pack_users.items()}
        self._packs_of: dict[ArtifactHash, list[int]] = {}
        for pack, users in pack_users.items():
            for artifact in users:
                self._packs_of.setdefault(artifact, []).append(pack)

    def take(self, artifact: ArtifactHash) -> None:
        """The artifact has gone."""
        for pack in self._packs_of.get(artifact, ()):
            self._left[pack] -= 1
            if self._left[pack] == 0:
                self.freed_bytes += self._pack_bytes[pack]

    def put_back(self, artifact: ArtifactHash) -> None:
        """The artifact has not gone after all."""
        for pack in self._packs_of.get(artifact, ()):
            if self._left[pack] == 0:
                self.freed_bytes -= self._pack_bytes[pack]
            self._left[pack] += 1
