"""``kvnet model match``, and how peers and their models are shown."""

from collections.abc import Iterable

from kvnet.errors import elsewhere
from kvnet_node.invocation import Context, chosen_model
from kvnet_node.operations.requests import (
    MatchedPeer,
    MatchRequest,
    MatchResult,
    PeerEntry,
    PeerModelEntry,
    PeersResult,
)
from kvnet_node.output import columns, escape, format_bytes, format_seconds

_SHORT = 8
"""Last characters of a peer id, which tell peers apart in a table of models."""


def match(*models: str, no_load: bool = False, context: Context) -> None:
    """Show which models your machines have in common, and what keeps the others apart.

    Args:
        models: names of models here; by default all of them.
        no_load: leave out models that were never loaded, which takes seconds each.
    """
    names = [str(chosen_model(context, name)) for name in models]
    result = context.run("model match", MatchRequest(names, load=not no_load), MatchResult)
    context.output.result(result, render_match)
    if not result.members:
        context.output.message("no member is connected: kvnet peers shows who is there")
    elif not result.models:
        context.output.message("no model is here to compare: kvnet peers --models shows what the others have")
    for peer in result.silent:
        context.output.message(f"{peer} tells of no model: run {elsewhere('kvnet model match')} there too")


def render_match(result: MatchResult) -> str:
    """A line for each model and peer, and what to do about near misses."""
    rows: list[tuple[str, ...]] = []
    for model in result.models:
        if model.unknown:
            rows.append((escape(model.name), "", "not compared", escape(model.unknown)))
        elif not model.peers:
            rows.append((escape(model.name), "", "told by nobody yet" if result.silent else "only here", ""))
        rows += [
            (
                escape(model.name),
                _called(each),
                verdict_words(each.model),
                reason_words(each.model),
            )
            for each in model.peers
        ]
    table = columns(rows, ("MODEL", "PEER", "THE PEER'S STATE IS", "WHY")) if rows else ""
    steps = advice(each.model for model in result.models for each in model.peers)
    return "\n\n".join(part for part in (table, steps) if part)


def _called(peer: MatchedPeer) -> str:
    return escape(peer.name) or f"…{peer.peer[-_SHORT:]}"


def verdict_words(model: PeerModelEntry) -> str:
    """What a verdict means, in words."""
    words = {"exact": "exact", "tolerant": "tolerant", "incompatible": "not usable", "": "no such model here"}
    measured = ", measured" if model.measured else ""
    return words.get(model.verdict, model.verdict) + (measured if model.relation == "same" else "")


def reason_words(model: PeerModelEntry) -> str:
    """Why a verdict is not better."""
    other = f"{escape(model.name)}: " if model.relation == "near" and model.name != model.ours else ""
    return other + escape("; ".join(model.reasons))


def advice(models: Iterable[PeerModelEntry]) -> str:
    """What to do about models that nearly match, each once."""
    found = dict.fromkeys(f"{escape(each.ours)}: {escape(each.advice)}" for each in models if each.advice)
    return "\n".join(found)


def render_peers(result: PeersResult) -> str:
    """The connected peers."""
    rows = [
        (
            entry.name or "-",
            entry.peer,
            ", ".join(map(escape, entry.scopes)) or "nothing",
            _state(entry),
            f"tcp, {entry.chunks or 'no chunks yet'}",
            format_seconds(entry.rtt_s) if entry.rtt_s else "?",
            f"{format_bytes(int(entry.rate_bytes_s))}/s" if entry.rate_bytes_s else "?",
            "banned" if entry.banned else f"{entry.standing:.2f}",
            " ".join(entry.addresses),
        )
        for entry in result.peers
    ]
    headers = ("NAME", "PEER", "SHARES", "STATE", "PATH", "RTT", "RATE", "STANDING", "ADDRESSES")
    return columns(rows, headers) if rows else ""


def _named(model: PeerModelEntry) -> str:
    """A peer's model, and what the same is called here if that is something else."""
    here = f" (here {escape(model.ours)})" if model.relation == "same" and model.ours != model.name else ""
    return f"{escape(model.name)}{here}"


def _state(entry: PeerEntry) -> str:
    return entry.state or "?"


def render_peer_models(result: PeersResult) -> str:
    """What each member has, and how it compares with what is here."""
    rows: list[tuple[str, ...]] = []
    for entry in result.peers:
        who = entry.name or f"…{entry.peer[-_SHORT:]}"
        rows += [(who, _named(each), verdict_words(each), reason_words(each)) for each in entry.models]
        if entry.member and not entry.models:
            why = (
                f"none was loaded there yet: {elsewhere('kvnet model match')} there loads them"
                if entry.tells_models
                else "it does not tell"
            )
            rows.append((who, "", "", why))
    table = columns(rows, ("PEER", "MODEL", "THE PEER'S STATE IS", "WHY")) if rows else ""
    steps = advice(each for entry in result.peers for each in entry.models)
    return "\n\n".join(part for part in (table, steps) if part)
