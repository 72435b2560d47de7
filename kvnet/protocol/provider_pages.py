"""What this node tells the members of one namespace that it holds: pages of artifacts, each signed as one record.

An artifact stays on the page it was put on, so that adding or removing one changes one page. Page 0 is there even of a
node that holds nothing, because it carries the addresses. A page that has become empty is told once more, empty, and
outlives whatever it said before; after that it is told no longer.

Pure: the driver brings the time and the random numbers, signs what `record` returns, and tells it.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvnet.format.hashes import LookupKey, NamespaceId, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import checkpoints
from kvnet.protocol.ids import PeerId
from kvnet.trust.namespace import Namespace
from kvnet.trust.statement_bodies import MAX_ADDRESSES, MAX_PAGES, PAGE_ARTIFACTS, HeldEntry, ProviderRecord
from kvnet.trust.statements import CLOCK_SKEW_S, MAX_PROVIDER_LIFE_S, next_sequence
from kvnet.trust.withheld import NO_REVOCATIONS, Extent


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How often pages are told.

    Attributes:
        renew_s: seconds after which a page that has not changed is told again, less up to a quarter.
        changes_s: seconds that changes wait for others, so that one page is not signed for each of them.
        pages_at_once: pages signed in one go; signing one takes about 0.2 ms.
    """

    renew_s: float = 900.0
    changes_s: float = 0.05
    pages_at_once: int = 32

    @property
    def period_s(self) -> float:
        """Longest time between two records of a page: a third of the longest life, clocks that differ allowed for."""
        return min(self.renew_s, (MAX_PROVIDER_LIFE_S - CLOCK_SKEW_S) / 3)

    @property
    def life_s(self) -> int:
        """Seconds for which a record counts: two lost renewals and clocks that differ make nobody forgotten."""
        return int(3 * self.period_s) + CLOCK_SKEW_S


@dataclass(slots=True)
class _Page:
    entries: dict[LookupKey, HeldEntry] = field(default_factory=dict)
    sequence: int = 0
    renew_at: float = float("inf")


@dataclass(frozen=True, slots=True)
class Telling:
    """Who tells.

    Attributes:
        namespace: id of the namespace.
        peer: this node.
        addresses: where it is reached.
        revocations: of this node's key in the namespace.
    """

    namespace: NamespaceId
    peer: PeerId
    addresses: Sequence[str]
    revocations: Extent = NO_REVOCATIONS


def held_entry(namespace: Namespace, artifact: LookupKey, manifest: Manifest, keys: Sequence[PrefixKey]) -> HeldEntry:
    """What a record says of one artifact.

    Args:
        namespace: the artifact's; its lookup secret keys everything.
        artifact: the artifact's name under that secret.
        manifest: the artifact's.
        keys: its prefix key of each block, as far as they are known.
    """
    counts = [count for count in checkpoints(manifest.n_tokens) if count <= len(keys)]
    return HeldEntry(
        artifact=bytes(artifact),
        n_tokens=manifest.n_tokens,
        codec=manifest.codec.value,
        size_bytes=manifest.total_size_bytes,
        keys=tuple(bytes(namespace.lookup_key(keys[count - 1])) for count in counts),
    )


class OwnPages:
    """The pages of this node in one namespace.

    A driver does this: `hold` and `drop` as the store changes, `moved` when its addresses have, `shown` when a peer
    has a page of this node that it did not sign in this life; when `next_due` has come, sign and tell a `record` of
    every page that `due` names. `now` is any clock that does not go backwards, in seconds.

    Args:
        limits: how often.
    """

    def __init__(self, limits: PageLimits | None = None) -> None:
        self._limits = limits or PageLimits()
        self._pages: dict[int, _Page] = {0: _Page()}
        self._page_of: dict[LookupKey, int] = {}
        self._room: list[int] = [0]
        self._changed: dict[int, None] = {0: None}
        self._told_at = float("-inf")
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._page_of)

    def hold(self, name: LookupKey, entry: HeldEntry) -> None:
        """Tell of an artifact; where all pages are full, the one held longest is told of no longer."""
        page = self._page_of.get(name)
        if page is None:
            page = self._page_with_room()
            self._page_of[name] = page
        if self._pages[page].entries.get(name) != entry:
            self._pages[page].entries[name] = entry
            self._changed[page] = None

    def drop(self, name: LookupKey) -> None:
        """Tell of an artifact no longer."""
        page = self._page_of.pop(name, None)
        if page is not None:
            del self._pages[page].entries[name]
            heapq.heappush(self._room, page)
            self._changed[page] = None

    def replace(self, entries: Iterable[tuple[LookupKey, HeldEntry]]) -> None:
        """Tell of these and of nothing else; what stays keeps its page."""
        wanted = dict(entries)
        for name in self._page_of.keys() - wanted.keys():
            self.drop(name)
        for name, entry in wanted.items():
            self.hold(name, entry)

    def moved(self) -> None:
        """The addresses have changed, or everybody should hear of this node anew."""
        self._changed[0] = None

    def shown(self, page: int, sequence: int) -> None:
        """Somebody has a page of this node's from an earlier life, or of a clock that was ahead: it is outranked.

        Args:
            page: its number.
            sequence: its sequence.
        """
        known = self._pages.setdefault(page, _Page())
        if sequence > known.sequence:
            known.sequence = sequence
            heapq.heappush(self._room, page)
            self._changed[page] = None

    def next_due(self) -> float:
        """When `due` has something."""
        if self._changed:
            return self._told_at + self._limits.changes_s
        return min(page.renew_at for page in self._pages.values())

    def due(self, now: float) -> list[int]:
        """Pages to sign and tell now, changed ones first; page 0 comes after the others that have changed with it."""
        if now < self.next_due():
            return []
        changed = sorted(self._changed, reverse=True)
        late = [number for number, page in self._pages.items() if page.renew_at <= now]
        return list(dict.fromkeys([*changed, *late]))[: self._limits.pages_at_once]

    def record(self, number: int, who: Telling, now: float, now_s: float, jitter: float) -> ProviderRecord:
        """What to sign for a page; it counts as told.

        Args:
            number: of the page, one of `due`.
            who: tells it.
            now: the time.
            now_s: seconds since 1970.
            jitter: a fresh random number from 0 to 1: pages told together are not renewed together.
        """
        limits, page = self._limits, self._pages[number]
        # From when this clock was ahead: nobody whose clock is right has taken that, nor takes what comes after it.
        ahead = page.sequence > (now_s + CLOCK_SKEW_S) * 1000
        page.sequence = next_sequence(now_s, 0 if ahead else page.sequence)
        self._changed.pop(number, None)
        self._told_at = now
        gone = number > 0 and not page.entries
        # What it says is gone must not come back from a record that outlives this one.
        life_s = MAX_PROVIDER_LIFE_S if gone else limits.life_s
        page.renew_at = float("inf") if gone else now + limits.period_s * (1.0 - jitter / 4)
        return ProviderRecord(
            sequence=page.sequence,
            issued=int(now_s),
            expires=int(now_s) + life_s,
            namespace=bytes(who.namespace),
            peer=bytes(who.peer),
            addresses=tuple(who.addresses[:MAX_ADDRESSES]),
            page=number,
            entries=tuple(page.entries.values()),
            revocations=who.revocations.latest,
            n_revocations=who.revocations.number,
        )

    def _page_with_room(self) -> int:
        """The first page that takes one more."""
        while self._room:
            if len(self._pages[self._room[0]].entries) < PAGE_ARTIFACTS:
                return self._room[0]
            heapq.heappop(self._room)
        number = next((number for number in range(len(self._pages), MAX_PAGES) if number not in self._pages), None)
        if number is None:
            self.left_out += 1
            self.drop(next(iter(self._page_of)))
            return self._page_with_room()
        self._pages[number] = _Page()
        self._room.append(number)
        return number
