"""Request bodies out of files: one body, several in a list, or a log with one JSON object a line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvnet.errors import UsageError

MAX_DEPTH = 64
"""Nesting of lists and objects; the node's endpoint takes no deeper bodies."""

_WRAPPERS = ("body", "request", "request_body", "params", "kwargs", "input", "data", "payload")
"""Where logs and batch files keep the body of a request (``body``: OpenAI batches; ``params``: Anthropic batches)."""
_LISTS = ("requests", "entries", "items")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request body, the file it was read from, and the line it begins in, from 1 on."""

    body: dict[str, Any]
    file: str
    line: int

    @property
    def label(self) -> str:
        """``FILE:LINE``."""
        return f"{self.file}:{self.line}"


def read_requests(text: str, file: str) -> list[ReadRequest]:
    """Every request body in a file, in its order.

    Args:
        text: of the file.
        file: its name, for messages.

    Raises:
        UsageError: something in it is no JSON or no request; names file and line. Or there is no request at all.
    """
    if not text.strip():
        raise UsageError(
            f"{file}: expected a request body, found an empty file", hint="give an OpenAI-style or Anthropic-style body"
        )
    if (whole := _value(text)) is not None:
        found = list(_bodies(whole, file, _first_line(text)))
    else:
        found = [request for number, value in _lines(text, file) for request in _bodies(value, file, number)]
    if not found:
        raise UsageError(f"{file}: expected at least one request body, found an empty list")
    return found


def is_request(value: Any) -> bool:
    """Whether a JSON value is the body of a request to a completion endpoint, OpenAI or Anthropic style."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("messages"), list) or isinstance(value.get("prompt"), str | list)


def _value(text: str) -> Any:
    """The JSON value a text is, or ``None`` when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(text: str, file: str) -> Iterator[tuple[int, Any]]:
    """The values of a log and their lines; a file whose first line is no JSON by itself is one broken value."""
    log = _value(text.lstrip().partition("\n")[0]) is not None
    for number, line in enumerate(text.split("\n"), start=1) if log else [(1, text)]:
        if line.strip():
            yield number, _parsed(line, file, number)


def _parsed(line: str, file: str, number: int) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise _too_deep(file, number) from None
    except ValueError as error:
        where, reason = f"{file}:{number}", "a number that is too long"
        if isinstance(error, json.JSONDecodeError):
            where, reason = f"{file}:{number + error.lineno - 1}", f"column {error.colno}: {error.msg}"
        raise UsageError(
            f"{where}: expected JSON, found something else ({reason})",
            hint="a file holds one request body, or one JSON object a line",
        ) from None


def _bodies(value: Any, file: str, line: int) -> Iterator[ReadRequest]:
    _check_depth(value, file, line)
    if isinstance(value, list):
        for each in value:
            yield from _bodies(each, file, line)
        return
    if is_request(value):
        yield ReadRequest(value, file, line)
        return
    for name in _LISTS:
        if isinstance(value, dict) and isinstance(value.get(name), list):
            yield from _bodies(value[name], file, line)
            return
    inner = _unwrapped(value)
    if inner is None:
        raise UsageError(
            f"{file}:{line}: expected a request body with messages or prompt, found {_found(value)}",
            hint='for example {"messages": [{"role": "user", "content": "Hello"}]}',
        )
    yield ReadRequest(inner, file, line)


def _unwrapped(value: Any) -> dict[str, Any] | None:
    """The body inside a record of a log; some keep it as a text."""
    if not isinstance(value, dict):
        return None
    for name in _WRAPPERS:
        inner = value.get(name)
        if isinstance(inner, str):
            try:
                inner = json.loads(inner)
            except (ValueError, RecursionError):
                continue
        if isinstance(inner, dict):
            if is_request(inner):
                return inner
            if (found := _unwrapped(inner)) is not None:
                return found
    return None


def _check_depth(value: Any, file: str, line: int) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            children = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep(file, line)


def _too_deep(file: str, line: int) -> UsageError:
    return UsageError(f"{file}:{line}: expected JSON nested at most {MAX_DEPTH} levels, found more")


def _found(value: Any) -> str:
    if isinstance(value, dict):
        names = ", ".join(sorted(map(str, value))[:6]) or "no fields"
        return f"an object with {names}"[:120]
    return {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(value), "a number")


def _first_line(text: str) -> int:
    return text[: len(text) - len(text.lstrip())].count("\n") + 1
