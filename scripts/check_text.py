"""Check the text of every tracked file: no path of somebody's machine, no registry setting, no broken link.

Documents are also checked for relative links and anchors that lead nowhere. Run it through ``make lint``.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_TEXT_BYTES = 2_000_000

FORBIDDEN = (
    # Ann and Bob live in examples and tests of what a path in a prompt does.
    (
        re.compile(r"(?<![\w.~$}])/(home|root|Users|work|mnt|srv)/(?!(?:ann|bob|you|user)\b)[A-Za-z0-9_.]"),
        "a path of one machine",
    ),
    (re.compile(r"\b(extra[-_])?index[-_]url\b", re.IGNORECASE), "a setting for a package registry"),
    (re.compile(r"^(<{7}|>{7}) ", re.MULTILINE), "a merge conflict"),
    (re.compile(r"[ \t]+$", re.MULTILINE), "white space at the end of a line"),
)
# Third-party files are kept as they came.
AS_THEY_CAME = ("tests/vectors/", "LICENSE")

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def tracked_files(root: Path) -> list[Path]:
    """Return the tracked files, or every file outside hidden folders where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    if listed.returncode == 0:
        return [root / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in root.rglob("*") if path.is_file() and ".venv" not in path.parts]


def text_of(path: Path) -> str | None:
    """Return a file's text, or None if it is gone, large or binary."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > MAX_TEXT_BYTES:
        return None
    data = path.read_bytes()
    if b"\0" in data:
        return None
    return data.decode("utf-8", errors="replace")


def forbidden_text(text: str, name: str) -> Iterator[str]:
    """Yield what a file's text must not contain."""
    for pattern, meaning in FORBIDDEN:
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {meaning}: {match[0].strip()!r}"


def anchor(heading: str) -> str:
    """Return the anchor that common Markdown renderers give a heading."""
    plain = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(path: Path, text: str, root: Path) -> Iterator[str]:
    """Yield the relative links of a document that lead nowhere."""
    prose = FENCE.sub("", text)
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        file_name, _, fragment = target.partition("#")
        file = (path.parent / file_name).resolve() if file_name else path
        name = path.relative_to(root)
        if not file.exists():
            yield f"{name}: the link {target} leads to no file"
        elif fragment and fragment not in {anchor(h) for h in HEADING.findall(FENCE.sub("", file.read_text()))}:
            yield f"{name}: the link {target} leads to no heading"


def check(root: Path) -> list[str]:
    """Return everything wrong with the text of the tracked files."""
    problems: list[str] = []
    for path in tracked_files(root):
        name = str(path.relative_to(root))
        text = text_of(path)
        if text is None or name.startswith(AS_THEY_CAME):
            continue
        problems += forbidden_text(text, name)
        if path.suffix == ".md":
            problems += broken_links(path, text, root)
    return problems


def main() -> int:
    """Print what is wrong and say so by the exit code."""
    problems = check(ROOT)
    for problem in problems:
        print(f"check_text: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
