"""Errors about decoded files in words: which key, what was expected there, what was found."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_WORDS = {
    "`str`": "a text", "`int`": "a whole number", "`float`": "a number", "`bool`": "true or false",
    "`array`": "a list", "`object`": "a table",
}  # fmt: skip
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Keys:
    """What a file may hold.

    Attributes:
        tables: the known keys by the name of their table; "" is the file.
        choices: the known values of keys that choose between kinds of a table.
    """

    tables: Mapping[str, Sequence[str]]
    choices: Mapping[str, Sequence[str]]


def explain(message: str, content: Any, keys: Keys) -> str:
    """A message of msgspec's as: path of the key, what was expected, what was found.

    Args:
        message: of its `ValidationError`.
        content: what was to be converted.
        keys: what it may hold.
    """
    matched = _AT.fullmatch(message)
    what, path = (matched["what"], matched["path"] or "") if matched else (message, "")
    path = path.lstrip(".")
    last = next((key for key, _ in reversed(_STEP.findall(path)) if key), "")
    if unknown := _UNKNOWN.fullmatch(what):
        known = ", ".join(keys.tables.get(last, ("nothing",)))
        return f"{_join(path, unknown['key'])}: expected one of {known}, found a key that is not known"
    if missing := _MISSING.fullmatch(what):
        return f"{_join(path, missing['key'])}: expected a value, found none"
    found = repr(_value(path, content))[:_MAX_SHOWN]
    if what.startswith("Invalid value"):
        return f"{path}: expected one of {', '.join(keys.choices.get(last, ()))}, found {found}"
    expected = re.sub(r", got .*", "", what).removeprefix("Expected ").replace(" | null`", "`")
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return f"{path}: expected {expected}, found {found}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value(path: str, content: Any) -> Any:
    """What stands at a path; what stands above it where a path goes through keys of any name (`[...]`)."""
    for key, place in _STEP.findall(path.partition("[...]")[0]):
        content = content[key] if key else content[int(place)]
    return content
