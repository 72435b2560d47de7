"""Which peers hold which key: the index of `kvnet.protocol.tables`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvnet.protocol.ids import PeerId
from kvnet.trust.statement_bodies import HeldEntry

PAGE_COST_BYTES = 512
"""What a page costs beside its record, so that many empty ones are no way around the limits."""


@dataclass(slots=True, eq=False)
class Page:
    """One record of a peer's; once it has expired, what is left of it: its sequence."""

    sequence: int
    remember_until_s: float
    expires_s: float
    envelope: bytes
    entries: tuple[HeldEntry, ...]

    @property
    def cost_bytes(self) -> int:
        """What it counts as."""
        return len(self.envelope) + PAGE_COST_BYTES


@dataclass(slots=True, eq=False)
class Table:
    """All pages of one peer in one namespace, as one publisher signed them.

    Attributes:
        newest: highest sequence of them; its addresses count.
        n_artifacts: on all pages.
        expires_s: when the last of its records does, in seconds since 1970.
        heard_s: when a record of it came last, in seconds since 1970.
        cut: that there was no room for all of it.
    """

    namespace: bytes
    peer: PeerId
    signer: bytes
    pages: dict[int, Page] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    newest: int = 0
    cost_bytes: int = 0
    n_artifacts: int = 0
    expires_s: float = 0.0
    heard_s: float = 0.0
    cut: bool = False

    def complete(self, now_s: float) -> bool:
        """Whether it says all that the peer holds: page 0 comes after the others."""
        first = self.pages.get(0)
        return first is not None and first.expires_s > now_s and not self.cut


Held = tuple[Table, Page, HeldEntry]
_Holders = dict[int, dict[bytes, Held]]
"""By table, then by artifact."""


class Index:
    """Who holds a key. Most keys have one holder, and it is kept without dictionaries of its own."""

    def __init__(self) -> None:
        self._of: dict[bytes, Held | _Holders] = {}

    def add(self, held: Held) -> None:
        """An artifact is held."""
        for key in held[2].keys:
            known = self._of.get(key)
            if known is None or (isinstance(known, tuple) and _same(known, held)):
                self._of[key] = held
                continue
            if isinstance(known, tuple):
                known = self._of[key] = {id(known[0]): {known[2].artifact: known}}
            known.setdefault(id(held[0]), {})[held[2].artifact] = held

    def discard(self, held: Held) -> None:
        """It is not, or no longer on that page."""
        table, page, entry = held
        for key in entry.keys:
            known = self._of.get(key)
            if isinstance(known, tuple):
                if known[1] is page and known[2] is entry:
                    del self._of[key]
            elif known is not None:
                group = known.get(id(table), {})
                if entry.artifact in group and group[entry.artifact][1] is page:
                    del group[entry.artifact]
                    if not group:
                        del known[id(table)]
                    if not known:
                        del self._of[key]

    def groups(self, key: bytes) -> Iterable[Collection[Held]]:
        """Those who hold a key, each table's artifacts together."""
        known = self._of.get(key)
        if known is None:
            return ()
        if isinstance(known, tuple):
            return ((known,),)
        return [group.values() for group in known.values()]

    def __len__(self) -> int:
        return len(self._of)


def _same(one: Held, other: Held) -> bool:
    return one[0] is other[0] and one[2].artifact == other[2].artifact
