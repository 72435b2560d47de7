"""``kvnet audit``: what local logs say about prompts sent again. Offline; needs no model and no node."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from kvnet.errors import UsageError
from kvnet_node.audit.auditor import Tally
from kvnet_node.audit.causes import Cause, remedy, title
from kvnet_node.audit.run import Audited
from kvnet_node.events import Progress
from kvnet_node.invocation import Context, absolute
from kvnet_node.output import columns, escape, format_count, format_counted, pairs

SHOWN_SESSIONS = 20


def audit(
    *paths: Path,
    scope: Literal["all", "session"] = "all",
    all_: Annotated[bool, Parameter(name="--all")] = False,
    context: Context,
) -> None:
    """Show how much of what was sent had been sent before, what of it no cache served, and why.

    Reads logs of Claude Code, Codex and Gemini CLI, and logs of requests: a JSON body a line, OpenAI or Anthropic
    style, or an object with request and response. Nothing leaves this machine and no text is kept.

    Args:
        paths: log files or folders of them; by default the places where agents keep theirs.
        scope: what counts as sent before: all that is read, or the same session only.
        all_: show every session.
    """
    from kvnet_node.audit.run import audit as run_audit
    from kvnet_node.audit.run import known_places, log_files

    asked = [absolute(path) for path in paths] or known_places(Path.home(), os.environ)
    files = log_files(asked)
    if not files:
        raise UsageError(
            "expected logs of an agent or of requests, found none"
            + (f" in {asked[0]}" if paths else " on this machine"),
            hint="give a file or folder: kvnet audit PATH",
        )
    result = run_audit(
        files,
        scope=scope,
        on_progress=lambda done, total: context.output.event(Progress("audit", done, total, "bytes")),
    )
    context.output.result(_record(result, asked), lambda _: render(result, every=all_))
    _remarks(context, result)


def _record(result: Audited, asked: list[Path]) -> dict[str, Any]:
    return {
        "type": "audit",
        "paths": [str(path) for path in asked],
        "files": result.files,
        **_numbers(result.total),
        "sessions": [
            {"agent": agent, "session": session, **_numbers(tally)} for agent, session, tally in result.sessions
        ],
        "malformed_lines": sum(each.count for each in result.malformed),
        "malformed": [
            {
                "path": str(each.path),
                "lines": each.count,
                "first": [{"line": line, "reason": reason} for line, reason in each.named],
            }
            for each in result.malformed
        ],
        "unreadable": [{"path": str(path), "reason": reason} for path, reason in result.unreadable],
        "forgotten": result.forgotten,
    }


def _numbers(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "sent_tokens": tally.sent,
        "repeated_tokens": tally.repeated,
        "cached_tokens": tally.cached,
        "avoidable_tokens": tally.avoidable,
        "behind_changes_tokens": tally.behind_changes,
        "estimated_requests": tally.estimated,
        "requests_without_cache_usage": tally.without_cache_usage,
        "causes": [
            {"cause": cause.value, "misses": missed.misses, "tokens": missed.tokens} for cause, missed in _causes(tally)
        ],
    }


def _causes(tally: Tally) -> list[tuple[Cause, Any]]:
    return sorted(tally.causes.items(), key=lambda each: (-each[1].tokens, each[0]))


def render(result: Audited, *, every: bool) -> str:
    """The whole, the causes, and the sessions in which most could be saved."""
    shown = result.sessions if every else result.sessions[:SHOWN_SESSIONS]
    blocks = [_summary(result)]
    if result.total.causes:
        causes = _causes(result.total)
        rows = [
            (cause.value, format_count(missed.misses), format_count(missed.tokens), title(cause))
            for cause, missed in causes
        ]
        helps = [(cause.value, remedy(cause)) for cause, _ in causes]
        blocks.append(columns(rows, ("FIRST CAUSE OF A MISS", "MISSES", "TOKENS", "WHAT IT IS")))
        blocks.append("What helps:\n" + pairs(helps))
    if result.sessions:
        headers = ("SESSION", "AGENT", "REQUESTS", "SENT", "REPEATED", "CACHED", "AVOIDABLE", "FIRST CAUSE")
        blocks.append(columns([_row(*each) for each in shown], headers))
    if len(shown) < len(result.sessions):
        blocks.append(f"{format_counted(len(result.sessions) - len(shown), 'more session')}: --all shows them")
    return "\n\n".join(blocks)


def _summary(result: Audited) -> str:
    total = result.total

    def share(tokens: int) -> str:
        return f"{format_count(tokens)} tokens ({100 * tokens / total.sent if total.sent else 0:.1f} %)"

    of = f"{format_counted(len(result.sessions), 'session')} in {format_counted(result.files, 'file')}"
    estimated = f", {format_count(total.estimated)} of them estimated" if total.estimated else ""
    items = [
        ("sent", f"{format_count(total.sent)} tokens in {format_counted(total.requests, 'request')}{estimated}; {of}"),
        ("repeated", f"{share(total.repeated)}: the beginning of an earlier request"),
        ("cached", f"{share(total.cached)}, as usage says"),
        ("avoidable", f"{share(total.avoidable)}: repeated, and beyond what was cached"),
    ]
    if total.behind_changes:
        items.append(("behind changes", f"{share(total.behind_changes)}: sent before, behind a change without meaning"))
    return pairs(items)


def _row(agent: str, session: str, tally: Tally) -> tuple[str, ...]:
    causes = _causes(tally)
    return (
        session,
        agent,
        format_count(tally.requests),
        format_count(tally.sent) + (" estimated" if tally.estimated else ""),
        format_count(tally.repeated),
        format_count(tally.cached) if tally.without_cache_usage < tally.requests else "unknown",
        format_count(tally.avoidable),
        causes[0][0].value if causes else "-",
    )


def _remarks(context: Context, result: Audited) -> None:
    if not result.total.requests:
        context.output.warning(
            f"no request was recognised in {format_counted(result.files, 'file')}: expected sessions of Claude Code, "
            "Codex or Gemini CLI, or request bodies, one a line"
        )
    if result.total.estimated:
        context.output.message("estimated: no usage says how many tokens, so characters / 4 are counted")
    if result.total.without_cache_usage:
        unknown = format_counted(result.total.without_cache_usage, "request")
        context.output.message(f"{unknown} without usage of a cache count as not cached")
    for broken in result.malformed:
        where = "; ".join(f"line {line}: {reason}" for line, reason in broken.named)
        more = "; …" if broken.count > len(broken.named) else ""
        context.output.warning(
            f"{format_counted(broken.count, 'line')} of {escape(str(broken.path))} not read: {where}{more}"
        )
    for path, reason in result.unreadable:
        context.output.warning(f"{escape(str(path))} could not be read: {escape(reason)}")
    if result.forgotten:
        context.output.message("more text than can be remembered: repeated tokens are at least what is shown")
