"""``kvnet list --peers``: what members of this node's swarms hold, and may be fetched."""

import time

from kvnet_node.away_text import last_seen
from kvnet_node.invocation import Invocation
from kvnet_node.operations.requests import HolderEntry, OfferedEntry, OfferedRequest, OfferedResult
from kvnet_node.output import columns, format_bytes, format_count, format_counted
from kvnet_node.removed_text import removed_text


def list_offered(context: Invocation, swarm: str, *, everything: bool) -> None:
    """Show what members hold."""
    result = context.run("list peers", OfferedRequest(swarm, everything), OfferedResult)
    context.output.result(result, render_offered)
    for line in remarks(result, swarm):
        context.output.message(line)


def remarks(result: OfferedResult, swarm: str = "") -> list[str]:
    """What to do with what was listed, and why something is not in it."""
    lines = []
    if result.unnamed:
        unnamed = format_counted(result.unnamed, "artifact")
        lines.append(f"and {unnamed} in mine without a name: kvnet list --peers --all")
    states = [_state(each) for each in result.offered]
    if any(each.name and state != "away" for each, state in zip(result.offered, states, strict=True)):
        lines.append("kvnet fetch NAME gets one; a hash where a name is there twice")
    if "away" in states:
        lines.append("away: nobody who holds it is connected and serving; it can be fetched when one of them is back")
    gone = [each for each in result.removed if swarm in {"", each}]
    if gone:
        lines.append(removed_text(gone))
    elif not result.offered:
        lines.append(
            "members share nothing that is known here yet: kvnet peers shows who is connected, "
            "kvnet share NAME --to SWARM shares something of yours"
        )
    return lines


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
            ", ".join(map(_holder, entry.holders)),
            _state(entry),
            entry.artifact or "-",
        )
        for entry in result.offered
    ]
    headers = ("NAME", "SWARM", "TOKENS", "SIZE", "MODEL", "SIGNED BY", "HELD BY", "STATE", "ARTIFACT")
    return columns(rows, headers) if rows else ""


def _holder(holder: HolderEntry) -> str:
    if holder.state == "serving":
        return holder.name
    if holder.state != "away":
        return f"{holder.name} ({holder.state})"
    return last_seen(holder.name, holder.seen, time.time()) if holder.seen else f"{holder.name} (away)"


def _state(entry: OfferedEntry) -> str:
    if entry.refused:
        return "not used"
    if entry.here:
        return "here too"
    return "ready" if any(each.state == "serving" for each in entry.holders) else "away"
