"""``kvnet list --peers``: what members of this node's swarms hold, and may be fetched."""

from kvnet_node.invocation import Invocation
from kvnet_node.operations.requests import OfferedEntry, OfferedRequest, OfferedResult
from kvnet_node.output import columns, format_bytes, format_count, format_counted


def list_offered(context: Invocation, swarm: str, *, everything: bool) -> None:
    """Show what members hold."""
    result = context.run("list peers", OfferedRequest(swarm, everything), OfferedResult)
    context.output.result(result, render_offered)
    if result.unnamed:
        unnamed = format_counted(result.unnamed, "artifact")
        context.output.message(f"and {unnamed} in mine without a name: kvnet list --peers --all")
    named = [each for each in result.offered if each.name]
    if named:
        context.output.message("kvnet fetch NAME gets one; a hash where a name is there twice")
    elif not result.offered:
        context.output.message(
            "members share nothing that is known here yet: kvnet peers shows who is connected, "
            "kvnet share NAME --to SWARM shares something of yours"
        )


def render_offered(result: OfferedResult) -> str:
    """A line for each artifact, or name of one."""
    rows = [
        (
            f"{entry.name}@{entry.version}" if entry.name else "-",
            entry.swarm,
            format_count(entry.tokens),
            format_bytes(entry.bytes),
            entry.model or "-",
            entry.signed_by or entry.signer or "-",
            ", ".join(entry.holders),
            _state(entry),
            entry.artifact or "-",
        )
        for entry in result.offered
    ]
    headers = ("NAME", "SWARM", "TOKENS", "SIZE", "MODEL", "SIGNED BY", "HELD BY", "STATE", "ARTIFACT")
    return columns(rows, headers) if rows else ""


def _state(entry: OfferedEntry) -> str:
    return "not used" if entry.refused else "here too" if entry.here else "-"
