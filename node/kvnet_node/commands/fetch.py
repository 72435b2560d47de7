"""``kvnet fetch``: an artifact from peers."""

from typing import Annotated

from cyclopts import Parameter

from kvnet_node.invocation import Context
from kvnet_node.operations.requests import FetchRequest, FetchResult
from kvnet_node.output import escape, format_bytes, format_count, format_counted, format_seconds


def fetch(
    target: str,
    /,
    *,
    from_: Annotated[
        list[str] | None, Parameter(name="--from", help="address of a node to ask first, /ip4/…/p2p/…; may repeat")
    ] = None,
    name: str | None = None,
    bootstrap: list[str] | None = None,
    context: Context,
) -> None:
    """Fetch an artifact from peers; needs no model. Run again it fetches only what is missing.

    Args:
        target: artifact hash or ticket.
        name: make it a named context of this node.
        bootstrap: address of a node to look up providers through; used when no node runs here.
    """
    request = FetchRequest(target, from_ or [], name)
    result = context.run("fetch", request, FetchResult, network_bootstrap=bootstrap)
    context.output.result(result, _render)
    if result.name:
        context.output.message(f'ask it something: kvnet ask {result.name} "…"')


def _render(result: FetchResult) -> str:
    named = f"{result.name}  " if result.name else ""
    chunks = format_counted(result.chunks, "chunk")
    size = f"{format_counted(result.tokens, 'token')}, {format_bytes(result.bytes)} in {chunks}"
    fetched = (
        "already here"
        if result.complete and not result.fetched_chunks
        else f"{format_count(result.fetched_chunks)} fetched in {format_seconds(result.seconds)}"
    )
    lines = [f"{named}{result.artifact}", f"{size}, {fetched}; signed by {result.signer}"]
    lines += [
        f"{format_bytes(provided.bytes)} in {format_counted(provided.chunks, 'chunk')} from {escape(provided.peer)} "
        f"{escape(provided.address)}".rstrip()
        for provided in result.providers
    ]
    return "\n".join(lines)
