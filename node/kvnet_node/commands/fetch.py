"""``kvnet fetch``: an artifact from peers."""

import shlex
from typing import Annotated

from cyclopts import Parameter

from kvnet_node.invocation import Context
from kvnet_node.operations.requests import FetchRequest, FetchResult, Provided
from kvnet_node.output import escape, format_bytes, format_count, format_counted, format_seconds
from kvnet_node.targets import is_name, parse_target


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
        target: what a member calls it, as kvnet list --peers shows; or an artifact hash or ticket.
        name: make it a named context here; one fetched by name has that name, unless it means another's or your own.
        bootstrap: address of a node to look up providers through; used when no node runs here.
    """
    if not is_name(target):
        parse_target(target)  # what is no target is said at once, not when a network has been opened for it
    request = FetchRequest(target, from_ or [], name)
    result = context.run("fetch", request, FetchResult, network_bootstrap=bootstrap)
    context.output.result(result, _render)
    if result.name:
        context.output.message(next_step(result))
    elif result.suggested:
        context.output.message(f"next: kvnet fetch {result.artifact} --name {result.suggested}")


def next_step(result: FetchResult) -> str:
    """What can be done with a fetched context here: without its model, nothing can be asked."""
    ask = f'kvnet ask {result.name} "…"'
    called = f"{escape(result.model)}, " if result.model else ""
    if result.model_here == "yes":
        return f"ask it something: {ask}"
    if result.model_here == "likely":
        model = shlex.quote(escape(result.model))
        return f"ask it something: {ask} --model {model}; it says when that is another model here"
    if result.model_here == "perhaps":
        return (
            f"if the model it was computed with is here ({called}one of kvnet model list): {ask} --model MODEL; "
            "it says when MODEL is another one"
        )
    return (
        f"to ask it something, this machine needs the model it was computed with: {called}the same files as there. "
        "Put them into the Hugging Face cache or ~/.lmstudio/models, or make them from the same GGUF file with "
        "kvnet model import; kvnet model list shows what is here"
    )


def _render(result: FetchResult) -> str:
    named = f"{result.name}  " if result.name else ""
    chunks = format_counted(result.chunks, "chunk")
    size = f"{format_counted(result.tokens, 'token')}, {format_bytes(result.bytes)} in {chunks}"
    fetched = (
        "already here"
        if result.complete and not result.fetched_chunks and not result.meanwhile_chunks
        else f"{format_count(result.fetched_chunks)} fetched in {format_seconds(result.seconds)}"
    )
    lines = [f"{named}{result.artifact}", f"{size}, {fetched}; signed by {escape(result.signer_name or result.signer)}"]
    otherwise = {
        "were here from an earlier fetch": result.resumed_chunks,
        "were here as part of other artifacts": result.shared_chunks,
        "came for prompts meanwhile": result.meanwhile_chunks,
    }
    lines += [
        f"{format_counted(count, 'chunk')} of {format_count(result.chunks)} {words}"
        for words, count in otherwise.items()
        if count
    ]
    return "\n".join([*lines, *map(_part, result.providers)])


_LEFT = {
    "unknown": "it does not have this",
    "bad_chunk": "what it sent does not match its hash",
    "unasked": "it sent what nobody asked for",
    "silent": "nothing came for too long",
    "slow": "too slow",
    "gone": "the connection broke",
}


def _part(provided: Provided) -> str:
    """One provider's part, and what became of it."""
    brought = f"{format_bytes(provided.bytes)} in {format_counted(provided.chunks, 'chunk')}"
    rate = f" at {format_bytes(int(provided.rate_bytes_s))}/s" if provided.rate_bytes_s else ""
    path = f" over {escape(provided.path)}" if provided.path else ""
    left = f"; left: {escape(_LEFT.get(provided.dropped, provided.dropped))}" if provided.dropped else ""
    who = escape(provided.name) or f"{escape(provided.peer)} {escape(provided.address)}".rstrip()
    return f"{brought} from {who}{rate}{path}{left}"
