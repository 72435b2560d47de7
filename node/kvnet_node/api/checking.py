"""Parts of a request checked against what they must be; who sent them is told which field is at fault."""

import re
from typing import Any, TypeVar

import msgspec

from kvnet_node.api.failures import invalid

T = TypeVar("T")

_PLACE = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


def check_part(value: Any, kind: type[T], place: str) -> T:
    """The value as that kind; the message names the field, as in ``messages.0.role``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        inner = ""
        if match := _PLACE.search(text):
            inner = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", match["path"]).strip(".")
            text = text[: match.start()]
        where = ".".join(part for part in (place, inner) if part)
        raise invalid(f"{where}: {text}" if where else text, param=where or None) from None
