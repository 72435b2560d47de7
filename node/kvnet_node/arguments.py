"""Global flags, taken out of the command line before the verbs see it, so that they work before and after the verb."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvnet.errors import UsageError


@dataclass(frozen=True, slots=True)
class GlobalFlags:
    """Flags that every verb understands."""

    data_dir: Path | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: bool = True


_SWITCHES: dict[str, dict[str, Any]] = {
    "--json": {"json": True},
    "--quiet": {"quiet": True},
    "--verbose": {"verbose": True},
    "--no-color": {"color": False},
}


def split_global_flags(arguments: Sequence[str]) -> tuple[GlobalFlags, list[str]]:
    """Separate the global flags from the rest; everything after ``--`` is left alone.

    A value that itself looks like a global flag is written with an equals sign: ``--prompt=--json``.

    Raises:
        UsageError: ``--data-dir`` without a value, or with an empty one (a variable that is not set).
    """
    flags = GlobalFlags()
    rest: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            return flags, [*rest, argument, *remaining]
        if argument in _SWITCHES:
            flags = replace(flags, **_SWITCHES[argument])
        elif argument == "--data-dir":
            if not remaining or not remaining[0] or remaining[0].startswith("--"):
                raise UsageError(
                    "--data-dir expects a directory, found none", hint="for example --data-dir ~/kvnet-data"
                )
            flags = replace(flags, data_dir=Path(remaining.pop(0)))
        elif argument.startswith("--data-dir="):
            value = argument.partition("=")[2]
            if not value:
                raise UsageError("--data-dir expects a directory, found an empty text")
            flags = replace(flags, data_dir=Path(value))
        else:
            rest.append(argument)
    return flags, rest
