"""Announce: which keys to tell the DHT about, and when.

A DHT server keeps at most 10 provider records per sender in 10 seconds and drops the rest without a word, records age
out, and a record told to an empty routing table is told to nobody. So one key is announced at a time, at least
`interval_s` apart; what is new comes first, the newest of it before the rest; everything is announced again on a timer
that differs a little from key to key, what is reused most before the rest, and at once after a reconnect; and now and
then a key is looked up again, past any cache, to see whether others would find it.

What became of each key outlives a restart: a driver saves `take_changes` and hands it to `restore` at the next start.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnnounceLimits:
    """The pace.

    Attributes:
        interval_s: least seconds between two announcements; below 1 the DHT drops records.
        reprovide_s: seconds after which a key is announced again.
        spread: part of `reprovide_s` by which a key's timer may be shorter or longer, so that keys which were told
            together are not told together again.
        retry_s: seconds before a key that reached nobody, or was not found again, is announced again.
        verify_s: seconds between two checks; 0 for none.
        rounds_s: least seconds between two rounds begun by peers that come (`peers_came`).
    """

    interval_s: float = 1.2
    reprovide_s: float = 900.0
    retry_s: float = 30.0
    verify_s: float = 60.0
    spread: float = 0.2
    rounds_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AnnounceStatus:
    """How announcing goes.

    Attributes:
        keys: in the table.
        never: of those, never announced with success.
        overdue: of those announced, how many were last announced longer ago than any timer.
        behind_s: seconds it takes to announce all that is due now.
        crowded: more keys than the pace can renew in time, ever.
        announced: announcements that reached somebody.
        failed: announcements that reached nobody.
        alone: times that keys were due and there was nobody to tell.
        verified: checks that found us.
        not_found: checks that did not.
    """

    keys: int
    never: int
    overdue: int
    behind_s: float
    announced: int
    failed: int
    verified: int
    not_found: int
    alone: int = 0
    crowded: bool = False

    @property
    def falling_behind(self) -> bool:
        """Whether keys are late because there are too many; after a night off or a new network they only wait."""
        return self.crowded and self.overdue > 0


@dataclass(frozen=True, slots=True)
class AnnouncedKey:
    """A key and what became of it, to be kept.

    Attributes:
        key: 32 bytes.
        order: higher is newer.
        uses: how often what it names was reused or fetched by others.
        age_s: seconds since it was announced with success; None: never.
    """

    key: bytes
    order: int
    uses: int = 0
    age_s: float | None = None


MAX_USES = 64
"""Uses beyond this count no more: a key that everybody uses must not keep the others back."""


@dataclass(slots=True)
class _Row:
    order: int  # higher is newer
    due: float
    uses: int = 0
    announced: float | None = None
    checked: float | None = None
    in_flight: bool = False


class AnnounceMachine:
    """The table of keys and its timers.

    A driver does this: `restore` what was kept, `add`, `used` and `remove` as the store changes; when `next_deadline()`
    has come call `next_key` and announce what it returns, then `announced`; the same with `next_check` and `checked`;
    `reconnected` when the first peer is back after there was none, `peers_came` when one more is there.

    Args:
        limits: the pace.
    """

    def __init__(self, limits: AnnounceLimits | None = None) -> None:
        self._limits = limits or AnnounceLimits()
        self._rows: dict[bytes, _Row] = {}
        self._history: dict[bytes, AnnouncedKey] = {}
        self._restored_at = 0.0
        self._changed: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._last_round = float("-inf")
        self._wanted_round: float | None = None
        self._count = 0
        self._next_slot = float("-inf")
        self._next_check = float("-inf")
        self._announced = self._failed = self._verified = self._not_found = self._alone = 0

    def restore(self, kept: Iterable[AnnouncedKey], now: float) -> None:
        """What became of keys before: whichever of them is added goes on from there.

        Their records lie where this node was told to be found before, so all of them are due.
        """
        self._restored_at = now
        for each in kept:
            self._history[each.key] = each
            self._count = max(self._count, each.order)

    def forget_unused_history(self) -> list[bytes]:
        """Everything held has been added: what is still only remembered is no more; its keys, to be kept no longer."""
        gone = list(self._history)
        self._history.clear()
        return gone

    def add(self, keys: Iterable[bytes], now: float) -> None:
        """Announce these too; the last is the newest. Keys that are there already keep their timers.

        Args:
            keys: 32 bytes each, under the lookup secret.
            now: the time.
        """
        for key in keys:
            known = self._history.pop(key, None)
            if known is not None:
                announced = None if known.age_s is None else self._restored_at - known.age_s
                self._rows[key] = _Row(known.order, now, known.uses, announced)
                continue
            self._count += 1
            row = self._rows.setdefault(key, _Row(self._count, due=now))
            row.order = self._count
            self._changed.add(key)
            self._removed.discard(key)

    def used(self, keys: Iterable[bytes]) -> None:
        """What these name was reused here, or fetched by somebody: it comes sooner."""
        for key in keys:
            if (row := self._rows.get(key)) is not None and row.uses < MAX_USES:
                row.uses += 1
                self._changed.add(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Announce these no longer. Records told already age out by themselves."""
        for key in keys:
            if self._rows.pop(key, None) is not None:
                self._changed.discard(key)
                self._removed.add(key)

    def clear(self, now: float) -> None:
        """Announce nothing; what is added again goes on from where it was."""
        for kept in self._kept(self._rows, now):
            self._history[kept.key] = kept
        self._restored_at = now
        self._rows.clear()

    def take_changes(self, now: float) -> tuple[list[AnnouncedKey], list[bytes]]:
        """What is to be kept that changed since the last call, and the keys to be kept no longer."""
        changed = self._kept((key for key in self._changed if key in self._rows), now)
        removed = list(self._removed)
        self._changed.clear()
        self._removed.clear()
        return changed, removed

    def _kept(self, keys: Iterable[bytes], now: float) -> list[AnnouncedKey]:
        kept = []
        for key in keys:
            row = self._rows[key]
            kept.append(AnnouncedKey(key, row.order, row.uses, None if row.announced is None else now - row.announced))
        return kept

    def reconnected(self, now: float) -> None:
        """The network is back: everything is due at once."""
        self._last_round = now
        self._wanted_round = None
        for row in self._rows.values():
            row.due = min(row.due, now)

    def peers_came(self, now: float) -> None:
        """One more peer is there, perhaps a server that has lost its records: everything is due again.

        Not more often than `rounds_s` allows: where peers come all the time, later ones wait for the next round.
        """
        if now >= self._last_round + self._limits.rounds_s:
            self.reconnected(now)
        else:
            self._wanted_round = self._last_round + self._limits.rounds_s

    def found_nobody(self) -> None:
        """Keys are due, and there is nobody to tell: they wait. Called once each time that begins."""
        self._alone += 1

    def next_deadline(self) -> float | None:
        """When `next_key` or `next_check` has something to do at the earliest; None when never."""
        waiting = [row.due for row in self._rows.values() if not row.in_flight]
        deadlines = [max(self._next_slot, min(waiting))] if waiting else []
        if self._checkable():
            deadlines.append(self._next_check)
        if self._wanted_round is not None:
            deadlines.append(self._wanted_round)
        return min(deadlines, default=None)

    def next_key(self, now: float) -> bytes | None:
        """The key to announce now, or None. It is in flight until `announced` is called."""
        if self._wanted_round is not None and now >= self._wanted_round:
            self.reconnected(now)
        if now < self._next_slot:
            return None
        due = [(key, row) for key, row in self._rows.items() if row.due <= now and not row.in_flight]
        if not due:
            return None
        key, row = min(due, key=lambda item: self._urgency(item[1]))
        row.in_flight = True
        self._next_slot = now + self._limits.interval_s
        return key

    def announced(self, key: bytes, n_peers: int, now: float, *, jitter: float = 0.5) -> None:
        """What became of an announcement.

        Args:
            key: announced.
            n_peers: how many peers the record was sent to; 0 counts as failed.
            now: the time.
            jitter: a fresh random number from 0 to 1: where in its spread the key's timer lies.
        """
        if n_peers > 0:
            self._announced += 1
        else:
            self._failed += 1
        row = self._rows.get(key)
        if row is None:
            return
        row.in_flight = False
        if n_peers > 0:
            row.announced = now
            row.due = now + self._limits.reprovide_s * (1.0 + self._limits.spread * (2.0 * jitter - 1.0))
            self._changed.add(key)
        else:
            row.due = now + self._limits.retry_s

    def next_check(self, now: float) -> bytes | None:
        """A key to look up past any cache, to see whether we are found, or None; then call `checked`."""
        checkable = self._checkable()
        if now < self._next_check or not checkable:
            return None
        self._next_check = now + self._limits.verify_s
        # The one checked longest ago.
        return min(checkable, key=lambda item: (item[1].checked or float("-inf"), -item[1].order))[0]

    def checked(self, key: bytes, *, found: bool, now: float) -> None:
        """Whether the lookup of a key found this node; a key that was not found is announced again soon."""
        if found:
            self._verified += 1
        else:
            self._not_found += 1
        row = self._rows.get(key)
        if row is not None:
            row.checked = now
            if not found:
                row.due = min(row.due, now + self._limits.retry_s)

    def status(self, now: float) -> AnnounceStatus:
        """How announcing goes."""
        rows = self._rows.values()
        # Later than the longest timer by more than one turn of the pace is no mere waiting for a slot.
        timer_s = self._limits.reprovide_s * (1.0 + self._limits.spread) + 2 * self._limits.interval_s
        overdue = [row for row in rows if row.announced is not None and now > row.announced + timer_s]
        due = sum(1 for row in rows if row.due <= now)
        return AnnounceStatus(
            keys=len(rows),
            never=sum(1 for row in rows if row.announced is None),
            overdue=len(overdue),
            behind_s=due * self._limits.interval_s,
            announced=self._announced,
            failed=self._failed,
            verified=self._verified,
            not_found=self._not_found,
            alone=self._alone,
            crowded=len(rows) * self._limits.interval_s > self._limits.reprovide_s,
        )

    def _checkable(self) -> list[tuple[bytes, _Row]]:
        if self._limits.verify_s <= 0:
            return []
        return [(key, row) for key, row in self._rows.items() if row.announced is not None]

    def _urgency(self, row: _Row) -> tuple[bool, float, int]:
        """Never announced first, the most used and newest of those before the rest; then the one due the longest.

        Uses count as time that a key is overdue, at most one timer's worth, so that none is passed over for ever.
        """
        head_start = self._limits.reprovide_s * row.uses / MAX_USES
        if row.announced is None:
            return (False, -head_start, -row.order)
        return (True, row.due - head_start, -row.order)
