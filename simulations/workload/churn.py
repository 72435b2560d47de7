"""Who is there when: joins, departures, sleeping laptops and crashes, as data for the world."""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from simulations.scenario import Churn, Scenario
from simulations.workload.requests import Floats, RequestStream
from simulations.workload.sampling import DAY_S, EVENING_S, HOUR_S, MORNING_S

_SQUEEZED: Final = 1e-6
"""Requests that waited come so many times as close together as they were meant to, in their order."""


class Change(IntEnum):
    """What happens to a node; the order is that of changes at the same time."""

    JOIN = 0
    """It comes for the first time, with an empty store."""
    WAKE = 1
    """It is back with all it had: on disk, and in RAM where it only slept."""
    SLEEP = 2
    """It is gone without a word and keeps RAM and disk."""
    CRASH = 3
    """It is gone without a word and keeps its disk alone."""
    LEAVE = 4
    """It says goodbye and does not come back."""


class PresenceChange(NamedTuple):
    """One change of one node.

    Attributes:
        at_s: seconds from the beginning of the run.
        kind: what happens.
        node: to which.
    """

    at_s: float
    kind: Change
    node: int


class Absence(NamedTuple):
    """A node that is a member is away for a while."""

    begin_s: float
    end_s: float
    kind: Change


@dataclass(frozen=True, slots=True)
class Presence:
    """Who is there when.

    Attributes:
        join_s: of each node, when it comes first.
        leave_s: when it leaves for good; infinite for never.
        absences: of each node, in order and apart.
    """

    join_s: Floats
    leave_s: Floats
    absences: tuple[tuple[Absence, ...], ...]

    @property
    def changes(self) -> tuple[PresenceChange, ...]:
        """All changes in order."""
        found = [PresenceChange(at_s, Change.JOIN, node) for node, at_s in enumerate(self.join_s.tolist())]
        found += [
            PresenceChange(at_s, Change.LEAVE, node)
            for node, at_s in enumerate(self.leave_s.tolist())
            if at_s != math.inf
        ]
        for node, absences in enumerate(self.absences):
            for absence in absences:
                found.append(PresenceChange(absence.begin_s, absence.kind, node))
                found.append(PresenceChange(absence.end_s, Change.WAKE, node))
        return tuple(sorted(found))

    def fit(self, stream: RequestStream, rng: np.random.Generator) -> RequestStream:
        """The stream with each request at a node that is there.

        What would be asked of a node that has not come yet, or has left, is asked of another one that stays all the
        time, as people do who use another machine. What would be asked while a machine is away is asked when it is
        back, in the same order: nobody asks a closed laptop.
        """
        node, at_s = stream.node.copy(), stream.arrival_s.copy()
        never_left = np.flatnonzero((self.join_s == 0) & (self.leave_s == math.inf))
        others = never_left[rng.integers(len(never_left), size=stream.n_nodes)] if len(never_left) else None
        gone = (at_s < self.join_s[node]) | (at_s >= self.leave_s[node])
        if others is not None:
            node[gone] = others[node[gone]]
            kept = np.ones(len(stream), dtype=bool)
        else:
            kept = ~gone
        by_node = np.argsort(node, kind="stable")
        ends = np.searchsorted(node[by_node], np.arange(stream.n_nodes + 1))
        for number, absences in enumerate(self.absences):
            mine = by_node[ends[number] : ends[number + 1]]
            for absence in absences:
                left, right = np.searchsorted(at_s[mine], (absence.begin_s, absence.end_s))
                away = mine[left:right]
                later_s = float(at_s[mine[right]]) if right < len(mine) else math.inf
                room = (later_s - absence.end_s) / (absence.end_s - absence.begin_s)
                at_s[away] = absence.end_s + (at_s[away] - absence.begin_s) * min(_SQUEEZED, room)
        order = np.flatnonzero(kept)[np.argsort(at_s[kept], kind="stable")]
        return stream.rearranged(order, at_s, node)


def schedule(scenario: Scenario, duration_s: float, rng: np.random.Generator) -> Presence:
    """Who is there when, as a scenario's `churn` has it.

    Args:
        scenario: the scenario.
        duration_s: until the last request.
        rng: what it is drawn with.
    """
    churn, n_nodes = scenario.churn, scenario.n_nodes
    late = rng.random(n_nodes) < churn.late
    leaving = rng.random(n_nodes) < churn.leave
    join_s = np.where(late, rng.random(n_nodes) * duration_s, 0.0)
    leave_s = np.where(leaving, join_s + rng.random(n_nodes) * (duration_s - join_s), math.inf)
    laptops = np.repeat([group.laptop for group in scenario.machines], [group.count for group in scenario.machines])
    absences = []
    for node in range(n_nodes):
        drawn = _crashes(churn, duration_s, rng)
        if laptops[node]:
            drawn += _sleeps(churn, duration_s, rng)
        absences.append(_apart(drawn, float(join_s[node]), min(float(leave_s[node]), duration_s)))
    return Presence(join_s, leave_s, tuple(absences))


def _crashes(churn: Churn, duration_s: float, rng: np.random.Generator) -> list[Absence]:
    count = int(rng.poisson(churn.crashes_a_day * duration_s / DAY_S))
    begins = rng.random(count) * duration_s
    lengths = rng.exponential(churn.down_s, count)
    return [
        Absence(begin_s, begin_s + length_s, Change.CRASH)
        for begin_s, length_s in zip(begins.tolist(), lengths.tolist(), strict=True)
    ]


def _sleeps(churn: Churn, duration_s: float, rng: np.random.Generator) -> list[Absence]:
    n_days = math.ceil(duration_s / DAY_S)
    found = []
    for day in range(n_days):
        midnight_s = day * DAY_S
        count = int(rng.poisson(churn.sleeps_a_day))
        begins = midnight_s + MORNING_S + rng.random(count) * (EVENING_S - MORNING_S)
        lengths = rng.exponential(churn.asleep_s, count)
        found += [
            Absence(begin_s, begin_s + length_s, Change.SLEEP)
            for begin_s, length_s in zip(begins.tolist(), lengths.tolist(), strict=True)
        ]
        if churn.nights:
            # Opened and closed within an hour of the usual time, so that a thousand laptops do not come at once.
            opened_s, closed_s = ((rng.random(2) - 0.5) * HOUR_S).tolist()
            found.append(Absence(midnight_s, midnight_s + MORNING_S + opened_s, Change.SLEEP))
            found.append(Absence(midnight_s + EVENING_S + closed_s, midnight_s + DAY_S, Change.SLEEP))
    return found


def _apart(drawn: list[Absence], join_s: float, leave_s: float) -> tuple[Absence, ...]:
    """Absences of one node in order, those that overlap or touch as one, within its membership.

    One that began with a crash, or had one in it, keeps the disk alone.
    """
    kept: list[Absence] = []
    for absence in sorted(drawn):
        if absence.begin_s < join_s or absence.end_s >= leave_s:
            continue
        if kept and absence.begin_s <= kept[-1].end_s:
            last = kept.pop()
            end_s, kind = max(last.end_s, absence.end_s), max(last.kind, absence.kind)
            absence = Absence(last.begin_s, end_s, kind)  # noqa: PLW2901 - the two together
        kept.append(absence)
    return tuple(kept)
