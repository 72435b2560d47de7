"""``kvnet node start|stop|status``, ``status`` and ``peers``."""

import shlex
import time
from typing import Annotated

from cyclopts import Parameter

from kvnet.errors import elsewhere
from kvnet_node.away_text import away_text
from kvnet_node.commands.matching import render_peer_models, render_peers
from kvnet_node.invocation import Context
from kvnet_node.neighbours_text import JOIN_STEPS
from kvnet_node.operations.requests import (
    LiveEntry,
    PeersRequest,
    PeersResult,
    StatusRequest,
    StatusResult,
    StopResult,
    WritesEntry,
)
from kvnet_node.output import columns, format_bytes, format_count, format_counted, format_seconds, pairs
from kvnet_node.removed_text import removed_text

Listen = Annotated[
    list[str] | None, Parameter(help="HOST:PORT to listen on, such as 127.0.0.1:0; may repeat; by default port 5864")
]
Bootstrap = Annotated[
    list[str] | None, Parameter(help="address of a node to connect to at start, /ip4/…/p2p/…; may repeat")
]


Api = Annotated[
    list[str] | None,
    Parameter(help="HOST:PORT of the HTTP endpoint, such as 127.0.0.1:0; may repeat; by default 127.0.0.1:5863"),
]


def start(
    *,
    listen: Listen = None,
    api: Api = None,
    bootstrap: Bootstrap = None,
    model: str | None = None,
    ram_only: bool = False,
    context: Context,
) -> int:
    """Run the node in the foreground until Ctrl-C or kvnet node stop.

    Args:
        model: the default model of this node.
        ram_only: keep nothing about prompts on disk; the store is in RAM and ends with the node.
    """
    from kvnet_node.invocation import chosen_model
    from kvnet_node.serving import run_node

    settings = context.settings(
        network_listen=listen,
        api_listen=api,
        network_bootstrap=bootstrap,
        model_default=chosen_model(context, model),
        store_ram_only=ram_only or None,
    )
    return run_node(settings, context.output)


def stop(*, context: Context) -> None:
    """Stop the running node and wait until it is gone."""
    from kvnet_node.dispatch import stop_node

    result = stop_node(context.settings())
    context.output.result(result, _render_stop)
    if not result.pid:
        context.output.message("no node was running")


def _render_stop(result: StopResult) -> str:
    return f"stopped the node (process {result.pid})" if result.pid else ""


def status(*, context: Context) -> None:
    """Show how this node is; with --verbose what it has counted since its start, too."""
    output = context.output
    found = context.run("status", StatusRequest(), StatusResult)
    output.result(found, lambda shown: render_status(shown, counted=output.verbose))
    if found.removed:
        output.message(removed_text(found.removed))


def _render_writes(writes: WritesEntry) -> str:
    """What was written today, and what may still be."""
    parts = [
        f"{format_bytes(writes.kept_bytes)} kept",
        f"{format_bytes(writes.fetched_bytes)} fetched for prompts and repairs",
        f"{format_bytes(writes.named_bytes)} by name",
    ]
    left = f"{format_bytes(writes.left_bytes)} of {format_bytes(writes.day_bytes)} left"
    return f"today {', '.join(parts)}; {left if writes.day_bytes else 'nothing is kept unasked'}"


def _render_live(live: LiveEntry) -> str:
    held = f"{format_bytes(live.size_bytes)} of {format_bytes(live.cap_bytes)}"
    return f"{live.model}: {format_counted(live.n_caches, 'conversation')} kept, {held}"


def _render_store(result: StatusResult) -> str:
    """What is held, and where; or why it cannot be said."""
    if result.store_away:
        return f"away, used again when it is back: {result.store_away}"
    held = f"{format_bytes(result.held_bytes)} of {format_bytes(result.quota_bytes)}"
    return f"{format_counted(result.artifacts, 'artifact')}, {held}{', in RAM only' if result.ram_only else ''}"


def _render_serving(result: StatusResult) -> str:
    """Whether peers get anything from this node; why not, and for how long."""
    if not result.not_serving:
        return "yes"
    left = f", {format_seconds(result.pause_left_s)} left" if result.pause_left_s is not None else ""
    resume = ": kvnet node resume" if result.not_serving == "paused" else ""
    return f"nothing, {result.not_serving}{left}{resume}"


def render_status(result: StatusResult, *, counted: bool = False) -> str:
    """The status as named values; the node's counters, which are many, when wanted."""
    running = (
        f"running for {format_seconds(result.uptime_s)}, process {result.pid}" if result.running else "not running"
    )
    verified = ", ".join(result.reuse_verified) or "not on this machine yet"
    if not result.reuse_verified and result.model:
        verified += f": kvnet selftest --model {shlex.quote(result.model)}"
    items = [
        ("node", running),
        ("data dir", result.data_dir),
        ("publisher", result.publisher),
        *((("peer id", result.peer),) if result.peer else ()),
        *(("endpoint", f"{url}/v1") for url in result.endpoint),
        *(("address", address) for address in result.addresses),
        *((("bulk", result.bulk),) if result.bulk else ()),
        *((("peers", f"{format_count(result.peers)} connected"),) if result.running else ()),
        *((("serving", _render_serving(result)),) if result.not_serving or result.running else ()),
        ("policy", result.policy),
        ("store", _render_store(result)),
        *((("writes", _render_writes(result.writes)),) if result.writes is not None else ()),
        ("model", result.model or f"none: {result.no_model}"),
        *(("engine", engine) for engine in result.engines),
        *(("memory", _render_live(live)) for live in result.live),
        ("reuse verified", verified),
    ]
    if counted:
        items += [(name.replace("_", " "), format_count(count)) for name, count in sorted(result.counters.items())]
    return pairs(items)


def peers(*connect: str, models: bool = False, bootstrap: Bootstrap = None, context: Context) -> None:
    """List connected peers, and nodes on the local network.

    Args:
        connect: addresses to connect to first, /ip4/…/p2p/….
        models: show each member's models, and how they compare with those here; loads models that are not known yet.
    """

    def render(result: PeersResult) -> str:
        table = render_peer_models(result) if models else render_peers(result)
        return "\n\n".join(part for part in (table, "" if models else _render_neighbours(result)) if part)

    result = context.run("peers", PeersRequest(list(connect), models), PeersResult, network_bootstrap=bootstrap)
    context.output.result(result, render)
    if not result.peers:
        context.output.message(nobody_connected(result, time.time()))
    if result.removed:
        context.output.message(removed_text(result.removed))
    if result.discovery and not result.neighbours and not models:
        context.output.message(f"no neighbours; discovery {result.discovery}; why: kvnet doctor --network")


def nobody_connected(result: PeersResult, now_s: float) -> str:
    """What to do where no peer is connected: those that were paired before are not paired again."""
    if not result.discovery:
        return "no peers connected, and no node runs here: kvnet node start"
    if result.away:
        return away_text([(each.name, each.seen) for each in result.away], now_s)
    return (
        "no peers connected: kvnet invite --device here and "
        f"{elsewhere('kvnet join -')} on the other machine pair them; kvnet doctor --network says more"
    )


_STATES = {
    "member": "shares a namespace",
    "stranger": "shares no namespace",
    "found": "not tried yet",
    "unreachable": "does not answer",
    "other version": "speaks another version",
    "no session": "opens no session",
}


def _render_neighbours(result: PeersResult) -> str:
    """Nodes on the local network, and what makes one a member."""
    rows = [
        (entry.peer, _STATES.get(entry.state, entry.state), " ".join(entry.addresses)) for entry in result.neighbours
    ]
    if not rows:
        return ""
    table = columns(rows, ("NEIGHBOUR", "STATE", "ADDRESSES"))
    strange = any(entry.state == "stranger" for entry in result.neighbours)
    return f"{table}\n\nto share with a neighbour: {JOIN_STEPS}" if strange else table
