"""Announce: which keys to tell the DHT about, and when.

A DHT server keeps at most 10 provider records per sender in 10 seconds and drops the rest without a word, records age
out, and a record told to an empty routing table is told to nobody. So one key is announced at a time, at least
`interval_s` apart; what is new comes first, the newest of it before the rest; everything is announced again on a plain
timer, and at once after a reconnect; and now and then a key is looked up again, past any cache, to see whether others
would find it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnnounceLimits:
    """The pace.

    Attributes:
        interval_s: least seconds between two announcements; below 1 the DHT drops records.
        reprovide_s: seconds after which a key is announced again.
        retry_s: seconds before a key that reached nobody, or was not found again, is announced again.
        verify_s: seconds between two checks; 0 for none.
    """

    interval_s: float = 1.2
    reprovide_s: float = 900.0
    retry_s: float = 30.0
    verify_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AnnounceStatus:
    """How announcing goes.

    Attributes:
        keys: in the table.
        never: of those, never announced with success.
        overdue: of those announced, how many are later than their timer.
        behind_s: seconds it takes to announce all that is due now.
        announced: announcements that reached somebody.
        failed: announcements that reached nobody.
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

    @property
    def falling_behind(self) -> bool:
        """Whether more is due than the pace allows before it ages."""
        return self.overdue > 0


@dataclass(slots=True)
class _Row:
    order: int  # higher is newer
    due: float
    announced: float | None = None
    checked: float | None = None
    in_flight: bool = False


class AnnounceMachine:
    """The table of keys and its timers.

    A driver does this: `add` and `remove` as the store changes; when `next_deadline()` has come call `next_key` and
    announce what it returns, then `announced`; the same with `next_check` and `checked`; `reconnected` when the first
    peer is back after there was none.

    Args:
        limits: the pace.
    """

    def __init__(self, limits: AnnounceLimits | None = None) -> None:
        self._limits = limits or AnnounceLimits()
        self._rows: dict[bytes, _Row] = {}
        self._count = 0
        self._next_slot = float("-inf")
        self._next_check = float("-inf")
        self._announced = self._failed = self._verified = self._not_found = 0

    def add(self, keys: Iterable[bytes], now: float) -> None:
        """Announce these too; the last is the newest. Keys that are there already keep their timers.

        Args:
            keys: 32 bytes each, under the lookup secret.
            now: the time.
        """
        for key in keys:
            self._count += 1
            row = self._rows.setdefault(key, _Row(self._count, due=now))
            row.order = self._count

    def remove(self, keys: Iterable[bytes]) -> None:
        """Announce these no longer. Records told already age out by themselves."""
        for key in keys:
            self._rows.pop(key, None)

    def reconnected(self, now: float) -> None:
        """The network is back: everything is due at once."""
        for row in self._rows.values():
            row.due = min(row.due, now)

    def next_deadline(self) -> float | None:
        """When `next_key` or `next_check` has something to do at the earliest; None when never."""
        waiting = [row.due for row in self._rows.values() if not row.in_flight]
        deadlines = [max(self._next_slot, min(waiting))] if waiting else []
        if self._checkable():
            deadlines.append(self._next_check)
        return min(deadlines, default=None)

    def next_key(self, now: float) -> bytes | None:
        """The key to announce now, or None. It is in flight until `announced` is called."""
        if now < self._next_slot:
            return None
        due = [(key, row) for key, row in self._rows.items() if row.due <= now and not row.in_flight]
        if not due:
            return None
        key, row = min(due, key=lambda item: _urgency(item[1]))
        row.in_flight = True
        self._next_slot = now + self._limits.interval_s
        return key

    def announced(self, key: bytes, n_peers: int, now: float) -> None:
        """What became of an announcement.

        Args:
            key: announced.
            n_peers: how many peers the record was sent to; 0 counts as failed.
            now: the time.
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
            row.due = now + self._limits.reprovide_s
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
        # Later than its timer by more than one round of the pace is no mere waiting for a slot.
        overdue = [row for row in rows if row.announced is not None and now > row.due + 2 * self._limits.interval_s]
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
        )

    def _checkable(self) -> list[tuple[bytes, _Row]]:
        if self._limits.verify_s <= 0:
            return []
        return [(key, row) for key, row in self._rows.items() if row.announced is not None]


def _urgency(row: _Row) -> tuple[bool, float, int]:
    """Never announced first, the newest of those before the rest; then the one due the longest."""
    if row.announced is None:
        return (False, 0.0, -row.order)
    return (True, row.due, -row.order)
