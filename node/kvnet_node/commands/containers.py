"""``kvnet export``, ``import`` and ``store rebuild``: artifacts as files."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvnet.errors import UsageError
from kvnet_node.invocation import Context, absolute
from kvnet_node.operations.requests import (
    ExportRequest,
    ExportResult,
    ImportRequest,
    ImportResult,
    RebuildRequest,
    RebuildResult,
)
from kvnet_node.output import escape, format_bytes, format_counted, format_seconds


def export(artifact: str, /, *, output: Annotated[Path, Parameter(name=("--output", "-o"))], context: Context) -> None:
    """Write an artifact to a .kva file. The file holds its tokens and K/V: as secret as the text.

    Args:
        artifact: full or short hash, NAME or NAME@VERSION.
        output: a file that does not exist yet.
    """
    check_output(absolute(output))
    request = ExportRequest(artifact, str(absolute(output)))
    result = context.run("export", request, ExportResult)
    context.output.result(result, lambda done: f"wrote {done.artifact} to {done.path}, {format_bytes(done.bytes)}")


def check_output(path: Path) -> None:
    """Raises UsageError for a file that cannot be made there, before any work is done for it."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"expected a file that does not exist yet, found {path}", hint="name another, or delete it")
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist", hint=f"mkdir -p {shlex.quote(str(path.parent))}")


def import_container(file: Path, /, *, name: str | None = None, context: Context) -> None:
    """Take in an artifact from a .kva file; its hashes, signature and signer are checked as for a peer's.

    Args:
        file: what kvnet export wrote.
        name: make it a named context of this node.
    """
    if not file.expanduser().is_file():
        raise UsageError(f"expected a .kva file, found none at {file}")
    result = context.run("import", ImportRequest(str(absolute(file)), name), ImportResult)

    def render(taken: ImportResult) -> str:
        named = f"{taken.name}  " if taken.name else ""
        return (
            f"{named}{taken.artifact}\n{format_counted(taken.tokens, 'token')}, {format_bytes(taken.bytes)}, "
            f"signed by {escape(taken.signer_name or taken.signer)}"
        )

    context.output.result(result, render)


def rebuild(*, context: Context) -> None:
    """Make the index anew from the packs."""

    def render(result: RebuildResult) -> str:
        refused = "\n".join(f"refused: {reason}" for reason in result.refused)
        summary = (
            f"{format_counted(result.artifacts, 'artifact')}, {format_counted(result.chunks, 'chunk')} in "
            f"{format_seconds(result.seconds)}"
        )
        return f"{refused}\n{summary}" if refused else summary

    context.output.result(context.run("store rebuild", RebuildRequest(), RebuildResult), render)
