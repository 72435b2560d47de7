"""Reading logs a line at a time, whatever their size and whatever is broken in them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is not read: a request body of this size holds no prompt that any model takes."""
MAX_NAMED_LINES = 5
"""Of every file so many broken lines are named; all are counted."""

OnBytes = Callable[[int], None]


@dataclass(slots=True)
class Malformed:
    """Lines of one file that could not be read.

    Attributes:
        path: the file.
        count: how many there are.
        named: the first of them: line number and what is wrong, without any of the text.
    """

    path: Path
    count: int = 0
    named: list[tuple[int, str]] = field(default_factory=list)

    def note(self, line: int, reason: str) -> None:
        """One more."""
        self.count += 1
        if len(self.named) < MAX_NAMED_LINES:
            self.named.append((line, reason))


def objects(path: Path, malformed: Malformed, on_bytes: OnBytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file of lines, with their line numbers; what is none is noted and passed over.

    Args:
        path: the file.
        malformed: takes what could not be read.
        on_bytes: told how many more bytes have been read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            on_bytes(len(line))
            if len(line) > MAX_LINE_BYTES:
                malformed.note(number, f"longer than {MAX_LINE_BYTES:,} bytes")
                _skip_rest(file.readline, on_bytes)
                continue
            if not line.strip():
                continue
            value = _object(line)
            if isinstance(value, str):
                malformed.note(number, value)
            else:
                yield number, value


def _skip_rest(readline: Callable[[int], bytes], on_bytes: OnBytes) -> None:
    while rest := readline(MAX_LINE_BYTES):
        on_bytes(len(rest))
        if rest.endswith(b"\n"):
            return


def _object(line: bytes) -> dict[str, Any] | str:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "not JSON"
    return value if isinstance(value, dict) else f"expected a JSON object, found {type(value).__name__}"
