"""Commands in what a person reads: each works as it is pasted, on the data directory that this command was given."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

_NO_BREAK = "\u00a0"
"""Between ``kvnet`` and the verb: a command for another machine. Nobody gets to see it."""

_ELSEWHERE = r"(?![^;.:\n]*?\bon (?:the other|another|your other|a machine)\b)(?![^;,.:\n]*?\bthere\b)"
"""What follows a command that is meant for another machine."""


def elsewhere(command: str) -> str:
    """A command that is to be run on another machine, where the words around it do not say so afterwards."""
    return command.replace("kvnet ", f"kvnet{_NO_BREAK}")


class Suggestions:
    """Completes commands in text.

    Args:
        data_dir: what ``--data-dir`` was given, if it was.
        verbs: the first words of all commands.
    """

    def __init__(self, data_dir: Path | None = None, verbs: Iterable[str] = ()) -> None:
        self._flag = ""
        words = "|".join(map(re.escape, verbs))
        self._command = re.compile(rf"(?<![\w./-])kvnet (?=(?:{words})\b(?![-\w])){_ELSEWHERE}")
        if data_dir is not None and words:
            self.use(data_dir)

    def use(self, data_dir: Path) -> None:
        """Name this data directory in every command from now on."""
        self._flag = f"kvnet --data-dir {shlex.quote(str(data_dir))} "

    def complete(self, text: str) -> str:
        """The text with commands that find the data directory of this one."""
        if self._flag:
            text = self._command.sub(lambda _: self._flag, text)
        return text.replace(f"kvnet{_NO_BREAK}", "kvnet ")
