"""Who has to go when room is needed. Pure: a snapshot in, a choice out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvnet.format.hashes import ArtifactHash


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
    if need_bytes <= 0:
        return []
    order = [one.artifact for one in sorted(candidates, key=lambda one: (one.last_used_s, one.artifact))]
    chosen: list[ArtifactHash] = []
    for artifact in order:
        chosen.append(artifact)
        if _freed(frozenset(chosen), pack_users, pack_bytes) >= need_bytes:
            return _spared(chosen, pack_users, pack_bytes, need_bytes)
    return None


def _freed(
    gone: frozenset[ArtifactHash], pack_users: Mapping[int, frozenset[ArtifactHash]], pack_bytes: Mapping[int, int]
) -> int:
    return sum(pack_bytes[pack] for pack, users in pack_users.items() if users <= gone)


def _spared(
    chosen: list[ArtifactHash],
    pack_users: Mapping[int, frozenset[ArtifactHash]],
    pack_bytes: Mapping[int, int],
    need_bytes: int,
) -> list[ArtifactHash]:
    """Without those that free nothing needed; the most recently used is spared first."""
    kept = list(chosen)
    for artifact in reversed(chosen):
        fewer = frozenset(kept) - {artifact}
        if _freed(fewer, pack_users, pack_bytes) >= need_bytes:
            kept.remove(artifact)
    return kept
