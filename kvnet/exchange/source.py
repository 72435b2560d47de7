"""Lays out the files behind ``kvnet add PATH…`` as one text that changes as late as it can.

Only the prefix of a text that stayed the same is not computed again, so what changes often belongs to the end: the
first layout puts the files that fewest commits touched first, and every later one keeps that order. There is no list
of files at the head, since it would change with every new file.

Everything here is synchronous: callers run it in a thread.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pathspec

from kvnet.errors import UsageError
from kvnet.exchange import source_git, source_rules

MAX_FILES = 20_000
# A file of 4 MiB is about a million tokens: more than any window, and more likely data than text.
MAX_FILE_SIZE_BYTES = 4 << 20
MAX_TEXT_SIZE_BYTES = 32 << 20
_MAX_IGNORE_FILE_SIZE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """One file of a layout: its path in the layout, and the bytes of its content."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or folder that was left out (a folder's path ends in ``/``), and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A document laid out.

    Attributes:
        text: the whole document.
        files: what it is made of, in the order of the text.
        skipped: what was left out, by path.
        order: the paths of ``files``; give it back as ``previous_order`` when the same document is added again.
    """

    text: str
    files: tuple[LayoutFile, ...]
    skipped: tuple[Skipped, ...]
    order: tuple[str, ...]


@dataclass(slots=True)
class _Found:
    """What is collected while the paths are walked."""

    contents: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)
    total_bytes: int = 0


def lay_out(paths: Sequence[Path], *, previous_order: Sequence[str] = ()) -> Layout:
    """Lay out files, directories and git repositories as one text.

    A directory inside a git work tree gives its tracked files as they stand on disk, any other directory all files
    that its ``.gitignore`` files and the built-in rules leave. Binary files, likely secrets and symbolic links are
    left out and listed.

    Args:
        paths: what to add; their order does not matter.
        previous_order: ``order`` of the last layout under the same name: kept, gone files dropped, new ones last.

    Raises:
        UsageError: a path that does not exist, nothing left to add, or more than the limits allow.
    """
    if not paths:
        raise UsageError("expected at least one file or directory to add, found none")
    found = _Found()
    for prefix, path in _prefixes(paths):
        if path.is_dir():
            _collect_folder(path, prefix, found)
        else:
            _collect_file(path, prefix, found, named=True)
    if not found.contents:
        raise UsageError(_nothing_left(found), hint="give a file or directory with text in it")
    _count_commits(paths, found)
    order = _order(found, previous_order)
    return Layout(
        text="".join(_section(path, found.contents[path]) for path in order),
        files=tuple(LayoutFile(path, found.sizes[path]) for path in order),
        skipped=tuple(Skipped(path, reason) for path, reason in sorted(found.skipped.items())),
        order=tuple(order),
    )


def _section(path: str, content: str) -> str:
    end = "" if content.endswith("\n") or not content else "\n"
    return f"=== {path} ===\n{content}{end}\n"


def _order(found: _Found, previous_order: Sequence[str]) -> list[str]:
    kept = [path for path in dict.fromkeys(previous_order) if path in found.contents]
    new = found.contents.keys() - set(kept)
    return kept + sorted(new, key=lambda path: (found.commits.get(path, 0), path))


def _prefixes(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """What goes before the names below each path: nothing for one directory, else enough to tell the paths apart."""
    resolved: list[Path] = []
    for path in paths:
        try:
            real = path.expanduser().resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"expected a file or directory, found none at {path}") from error
        if not real.is_dir() and not real.is_file():
            raise UsageError(f"expected a file or directory, found something else at {path}")
        if real not in resolved:
            resolved.append(real)
    if len(resolved) == 1:
        return [("" if resolved[0].is_dir() else resolved[0].name, resolved[0])]
    names = [path.name for path in resolved]
    if len(set(names)) < len(names):
        base = Path(os.path.commonpath(resolved))
        names = [path.relative_to(base).as_posix() for path in resolved]
    named = [(name if name != "." else "", path) for name, path in zip(names, resolved, strict=True)]
    return sorted(named, key=lambda pair: pair[0])


# --- which files ----------------------------------------------------------------------------------------------


def _collect_folder(folder: Path, prefix: str, found: _Found) -> None:
    if source_git.work_tree_of(folder) is not None and (tracked := source_git.tracked_files(folder)):
        for name in tracked:
            _collect_file(folder / name, _joined(prefix, name), found)
    else:
        for name in _walk(folder, prefix, found):
            _collect_file(folder / name, _joined(prefix, name), found)


def _walk(root: Path, prefix: str, found: _Found) -> Iterator[str]:
    """Relative paths of the files below ``root`` that no rule ignores; links to folders are not entered."""
    waiting: list[tuple[str, tuple[tuple[str, pathspec.GitIgnoreSpec], ...]]] = [("", ())]
    while waiting:
        folder, specs = waiting.pop()
        try:
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            found.skipped[_joined(prefix, folder) + "/"] = f"cannot be read: {error.strerror}"
            continue
        if any(entry.name == ".gitignore" for entry in entries):
            specs = (*specs, (folder, _ignore_spec(root / folder / ".gitignore")))
        for entry in entries:
            name = _joined(folder, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            shown = _joined(prefix, name) + ("/" if is_folder else "")
            if (reason := source_rules.ignored_reason(entry.name, is_folder=is_folder)) is not None:
                found.skipped[shown] = f"ignored: {reason}"
            elif _ignored_by(specs, name + ("/" if is_folder else "")):
                found.skipped[shown] = "ignored by .gitignore"
            elif is_folder:
                waiting.append((name, specs))
            else:
                yield name


def _ignore_spec(file: Path) -> pathspec.GitIgnoreSpec:
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_IGNORE_FILE_SIZE_BYTES).decode("utf-8", errors="replace")
        return pathspec.GitIgnoreSpec.from_lines(text.splitlines())
    except (OSError, ValueError):
        return pathspec.GitIgnoreSpec.from_lines([])


def _ignored_by(specs: Sequence[tuple[str, pathspec.GitIgnoreSpec]], name: str) -> bool:
    """Whether the deepest ``.gitignore`` with an opinion on ``name`` ignores it."""
    for folder, spec in reversed(specs):
        below = name[len(folder) + 1 :] if folder else name
        if (verdict := spec.check_file(below).include) is not None:
            return verdict
    return False


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix and name else prefix or name


# --- which content --------------------------------------------------------------------------------------------


def _collect_file(path: Path, name: str, found: _Found, *, named: bool = False) -> None:
    """Read one file into ``found``, or note why it is left out; ``named`` when the user gave this very path."""
    shown = name.encode("utf-8", "backslashreplace").decode()
    if not name.isprintable():
        found.skipped["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)] = (
            "its name holds characters that cannot be printed"
        )
        return
    if path in found.seen:
        return
    found.seen.add(path)
    if (reason := source_rules.secret_name_reason(name)) is not None:
        found.skipped[name] = reason
        return
    content = _read(path)
    if isinstance(content, Skipped):
        if named and content.path == "size":
            raise UsageError(
                f"expected a text of at most {MAX_FILE_SIZE_BYTES:,} bytes, found {name}: {content.reason}"
            )
        found.skipped[name] = content.reason
        return
    text = content.decode("utf-8")
    if (reason := source_rules.secret_text_reason(text)) is not None:
        found.skipped[name] = reason
        return
    found.contents[name] = text
    found.sizes[name] = len(content)
    found.total_bytes += len(content)
    _check_limits(found)


def _read(path: Path) -> bytes | Skipped:
    """The bytes of a regular text file; else why not. No link is followed, no device opened for long."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return Skipped("link", "a symbolic link")
        if stat.S_ISDIR(status.st_mode):
            return Skipped("folder", "a repository of its own (submodule)")
        if not stat.S_ISREG(status.st_mode):
            return Skipped("special", "not a regular file")
        if status.st_size > MAX_FILE_SIZE_BYTES:
            return Skipped("size", f"too large: {status.st_size:,} bytes")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(MAX_FILE_SIZE_BYTES + 1)
    except FileNotFoundError:
        return Skipped("gone", "tracked, but not on disk")
    except OSError as error:
        return Skipped("unreadable", f"cannot be read: {error.strerror or type(error).__name__}")
    if len(content) > MAX_FILE_SIZE_BYTES:
        return Skipped("size", f"too large: more than {MAX_FILE_SIZE_BYTES:,} bytes")
    reason = _why_no_text(content)
    return Skipped("binary", reason) if reason else content


def _why_no_text(content: bytes) -> str:
    """Why a file holds no text that can be added; "" when it does."""
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "binary, or text that is not UTF-8"
    return ""


def _check_limits(found: _Found) -> None:
    hint = "give fewer paths, or name what does not belong in a .gitignore"
    if found.total_bytes > MAX_TEXT_SIZE_BYTES:
        raise UsageError(f"expected at most {MAX_TEXT_SIZE_BYTES:,} bytes of text to add, found more", hint=hint)
    if len(found.contents) > MAX_FILES:
        raise UsageError(f"expected at most {MAX_FILES:,} files to add, found more", hint=hint)


def _nothing_left(found: _Found) -> str:
    if not found.skipped:
        return "expected text to add, found no file"
    path, reason = min(found.skipped.items())
    if len(found.skipped) == 1:
        return f"expected text to add, found only what is left out: {path} ({reason})"
    return f"expected text to add, found {len(found.skipped):,} files that were left out, the first: {path} ({reason})"


# --- how often it changes -------------------------------------------------------------------------------------


def _count_commits(paths: Sequence[Path], found: _Found) -> None:
    """Fill in the commits of each file, with one git process a work tree."""
    if len(found.contents) < 2:
        return
    trees: dict[Path, list[tuple[str, Path]]] = {}
    for prefix, path in _prefixes(paths):
        tree = source_git.work_tree_of(path if path.is_dir() else path.parent)
        if tree is not None:
            trees.setdefault(tree.resolve(), []).append((prefix, path))
    for tree, members in trees.items():
        counts = source_git.commit_counts(tree, [path for _, path in members])
        for prefix, path in members:
            found.commits |= _counts_below(counts, path.relative_to(tree).as_posix(), prefix, found.contents)


def _counts_below(counts: Mapping[str, int], place: str, prefix: str, contents: Mapping[str, str]) -> dict[str, int]:
    """Counts by layout path: git's path begins with ``place`` where the layout's begins with ``prefix``."""
    result = {}
    for name in contents:
        if name == prefix:
            inside = place
        elif not prefix or name.startswith(prefix + "/"):
            below = name[len(prefix) + 1 :] if prefix else name
            inside = below if place == "." else f"{place}/{below}"
        else:
            continue
        if inside in counts:
            result[name] = counts[inside]
    return result
