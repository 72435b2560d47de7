"""Progress on stderr for anything that takes over a second."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

SHOW_AFTER_S = 1.0
REDRAW_EVERY_S = 0.1
PLAIN_EVERY_S = 5.0
"""Where there is no terminal a line is written this often."""
BAR_WIDTH = 24


class Progress:
    """One line of progress: redrawn on a terminal, written now and then elsewhere.

    Args:
        what: is being done, and in which unit it is counted.
        stream: where it is shown; stderr by default.
        clock: seconds that only go forward.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        # From the first report on: another stage may be before this one.
        self._began_s = self._next_s = 0.0
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        """So many of so many are done."""
        now_s = self._clock()
        if not self._began_s:
            self._began_s, self._next_s = now_s, now_s + SHOW_AFTER_S
        if now_s < self._next_s:
            return
        self._next_s = now_s + (REDRAW_EVERY_S if self._terminal else PLAIN_EVERY_S)
        line = self._line(done, total, now_s - self._began_s)
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line}")
            self._drawn = True
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Clear the line."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False

    def _line(self, done: int, total: int, elapsed_s: float) -> str:
        share = done / total if total else 0.0
        filled = round(BAR_WIDTH * min(1.0, share))
        left = f", {elapsed_s * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
        return f"{self._what}  [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {done:,} of {total:,}{left}"
