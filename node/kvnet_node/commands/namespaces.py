"""``kvnet namespace``: pairing by a file that holds secrets. No secret is ever written to a terminal."""

from pathlib import Path

from kvnet.errors import elsewhere
from kvnet_node.invocation import Context, absolute
from kvnet_node.operations.requests import (
    NamespaceFileRequest,
    NamespaceListRequest,
    NamespaceListResult,
    NamespaceResult,
)
from kvnet_node.output import columns


def list_namespaces(*, context: Context) -> None:
    """List namespaces by their public ids, and how many artifacts each holds."""

    def render(result: NamespaceListResult) -> str:
        rows = [
            (entry.name, entry.id, str(entry.artifacts), "yes" if entry.current else "no")
            for entry in result.namespaces
        ]
        return columns(rows, ("NAME", "ID", "ARTIFACTS", "NEW ARTIFACTS GO HERE"))

    context.output.result(context.run("namespace list", NamespaceListRequest(), NamespaceListResult), render)


def export(file: Path, /, *, context: Context) -> None:
    """Write the secrets of mine to a new file (0600); whoever has the file is a member.

    Args:
        file: a file that does not exist yet.
    """
    request = NamespaceFileRequest(str(absolute(file)))
    result = context.run("namespace export", request, NamespaceResult)
    context.output.result(result, lambda _: "")
    context.output.message(
        f"wrote namespace {result.id} to {result.path}\n"
        f"it holds secrets: move it to your other machine, run {elsewhere('kvnet namespace import')} there, then "
        "delete it"
    )


def import_namespace(file: Path, /, *, keep_old: bool = False, context: Context) -> None:
    """Make the namespace of a file this node's mine. It trusts nobody: that is kvnet key trust.

    Args:
        file: what kvnet namespace export wrote.
        keep_old: keep the namespace it replaces for the artifacts that are in it.
    """
    request = NamespaceFileRequest(str(absolute(file)), keep_old)
    result = context.run("namespace import", request, NamespaceResult)
    context.output.result(result, lambda _: "")
    kept = f"; the old one is kept as {result.kept}" if result.kept else ""
    state = "now" if result.changed else "already"
    context.output.message(
        f"mine is {state} namespace {result.id}{kept}\nwhose artifacts are used is another matter: kvnet key trust"
    )
