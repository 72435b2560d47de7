"""Every command that a document shows exists, with the flags it shows; those marked `run` are run."""

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
KVNET = Path(sys.executable).with_name("kvnet")
BLOCK = re.compile(r"^```(?P<info>sh|console|shell|bash)(?P<run> run)?\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
# A command that starts a node or takes minutes is never run from a document.
LONG = {("node", "start"), ("demo",), ("selftest",)}


class Shown(NamedTuple):
    """One command line in a document."""

    document: str
    line: str
    run: bool


def documents() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def shown_commands(program: str) -> Iterator[Shown]:
    """Yield each line of a shell block that starts a program, continuation lines joined, prompts taken off."""
    for path in documents():
        for block in BLOCK.finditer(path.read_text()):
            for line in block["body"].replace("\\\n", " ").splitlines():
                command = re.sub(r"^[$%#] ", "", line.strip())
                command = command.removeprefix(".venv/bin/")
                if command.split(" ")[0] == program:
                    yield Shown(str(path.relative_to(ROOT)), command, bool(block["run"]))


def words_of(line: str) -> list[str]:
    """Split a command line as a shell would: comment, redirection and pipe left out."""
    words = shlex.split(line, comments=True)
    for stop in ("|", ">", "2>", "&&", ";", "&"):
        if stop in words:
            words = words[: words.index(stop)]
    return words[1:]


@functools.cache
def help_of(verb: tuple[str, ...]) -> str:
    """Return the help of a verb, or nothing if there is no such verb."""
    done = subprocess.run([KVNET, *verb, "--help"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def has_verb(parent: tuple[str, ...], name: str) -> bool:
    return bool(re.search(rf"(?m)^[\W_]*{re.escape(name)}(?![\w-])", help_of(parent)))


def verb_of(words: list[str]) -> tuple[str, ...]:
    """Return the leading words that name a verb (`node start`), as far as the help knows them."""
    verb: tuple[str, ...] = ()
    for word in words:
        if word.startswith("-") or not re.fullmatch(r"[a-z-]+", word) or not has_verb(verb, word):
            break
        verb = (*verb, word)
    return verb


@pytest.mark.docs
@pytest.mark.parametrize("shown", list(shown_commands("kvnet")), ids=lambda shown: f"{shown.document}: {shown.line}")
def test_a_shown_kvnet_command_exists_with_its_flags(shown: Shown) -> None:
    words = words_of(shown.line)
    while words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
        words = words[2:] if words[0] == "--data-dir" else words[1:]
    verb = verb_of(words)
    assert verb or not words or words[0].startswith("-"), f"{shown.document}: no such verb in: {shown.line}"
    text = help_of(verb) + help_of(())
    flags = [word.partition("=")[0] for word in words_of(shown.line) if re.match(r"--?[a-z]", word)]
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
    assert missing == [], f"{shown.document}: {shown.line}: not in the help: {missing}"


@pytest.mark.docs
@pytest.mark.parametrize("shown", [s for s in shown_commands("kvnet") if s.run], ids=lambda shown: shown.line)
def test_a_command_marked_run_succeeds(shown: Shown, tmp_path: Path) -> None:
    words = words_of(shown.line)
    assert verb_of(words) not in LONG
    done = subprocess.run(
        [KVNET, *words, "--data-dir", str(tmp_path / "data")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.docs
@pytest.mark.parametrize("shown", list(shown_commands("make")), ids=lambda shown: f"{shown.document}: {shown.line}")
def test_a_shown_make_target_exists(shown: Shown) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for word in words_of(shown.line) if "=" not in word]
    assert set(named) <= targets, shown.document


@pytest.mark.docs
def test_readme_shows_the_two_commands() -> None:
    shown = [tuple(words_of(shown.line)) for shown in shown_commands("make") if shown.document == "README.md"]
    assert shown == [("demo",), ("test",)]
