"""How members that are away are spoken of; read by commands that load nothing to do the work with."""

from collections.abc import Iterable

from kvnet.errors import elsewhere
from kvnet_node.output import format_seconds

MAX_AWAY = 5
"""Members that are named when it is said who is away."""


def last_seen(name: str, seen_s: float, now_s: float) -> str:
    """A member, and how long ago it was connected.

    Args:
        name: what it is called.
        seen_s: when it was, in seconds since 1970; 0 when that is not known.
        now_s: in seconds since 1970.
    """
    return f"{name} (seen {format_seconds(max(0.0, now_s - seen_s))} ago)" if seen_s else name


def away_text(members: Iterable[tuple[str, float]], now_s: float) -> str:
    """Who of the members is away, whoever was seen last first, and what brings one back.

    Args:
        members: what each is called, and when it was connected last, in seconds since 1970, or 0.
        now_s: in seconds since 1970.
    """
    listed = sorted(members, key=lambda each: -each[1])
    named = ", ".join(last_seen(name, seen_s, now_s) for name, seen_s in listed[:MAX_AWAY])
    more = f" and {len(listed) - MAX_AWAY} more" if len(listed) > MAX_AWAY else ""
    where = "it" if len(listed) == 1 else "one of them"
    return (
        f"no peers connected; away: {named}{more}: {elsewhere('kvnet node start')} on {where}; "
        "where a node runs already, kvnet doctor --network says more"
    )
