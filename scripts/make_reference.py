"""Write the pages that follow from the code, so that they cannot differ from it: docs/reference, the decisions' list.

``python scripts/make_reference.py`` writes them; ``--check`` writes nothing and fails if one is out of date.
"""

import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvnet import errors
from kvnet_node.prompts.killers import KILLERS
from kvnet_node.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTE = "<!-- Written by scripts/make_reference.py; `make docs` writes it again. -->\n\n"
# The help is drawn to the terminal's width; the page must not depend on it.
HELP_COLUMNS = 110


def error_classes(root: type[errors.KvnetError] = errors.KvnetError, depth: int = 0) -> Iterator[tuple[int, type]]:
    """Yield (depth, class) of the error tree, parents first, in the order of definition."""
    yield depth, root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_classes(child, depth + 1)


def errors_page() -> str:
    """Return the page of error codes and exit codes."""
    lines = [
        "# Errors\n",
        NOTE.rstrip("\n") + "\n",
        "`code` is what `--json` prints and does not change; the exit code is the process's.\n",
        "| code | exit code | class | meaning |",
        "|---|---|---|---|",
    ]
    for depth, kind in error_classes():
        assert issubclass(kind, errors.KvnetError)
        meaning = (kind.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{kind.code}` | {kind.exit_code} | {'· ' * depth}`{kind.__name__}` | {meaning} |")
    return "\n".join(lines) + "\n"


def help_text(*verb: str) -> str:
    """Return `kvnet VERB --help` as plain text."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kvnet"), *verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    text = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    # What ends every help text is shown once, under the program's own.
    return text.partition("\n\nGlobal flags")[0] if verb else text


def verbs_in(text: str) -> list[str]:
    """Return the verbs that a help text lists under Commands."""
    boxes = re.findall(r"^╭─ ([^─]+) ─*╮\n(.*?)^╰", text, re.MULTILINE | re.DOTALL)
    lists = [body for title, body in boxes if title not in ("Arguments", "Parameters")]
    return [verb for body in lists for verb in re.findall(r"^│ ([a-z][a-z-]*) ", body, re.MULTILINE)]


def commands_page() -> str:
    """Return the page of all verbs and flags."""
    parts = ["# Commands\n", NOTE.rstrip("\n") + "\n", f"```text\n{help_text()}\n```\n"]
    for verb in verbs_in(help_text()):
        text = help_text(verb)
        parts.append(f"## kvnet {verb}\n\n```text\n{text}\n```\n")
        for inner in verbs_in(text):
            parts.append(f"### kvnet {verb} {inner}\n\n```text\n{help_text(verb, inner)}\n```\n")  # noqa: PERF401
    return "\n".join(parts)


def settings_page() -> str:
    """Return the page of settings."""
    lines = [
        "# Settings\n",
        NOTE.rstrip("\n") + "\n",
        "Set in `config.toml` of the data directory (section, dot, key) or in the environment. A flag",
        "wins over the environment, the environment over the file. `kvnet config show` prints values and origins.\n",
        "| key | environment | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{setting.key}` | `{setting.environment_name}` | {setting.help} |" for setting in SETTINGS]
    return "\n".join(lines) + "\n"


def killers_page() -> str:
    """Return the page of what keeps prompts from sharing their beginning."""
    lines = [
        "# Prefix killers\n",
        NOTE.rstrip("\n") + "\n",
        "What keeps two prompts from sharing their beginning, as `kvnet prompt check` and `kvnet explain` name it.",
        "How it is found: *alone* in a single request, by what probably varies; *between* two requests, by what did;",
        "*rendered*, by what the chat template made of them.\n",
        "| id | what | why it kills | what to do | found |",
        "|---|---|---|---|---|",
    ]
    for each in KILLERS:
        ways = {
            "alone": each.span or each.id == "billing-line",
            "between": each.between,
            "rendered": each.in_prompt or each.between_prompts,
        }
        found = ", ".join(way for way, there in ways.items() if there)
        lines.append(f"| `{each.id}` | {each.title} | {each.why} | {each.remedy} | {found} |")
    return "\n".join(lines) + "\n"


def decisions_page() -> str:
    """Return the list of decisions, by number."""
    lines = ["# Decisions\n", NOTE.rstrip("\n") + "\n", "One page per decision that a reader could wonder about.\n"]
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    pages = {
        "reference/errors.md": errors_page(),
        "reference/commands.md": commands_page(),
        "reference/settings.md": settings_page(),
        "reference/prefix-killers.md": killers_page(),
        "decisions/README.md": decisions_page(),
    }
    stale = 0
    for name, wanted in pages.items():
        path = DOCS / name
        found = path.read_text() if path.exists() else ""
        if found == wanted:
            continue
        if "--check" in arguments:
            stale = 1
            difference = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), "committed", "generated", "", "", 1
            )
            print(f"make_reference: docs/{name} is out of date. Next: make docs", file=sys.stderr)
            print("\n".join(list(difference)[:20]), file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted)
            print(f"wrote docs/{name}")
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
