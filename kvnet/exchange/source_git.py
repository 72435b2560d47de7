"""What git knows of a folder: which files are tracked, and how many commits touched each.

Git runs as a subprocess that reads only: no hooks, no pager, no prompt, no external diff, no lock taken.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_READ_SIZE_BYTES = 1 << 20
# Listing the files of a work tree takes milliseconds; a hung file system must not hang the node.
_TIMEOUT_S = 60.0


def work_tree_of(folder: Path) -> Path | None:
    """The top folder of the git work tree ``folder`` lies in; None outside of one, or without git."""
    output = _run(folder, ["rev-parse", "--show-toplevel"])
    if not output:
        return None
    return Path(os.fsdecode(output.removesuffix(b"\n")))


def tracked_files(folder: Path) -> list[str]:
    """Paths of the tracked files below ``folder``, relative to it; surrogates stand for bytes that are no UTF-8."""
    output = _run(folder, ["ls-files", "-z", "--cached"]) or b""
    # A file in conflict is listed once a stage.
    return sorted({os.fsdecode(name) for name in output.split(b"\0") if name})


def commit_counts(work_tree: Path, paths: Sequence[Path]) -> Counter[str]:
    """How many commits touched each file below ``paths``, by its path relative to ``work_tree``.

    One git process whatever the number of files. A renamed file counts from its new name on; a repository without a
    commit, or one git cannot read, counts nothing.
    """
    command = ["--literal-pathspecs", "log", "--format=", "--name-only", "-z", "--no-renames", "--no-show-signature",
               "--no-ext-diff", "--", *(str(path) for path in paths)]  # fmt: skip
    counts: Counter[str] = Counter()
    rest = b""
    with subprocess.Popen(
        _command(work_tree, command), env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        while piece := process.stdout.read(_READ_SIZE_BYTES):
            *names, rest = (rest + piece).split(b"\0")
            counts.update(os.fsdecode(name) for name in names if name)
    return counts


def _run(folder: Path, arguments: list[str]) -> bytes | None:
    try:
        done = subprocess.run(
            _command(folder, arguments), env=_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _command(folder: Path, arguments: list[str]) -> list[str]:
    return ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false",
            "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]  # fmt: skip


def _environment() -> dict[str, str]:
    # Variables such as GIT_DIR, set when a hook calls us, would point git at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return environment | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
