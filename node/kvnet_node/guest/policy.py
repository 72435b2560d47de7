"""What a node does for others, decided in one place from how the machine is. Pure: no clock, file or process."""

import re
from dataclasses import dataclass
from enum import StrEnum

from kvnet.errors import UsageError

LINGER_S = 20.0
"""Seconds after the last upload before the machine may sleep again: chunk requests come one after the other."""

MAX_PAUSE_S = 366 * 24 * 3600.0
"""The longest pause with an end."""

_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?")


class Why(StrEnum):
    """Why nothing is served; the text is what people see."""

    NOTHING = ""
    PAUSED = "paused"
    BATTERY = "on battery"
    METERED = "on a metered link"


@dataclass(frozen=True, slots=True)
class Situation:
    """How the machine is.

    Attributes:
        on_battery: it runs on battery; None when nobody can say, as on a machine without one.
        metered: its link is metered; None when nobody can say.
        paused: its owner said so.
        serve_on_battery: the owner's setting: serve on battery too.
    """

    on_battery: bool | None = None
    metered: bool | None = None
    paused: bool = False
    serve_on_battery: bool = False


@dataclass(frozen=True, slots=True)
class Conduct:
    """What a node does.

    Attributes:
        serve: peers get what they ask for, and are told what is held.
        replicate: things are fetched that nobody here has asked for.
        why: nothing is served; empty when it is.
    """

    serve: bool
    replicate: bool
    why: Why = Why.NOTHING


def conduct(situation: Situation) -> Conduct:
    """What a node does in a situation. What its owner asks for goes on in every one."""
    if situation.paused:
        why = Why.PAUSED
    elif situation.on_battery and not situation.serve_on_battery:
        why = Why.BATTERY
    elif situation.metered:
        why = Why.METERED
    else:
        return Conduct(serve=True, replicate=True)
    # A pause is about serving alone: nobody's battery or tariff is spared by it.
    spared = bool(situation.metered or (situation.on_battery and not situation.serve_on_battery))
    return Conduct(serve=False, replicate=not spared, why=why)


def keep_awake(*, uploading: bool, idle_s: float, on_battery: bool | None) -> bool:
    """Whether the machine is kept from sleeping: for an upload, on mains.

    Args:
        uploading: chunks are on their way now.
        idle_s: seconds since they last were.
        on_battery: None, where nobody can say, counts as mains: a machine without battery has no other.
    """
    return not on_battery and (uploading or idle_s < LINGER_S)


def parse_duration_s(text: str) -> float:
    """Seconds of a text such as ``90s``, ``30m``, ``1h30m`` or ``2d``.

    Raises:
        UsageError: anything else, nothing at all, or more than a year.
    """
    match = _DURATION.fullmatch(text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total_s = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not 0 < total_s <= MAX_PAUSE_S:
        raise UsageError(f"expected a time such as 30m, 1h or 2d, at most 366d, found {text[:32]!r}")
    return total_s
