"""What a person or a script sees: results on stdout, everything else on stderr.

With ``--json`` every line of stdout is one object and the last one is the result. Text that a peer supplied is escaped
before it reaches a terminal, so that it can neither move the cursor nor hide what stands beside it.
"""

import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

import msgspec

from kvnet_node.events import Event, Note, Progress, TextDelta
from kvnet_node.suggesting import Suggestions, unmarked

R = TypeVar("R")

SHOW_PROGRESS_AFTER_S = 1.0
"""Anything that takes longer shows progress."""
PLAIN_PROGRESS_EVERY_S = 5.0
"""Where there is no terminal a line of progress is written this often."""
PLAIN_TRANSFER_EVERY_S = 1.0
"""The same of a transfer, whose rate changes."""
BAR_WIDTH = 16
MAX_PEER_LINES = 8
"""Peers shown of one transfer; the rest is counted."""

_MARKED = re.compile(r"`([^`\n]+)`")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_KEPT_CONTROLS = frozenset("\n\t")


def escape(text: str, *, keep_newlines: bool = False) -> str:
    """Text safe to show: control, format, private and unassigned characters become escape sequences.

    Format characters include the bidirectional overrides, which could make a name read as another.
    """
    kept = _KEPT_CONTROLS if keep_newlines else frozenset()
    return "".join(
        char
        if char in kept or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def format_bytes(count: int) -> str:
    """A size in decimal units with three significant digits: ``147 kB``, ``1.18 GB``."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_DECIMAL_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{count} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {_DECIMAL_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """A duration: ``0.034 s``, ``7.1 s``, ``2 min 5 s``, ``3 h 20 min``, ``40 d 2 h``."""
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 72 else f"{hours // 24} d {hours % 24} h"


def format_count(count: int) -> str:
    """A count with thousands separated: ``12,288``."""
    return f"{count:,}"


def format_counted(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless it is one: ``1 file``, ``12,288 tokens``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def plain_hint(hint: str) -> str:
    """A hint as all are printed: commands without marks around them, and no full stop that would be pasted with one."""
    plain = _MARKED.sub(r"\1", hint)
    return plain[:-1] if plain.endswith(".") and not plain.endswith("..") else plain


def columns(rows: Iterable[Sequence[str]], headers: Sequence[str]) -> str:
    """Rows as left-aligned text columns under their headers; cells are escaped."""
    table = [tuple(headers), *(tuple(escape(cell) for cell in row) for row in rows)]
    widths = [max(len(row[index]) for row in table) for index in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """Named values, one a line, values aligned; values are escaped."""
    listed = list(items)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name.ljust(width)}  {escape(value)}".rstrip() for name, value in listed)


class Output:
    """Writes results, messages and progress, and knows what the flags allow.

    Args:
        json: one object a line on stdout.
        quiet: no progress and no remarks; warnings and errors stay.
        verbose: with tracebacks.
        color: whether stderr may be coloured.
        suggestions: completes commands in what a person reads.
        stdout, stderr: the streams; the process's own by default.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        color: bool = True,
        suggestions: Suggestions | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.suggestions = suggestions or Suggestions()
        self._stdout = stdout
        self._stderr = stderr
        self._progress = _ProgressLine(self, clock)
        self._streamed = ""

    @property
    def stdout(self) -> TextIO:
        """Where results go."""
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> TextIO:
        """Where everything else goes."""
        return self._stderr or sys.stderr

    def result(self, result: R, render: Callable[[R], str]) -> None:
        """Print a result: as one JSON object, or as ``render`` puts it for a person ("" prints nothing)."""
        self._progress.finish()
        self._end_streamed_line()
        if self.json:
            # Findings and the like have commands in them.
            print(unmarked(msgspec.json.encode(result).decode("utf-8")), file=self.stdout, flush=True)
        elif text := render(result):
            print(self.suggestions.complete(text), file=self.stdout, flush=True)

    def json_line(self, value: Any) -> None:
        """Print one object on a line of stdout."""
        print(msgspec.json.encode(value).decode("utf-8"), file=self.stdout, flush=True)

    def message(self, text: str) -> None:
        """A remark on stderr; not with ``--quiet``."""
        if not self.quiet:
            self._to_stderr(self.suggestions.complete(text))

    def warning(self, text: str) -> None:
        """A warning on stderr."""
        self._to_stderr(self._styled("warning: ", "33") + self.suggestions.complete(text))

    def question(self, text: str) -> None:
        """What somebody at the terminal is to answer or to type, on stderr."""
        self._to_stderr(self.suggestions.complete(text))

    def error(self, *, code: str, exit_code: int, message: str, hint: str) -> None:
        """An error on stderr: what was expected and found, then the next step."""
        message, hint = self.suggestions.complete(message), self.suggestions.complete(hint)
        if self.json:
            self._progress.finish()
            record = {"type": "error", "code": code, "exit_code": exit_code, "message": message, "hint": hint}
            print(msgspec.json.encode(record).decode("utf-8"), file=self.stderr, flush=True)
            return
        text = self._styled("error: ", "31") + escape(message, keep_newlines=True)
        self._to_stderr(text + (f"\n  {escape(plain_hint(hint), keep_newlines=True)}" if hint else ""))

    def event(self, event: Event) -> None:
        """Show what an operation reports."""
        if isinstance(event, TextDelta):
            self._text(event)
        elif isinstance(event, Note):
            self._note(event)
        elif not self.quiet:
            self._progress.update(event)

    def _text(self, event: TextDelta) -> None:
        self._progress.finish()
        if self.json:
            if not self.quiet:
                self.json_line(event)
            return
        # Generated text is the asker's own; on a terminal its control characters are still not obeyed.
        text = escape(event.text, keep_newlines=True) if self.stdout.isatty() else event.text
        self._streamed = text or self._streamed
        print(text, end="", file=self.stdout, flush=True)

    def _end_streamed_line(self) -> None:
        if self._streamed and not self._streamed.endswith("\n"):
            print(file=self.stdout, flush=True)
        self._streamed = ""

    def _note(self, event: Note) -> None:
        if self.json and not self.quiet:
            self.json_line(msgspec.structs.replace(event, text=self.suggestions.complete(event.text)))
        elif event.level == "warning":
            self.warning(escape(event.text, keep_newlines=True))
        elif not self.json:
            self.message(escape(event.text, keep_newlines=True))

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and self.stderr.isatty() else text

    def _to_stderr(self, text: str) -> None:
        self._progress.finish()
        if self._streamed and self.stderr.isatty() and self.stdout.isatty():
            self._end_streamed_line()
        print(text, file=self.stderr, flush=True)

    def close(self) -> None:
        """End a line of progress or of streamed text that is still open."""
        self._progress.finish()
        self._end_streamed_line()


class _ProgressLine:
    """Progress: redrawn in place on a terminal, written now and then elsewhere, objects with ``--json``.

    It takes one line; a transfer takes one more for each peer.
    """

    def __init__(self, output: Output, clock: Callable[[], float]) -> None:
        self._output = output
        self._clock = clock
        self._stage = ""
        self._started_s = 0.0
        self._written_s = 0.0
        self._drawn = False
        self._lines = 0

    def update(self, event: Progress) -> None:
        now = self._clock()
        if event.stage != self._stage:
            self.finish()
            self._stage, self._started_s, self._written_s = event.stage, now, now
        if now - self._started_s < SHOW_PROGRESS_AFTER_S:
            return
        terminal = self._output.stderr.isatty() and not self._output.json
        plain_s = PLAIN_TRANSFER_EVERY_S if event.peers or event.rate else PLAIN_PROGRESS_EVERY_S
        every = 0.1 if terminal else 0.5 if self._output.json else plain_s
        complete = event.total and event.done == event.total
        if self._drawn and now - self._written_s < every and not complete:
            return
        self._written_s = now
        if self._output.json:
            self._output.json_line(event)
        elif terminal:
            bar = event.unit == "bytes" and bool(event.total)
            below = [f"  {escape(event.text)}"] if bar and event.text else []
            self._draw([self._line(event, now, bar=bar), *below, *_peer_lines(event)])
        else:
            peers = "; ".join(line.strip() for line in _peer_lines(event))
            print(self._line(event, now) + (f"  from {peers}" if peers else ""), file=self._output.stderr, flush=True)
        self._drawn = True

    def _draw(self, lines: Sequence[str]) -> None:
        """In place of what was drawn before; the cursor stays in the last line."""
        width = _terminal_width()
        clear = _to_first_line(self._lines)
        text = "\n".join(line[: width - 1].ljust(width - 1) for line in lines)
        self._lines = len(lines)
        print(clear + text, end="", file=self._output.stderr, flush=True)

    def _line(self, event: Progress, now: float, *, bar: bool = False) -> str:
        def amount(count: int) -> str:
            return format_bytes(count) if event.unit == "bytes" else f"{format_count(count)} {event.unit}".rstrip()

        elapsed = now - self._started_s
        # Of what cannot be counted it is said what is waited for.
        parts = [event.stage, amount(event.done)] if event.done or event.total or event.unit else [event.stage]
        if event.total:
            parts[1] += f" of {amount(event.total)} ({100 * event.done // event.total} %)"
            if bar:
                filled = BAR_WIDTH * event.done // event.total
                parts.insert(1, f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]")
            if event.rate:
                parts.append(f"{amount(int(event.rate))}/s")
            # A transfer that stands still will be done nobody knows when.
            if 0 < event.done < event.total and (event.rate or not event.peers):
                left = event.total - event.done
                left_s = left / event.rate if event.rate else elapsed * left / event.done
                parts.append(f"{format_seconds(left_s)} left")
        if event.text and not bar:
            parts.append(event.text)
        return escape("  ".join(parts))

    def finish(self) -> None:
        if self._drawn and self._output.stderr.isatty() and not self._output.json:
            print(_to_first_line(self._lines), end="", file=self._output.stderr, flush=True)
        self._stage, self._drawn, self._lines = "", False, 0


def _to_first_line(n_lines: int) -> str:
    """Back to the beginning of what was drawn, and all of it gone (ECMA-48: CUU, ED)."""
    up = f"\x1b[{n_lines - 1}A" if n_lines > 1 else ""
    return f"\r{up}\x1b[J\r"


def _peer_lines(event: Progress) -> list[str]:
    """A line for each peer: who, how much, how fast, by which way."""
    shown = sorted(event.peers, key=lambda each: -each.bytes)[:MAX_PEER_LINES]
    lines = [
        escape(
            f"  {(each.name or each.peer[-12:]).ljust(12)}  {format_bytes(int(each.rate_bytes_s))}/s  "
            f"{format_bytes(each.bytes)} in {format_counted(each.chunks, 'chunk')}  {each.path or 'connecting'}"
        )
        for each in shown
    ]
    if len(event.peers) > len(shown):
        lines.append(f"  and {len(event.peers) - len(shown)} more")
    return lines


def _terminal_width() -> int:
    import shutil

    return max(20, shutil.get_terminal_size().columns)
