"""Who is there when: joins, departures, sleeping laptops and crashes, as data for the world."""

from enum import IntEnum
from typing import NamedTuple


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
