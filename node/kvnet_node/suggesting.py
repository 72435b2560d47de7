"""Commands in what a person reads: each works as it is pasted, on the data directory that this command was given.

A command for another machine is written with `kvnet.errors.elsewhere`; all others are for this one.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from kvnet.errors import ELSEWHERE


class Suggestions:
    """Completes commands in text.

    Args:
        data_dir: what ``--data-dir`` was given, if it was.
        verbs: the first words of all commands.
    """

    def __init__(self, data_dir: Path | None = None, verbs: Iterable[str] = ()) -> None:
        self._flag = ""
        words = "|".join(map(re.escape, verbs))
        self._command = re.compile(rf"(?<![\w./-])kvnet (?=(?:{words})\b(?![-\w]))")
        if data_dir is not None and words:
            self.use(data_dir)

    def use(self, data_dir: Path) -> None:
        """Name this data directory in every command from now on."""
        self._flag = f"kvnet --data-dir {shlex.quote(str(data_dir))} "

    def complete(self, text: str) -> str:
        """The text with commands that find the data directory of this one."""
        if self._flag:
            text = self._command.sub(lambda _: self._flag, text)
        return unmarked(text)


def unmarked(text: str) -> str:
    """The text with commands for other machines as they are typed."""
    return text.replace(f"kvnet{ELSEWHERE}", "kvnet ")
