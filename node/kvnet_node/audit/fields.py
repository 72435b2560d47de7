"""Reading fields of JSON whose form nobody promises."""

import datetime as dt
from collections.abc import Mapping
from typing import Any


def text(value: Mapping[str, Any], name: str) -> str:
    """A text; "" when it is none."""
    found = value.get(name)
    return found if isinstance(found, str) else ""


def record(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; an empty one when it is none."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def count(value: Mapping[str, Any], name: str) -> int | None:
    """A count from 0 on; None when it is none."""
    found = value.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 1 << 40 else None


def timestamp_s(value: Any) -> float | None:
    """Seconds since 1970 of an ISO 8601 text or a number of seconds or milliseconds; None when it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value / 1000 if value > 1e11 else float(value)
    if not isinstance(value, str):
        return None
    try:
        moment = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
