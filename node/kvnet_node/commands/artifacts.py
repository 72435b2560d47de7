"""``kvnet list``, ``show``, ``verify``, ``pin``, ``unpin``, ``rm`` and ``gc``."""

import datetime as dt
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from kvnet.errors import IntegrityError, StoreFullError, UsageError
from kvnet_node.commands.offered import list_offered
from kvnet_node.confirming import confirm, require_terminal
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import (
    ArtifactRequest,
    ArtifactSummary,
    CollectRequest,
    CollectResult,
    ListRequest,
    ListResult,
    PinResult,
    RemoveRequest,
    RemoveResult,
    ShowResult,
    VerifyRequest,
    VerifyResult,
)
from kvnet_node.output import Output, columns, escape, format_bytes, format_count, format_counted, pairs

MAX_NEEDED_BY = 3
"""Artifacts that are named which need what was removed; the rest is counted."""

All = Annotated[bool, Parameter(name="--all")]


def list_artifacts(*, peers: bool = False, swarm: str = "", all_: All = False, context: Context) -> None:
    """List the artifacts of this node, newest first; or what members of its swarms share.

    Args:
        peers: list what members hold instead, with the names their publishers gave.
        swarm: with --peers, of this swarm alone; mine for your own machines.
        all_: with --peers, conversations of your other machines too, which have no names.
    """
    if peers:
        list_offered(context, swarm, everything=all_)
        return
    if swarm or all_:
        raise UsageError("expected --swarm and --all with --peers alone", hint="kvnet list --peers")

    def render(result: ListResult) -> str:
        rows = [
            (
                ", ".join(entry.names) or _without_name(entry),
                entry.artifact,
                format_count(entry.tokens),
                format_bytes(entry.bytes),
                " ".join(
                    word
                    for word, shown in (
                        ("own", entry.own),
                        (f"in {entry.scope}", entry.scope not in {"", "mine"}),
                        (f"lossy ({entry.codec})", entry.lossy),
                        ("pinned", entry.pinned),
                        ("incomplete", not entry.complete),
                        ("revoked", entry.revoked),
                    )
                    if shown
                ),
                entry.model,
            )
            for entry in result.artifacts
        ]
        return columns(rows, ("NAME", "ARTIFACT", "TOKENS", "SIZE", "STATE", "MODEL")) if rows else ""

    result = context.run("list", ListRequest(), ListResult)
    context.output.result(result, render)
    begun = [entry for entry in result.artifacts if entry.origin == "interrupted"]
    if begun:
        context.output.message(
            "begun: what an interrupted kvnet add had computed. The same kvnet add goes on from there; kvnet rm with "
            "its hash drops it, and nothing keeps it when room is needed"
        )
    if not result.artifacts:
        context.output.message(
            "no artifacts yet: kvnet add PATH --name NAME makes one; kvnet list --peers shows what members have, "
            "kvnet fetch NAME takes it"
        )


def _without_name(entry: ArtifactSummary) -> str:
    """In place of a name, which has no parentheses: what it is."""
    if entry.origin == "interrupted":
        return f"({entry.adding}, begun)"
    return {"conversation": "(conversation)", "fetch": "(fetched)"}.get(entry.origin, "-")


def show(artifact: str, /, *, context: Context) -> None:
    """Show everything about one artifact.

    Args:
        artifact: full or short hash, NAME or NAME@VERSION.
    """
    context.output.result(context.run("show", ArtifactRequest(artifact), ShowResult), _render_show)


def _render_show(result: ShowResult) -> str:
    created = dt.datetime.fromtimestamp(result.created, tz=dt.UTC).isoformat(sep=" ")
    state = "complete" if result.complete else "incomplete"
    size = f"{format_bytes(result.bytes)}, {result.codec}{' (lossy)' if result.lossy else ''}"
    items = [
        ("artifact", result.artifact),
        ("names", ", ".join(result.names) or "-"),
        ("model", result.model or "not known here"),
        ("tokens", f"{format_count(result.tokens)} in {format_counted(result.blocks, 'block')}"),
        (
            "chunks",
            f"{format_count(result.held_chunks)} of {format_count(result.chunks)} held, {size}",
        ),
        ("state", f"{state}, {'pinned' if result.pinned else 'not pinned'}{', REVOKED' if result.revoked else ''}"),
        ("signer", f"{result.signer_name}, {result.signer}" if result.signer_name else result.signer),
        ("policy", f"{result.policy}: {result.verdict}"),
        ("namespace", f"{result.scope}, {result.namespace}" if result.scope else result.namespace),
        ("created", created),
        ("ticket", result.ticket),
        *((f"producer {key}", value) for key, value in result.producer.items()),
        *((f"fingerprint {key}", value) for key, value in result.fingerprint.items()),
        *(("revoked", said) for said in result.revocations),
        *(("attested", said) for said in result.attestations),
        *(
            ("derived from", f"{source['artifact']} by {source['signer_name'] or source['signer']}")
            for source in result.derived_from
        ),
    ]
    return pairs(items)


def verify(artifact: str = "", /, *, context: Context) -> int:
    """Re-hash what is held; exits with 20 when something does not match, or something pinned is not whole.

    Args:
        artifact: full or short hash, NAME or NAME@VERSION; all artifacts by default.
    """

    def render(result: VerifyResult) -> str:
        bad = "\n".join(f"bad: {chunk}" for chunk in result.bad_chunks)
        missing = f", {format_count(result.missing_chunks)} missing" if result.missing_chunks else ""
        summary = (
            f"{format_counted(result.artifacts, 'artifact')}, {format_counted(result.chunks, 'chunk')}, "
            f"{format_bytes(result.bytes)}: {format_count(len(result.bad_chunks))} bad{missing}"
        )
        return f"{bad}\n{summary}" if bad else summary

    result = context.run("verify", VerifyRequest(artifact), VerifyResult)
    context.output.result(result, render)
    for incomplete in result.incomplete:
        context.output.message(
            f"kvnet fetch {incomplete} gets what is missing from peers; kvnet add of the same files computes it again"
        )
    return IntegrityError.exit_code if result.bad_chunks or result.incomplete_pinned else 0


def pin(artifact: str, /, *, context: Context) -> None:
    """Keep an artifact whatever the quota says.

    Args:
        artifact: full or short hash, NAME or NAME@VERSION.
    """
    show_pin(context.output, context.run("pin", ArtifactRequest(artifact), PinResult))


def unpin(artifact: str, /, *, context: Context) -> None:
    """Let an artifact be removed when room is needed.

    Args:
        artifact: full or short hash, NAME or NAME@VERSION.
    """
    show_pin(context.output, context.run("unpin", ArtifactRequest(artifact), PinResult))


def show_pin(output: Output, result: PinResult) -> None:
    """What was pinned or no longer is, by its names where it has any."""
    record: dict[str, Any] = msgspec.to_builtins(result)
    names = record.pop("names", [])
    verb = "pinned" if result.pinned else "unpinned"
    called = f"{', '.join(names)} ({result.artifact})" if names else result.artifact
    output.result(record, lambda _: f"{verb} {called}")


def remove(artifact: str, /, *, everywhere: bool = False, yes: bool = False, context: Context) -> None:
    """Remove a version of a name, and its artifact with the last name; or an artifact and all its names.

    Args:
        artifact: NAME (its newest version) or NAME@VERSION; or a full or short hash.
        everywhere: from your other machines too, whatever it is called there; asks first.
        yes: do not ask.
    """
    if everywhere and not yes:
        require_terminal("what is removed from all your machines", f"kvnet rm {artifact} --everywhere --yes")
        confirm(
            context,
            f"{artifact} is removed from all your machines, whatever it is called there. Remove it?",
            "not removed",
        )
    result = context.run("rm", RemoveRequest(artifact, everywhere), RemoveResult)
    context.output.result(result, render_removed)
    if everywhere and not (result.told or result.asleep):
        context.output.message("no other machine of yours has joined: kvnet invite --device")


def render_removed(result: RemoveResult) -> str:
    """What is gone, and what is not."""
    gone = ", ".join(result.names)
    if result.removed:
        line = f"removed {f'{gone} and its artifact ' if gone else ''}{result.artifact}"
        lines = [f"{line}, freed {format_bytes(result.freed_bytes)}{_why_it_stays(result)}"]
    elif result.kept_by:
        lines = [f"removed the name {gone}; its artifact stays, as {', '.join(result.kept_by)}"]
    else:
        lines = [f"removed the name {gone}; its artifact was not here any more"]
    if result.told:
        lines.append(f"removed from {', '.join(result.told)} as well")
    if result.asleep:
        lines.append(f"asleep, and remove it when they wake: {', '.join(result.asleep)}")
    if result.remaining:
        verb = "remains" if len(result.remaining) == 1 else "remain"
        lines.append(f"{', '.join(result.remaining)} {verb}")
    return "\n".join(lines)


def _why_it_stays(result: RemoveResult) -> str:
    """Bytes of it that are held still, and for whom; "" when there are none."""
    if not result.stays_bytes:
        return ""
    stays = f"; {format_bytes(result.stays_bytes)} of it stay"
    if not result.needed_by:
        return f"{stays} while something reads them"
    first, more = result.needed_by[:MAX_NEEDED_BY], len(result.needed_by) - MAX_NEEDED_BY
    others = f" and {format_counted(more, 'other')}" if more > 0 else ""
    return f"{stays}, as part of {'; '.join(map(escape, first))}{others}"


def collect_garbage(*, all_: All = False, context: Context) -> None:
    """Remove what is not pinned, least recently used first, until quota and free space are kept; exits with 50 else.

    Args:
        all_: remove everything that is not pinned.
    """

    def render(result: CollectResult) -> str:
        lines = [f"removed {artifact}" for artifact in result.removed]
        held = f"{format_bytes(result.held_bytes)} held of {format_bytes(result.quota_bytes)}"
        return "\n".join([*lines, f"freed {format_bytes(result.freed_bytes)}; {held}"])

    result = context.run("gc", CollectRequest(all_), CollectResult)
    context.output.result(result, render)
    if why := why_not_kept(result):
        raise StoreFullError(
            why,
            hint="kvnet list shows what is pinned: kvnet unpin or kvnet rm lets go of it"
            + ("" if result.pinned == result.artifacts else "; kvnet gc --all removes everything else")
            + "; store.quota_bytes and store.min_free_bytes are settings",
        )


def why_not_kept(result: CollectResult) -> str:
    """Which limit the store does not keep although everything was removed that may be; "" when it keeps both."""
    kept = [
        f"expected at most {format_bytes(result.quota_bytes)} in the store, found {format_bytes(result.held_bytes)}"
        if result.held_bytes > result.quota_bytes
        else "",
        f"expected {format_bytes(result.min_free_bytes)} free on its disk, found {format_bytes(result.free_bytes)}"
        if result.free_bytes < result.min_free_bytes
        else "",
    ]
    if not any(kept):
        return ""
    pinned = f"artifacts pinned: {format_count(result.pinned)} of {format_count(result.artifacts)}"
    return "; ".join(filter(None, [*kept, pinned]))
