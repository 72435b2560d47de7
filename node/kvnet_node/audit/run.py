"""``kvnet audit``: the logs of this machine, read from beginning to end."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kvnet.errors import UsageError
from kvnet_node.audit import claude_code, codex, gemini_cli, request_log
from kvnet_node.audit.auditor import Auditor, Scope, Sent, Tally
from kvnet_node.audit.lines import MAX_LINE_BYTES, Malformed, OnBytes, objects

OnProgress = Callable[[int, int], None]

_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".log"})


@dataclass(frozen=True, slots=True)
class Audited:
    """What the logs add up to.

    Attributes:
        sessions: of each session: agent, name and tally.
        total: of all.
        files: how many were read.
        malformed: files with lines that could not be read.
        unreadable: files that could not be opened, and why.
        forgotten: places in prompts let go of because there were too many; above 0, repeated tokens are too few.
    """

    sessions: list[tuple[str, str, Tally]]
    total: Tally
    files: int
    malformed: list[Malformed]
    unreadable: list[tuple[Path, str]]
    forgotten: int


def known_places(home: Path, environment: "os._Environ[str] | dict[str, str]") -> list[Path]:
    """Where agents keep their logs, as far as these places exist."""
    claude = environment.get("CLAUDE_CONFIG_DIR") or str(home / ".claude")
    roots = [Path(each.strip()).expanduser() / "projects" for each in claude.split(",") if each.strip()]
    roots.append(home / ".config" / "claude" / "projects")
    codex_home = Path(environment.get("CODEX_HOME") or home / ".codex").expanduser()
    roots += [codex_home / "sessions", codex_home / "archived_sessions", home / ".gemini" / "tmp"]
    return [place for place in dict.fromkeys(roots) if place.is_dir()]


def log_files(paths: Iterable[Path]) -> list[Path]:
    """The log files under some paths, the oldest first, so that what repeats comes after what it repeats.

    Raises:
        UsageError: a path does not exist.
    """
    found: dict[Path, float] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"expected a log file or a folder of logs, found nothing at {path}")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and (file == path or file.suffix in _SUFFIXES):
                found[file] = file.stat().st_mtime
    return sorted(found, key=lambda file: (found[file], str(file)))


def audit(files: list[Path], *, scope: Scope = "all", on_progress: OnProgress = lambda _done, _total: None) -> Audited:
    """Read logs and add up what they say. Blocking.

    Args:
        files: from ``log_files``.
        scope: within which a repeated beginning counts.
        on_progress: told how many bytes are read, of how many.
    """
    total_bytes, done = sum(_size(file) for file in files), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total_bytes)

    auditor = Auditor(scope)
    malformed, unreadable = [], []
    for file in files:
        problems = Malformed(file)
        try:
            for sent in _requests(file, auditor, problems, on_bytes):
                auditor.take(sent)
        except OSError as error:
            unreadable.append((file, error.strerror or type(error).__name__))
        if problems.count:
            malformed.append(problems)
    total = Tally()
    for tally in auditor.sessions.values():
        total.add(tally)
    sessions = [(agent, name, tally) for (agent, name), tally in auditor.sessions.items()]
    sessions.sort(key=lambda each: (-(each[2].avoidable + each[2].behind_changes), -each[2].sent, each[1]))
    return Audited(sessions, total, len(files), malformed, unreadable, auditor.forgotten)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _requests(file: Path, auditor: Auditor, malformed: Malformed, on_bytes: OnBytes) -> Iterator[Sent]:
    if file.suffix == ".json":
        yield from _one_object(file, auditor, malformed, on_bytes)
        return
    lines = objects(file, malformed, on_bytes)
    first = next(lines, None)
    if first is None:
        return
    everything = chain([first], lines)
    for reader in (claude_code, codex):
        if reader.is_log(first[1]):
            yield from reader.requests(file, everything)
            return
    yield from request_log.requests(file, everything, auditor.scope_of, malformed.note)


def _one_object(file: Path, auditor: Auditor, malformed: Malformed, on_bytes: OnBytes) -> Iterator[Sent]:
    """A file that is one JSON value: a session of Gemini CLI, one request, or an array of requests."""
    if _size(file) > MAX_LINE_BYTES:
        malformed.note(1, f"longer than {MAX_LINE_BYTES:,} bytes")
        return
    data = file.read_bytes()
    on_bytes(len(data))
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        malformed.note(1, "not JSON")
        return
    if isinstance(value, dict) and gemini_cli.is_log(value):
        yield from gemini_cli.requests(file, value)
        return
    each = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    bodies = [(number, item) for number, item in enumerate(each, 1) if request_log.body_of(item) is not None]
    yield from request_log.requests(file, bodies, auditor.scope_of, malformed.note)
