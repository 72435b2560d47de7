"""Server-sent events: reading them from bytes that come in any pieces, and writing them.

The format is that of the HTML standard, section "Server-sent events": lines end with CR, LF or both; an empty line ends
an event; lines that begin with a colon are comments.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its name, "" when it has none, and its data."""

    name: str
    data: str


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment; servers send them to keep a quiet connection open."""

    text: str


@dataclass(slots=True)
class EventParser:
    """Takes the bytes of an event stream in any pieces and gives events and comments as soon as they are whole."""

    _decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))
    _line: list[str] = field(default_factory=list)
    _after_cr: bool = False
    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, data: bytes) -> Iterator[ServerEvent | Comment]:
        """What became whole with these bytes.

        Raises:
            UnicodeDecodeError: the stream is not UTF-8.
        """
        for line in self._lines(self._decoder.decode(data)):
            if (made := self._take(line)) is not None:
                yield made

    def _lines(self, text: str) -> Iterator[str]:
        if text and self._after_cr:
            # The line ended with the CR of the piece before; an LF that follows belongs to it.
            text = text.removeprefix("\n")
            self._after_cr = False
        start = 0
        while (end := _line_end(text, start)) >= 0:
            self._line.append(text[start:end])
            yield "".join(self._line)
            self._line.clear()
            start = end + 1
            if text[end] == "\r":
                if start == len(text):
                    self._after_cr = True
                elif text[start] == "\n":
                    start += 1
        if start < len(text):
            self._line.append(text[start:])

    def _take(self, line: str) -> ServerEvent | Comment | None:
        if not line:
            event = ServerEvent(self._name, "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            return Comment(value)
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        return None


def _line_end(text: str, start: int) -> int:
    ends = [end for end in (text.find("\n", start), text.find("\r", start)) if end >= 0]
    return min(ends, default=-1)


def event_bytes(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name and JSON data."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
