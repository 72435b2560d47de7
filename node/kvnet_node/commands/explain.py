"""``kvnet explain``."""

import datetime as dt
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from kvnet_node.commands.prompt import killer_lines, report_lines
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import (
    ExplainedLink,
    ExplainedPlan,
    ExplainedPrompt,
    ExplainedReuse,
    ExplainedStep,
    ExplainRequest,
    ExplainResult,
    Source,
)
from kvnet_node.output import columns, escape, format_bytes, format_count, format_seconds, pairs
from kvnet_node.rates_text import needed_rate

Sections = Annotated[list[str] | None, Parameter(name="--section", help="only this section; may repeat", negative=())]


def explain(request: str = "", /, *, section: Sections = None, context: Context) -> None:
    """Explain one of the running node's last requests: what was reused, and what kept it from sharing more.

    Nothing of it is logged or written to disk; a node remembers its last requests until it ends.

    Args:
        request: its id, as in the header x-kvnet-request, or how that begins; by default the last one.
    """
    result = context.run("explain", ExplainRequest(request, section or []), ExplainResult)
    context.output.result(result, render)


def render(result: ExplainResult) -> str:
    """The whole result for a person."""
    parts = [_head(result)]
    for name, data in result.sections.items():
        lines = RENDERERS[name](data) if name in RENDERERS else pairs((key, str(value)) for key, value in data.items())
        parts.append(f"{escape(name)}\n" + "\n".join(f"  {line}" for line in lines.splitlines()))
    return "\n\n".join(parts)


def _head(result: ExplainResult) -> str:
    moment = dt.datetime.fromtimestamp(int(result.time_s)).astimezone().isoformat(sep=" ")
    items = [
        ("request", result.request),
        ("time", moment),
        ("model", result.model),
        ("endpoint", result.path),
        ("state", f"{result.state} {result.failure}".strip()),
    ]
    if result.total_s:
        items.append(
            ("first token", f"after {format_seconds(result.ttft_s)}, all after {format_seconds(result.total_s)}")
        )
    return pairs(items)


def _reuse(data: dict[str, Any]) -> str:
    reuse = msgspec.convert(data, ExplainedReuse)
    if reuse.note:
        return reuse.note
    lines = [_reused(reuse)]
    if len(reuse.sources) > 1:
        lines += [f"{format_count(each.tokens)} tokens {_from(each)}" for each in reuse.sources]
    if reuse.created_tokens:
        lines.append(f"{format_count(reuse.created_tokens)} tokens newly kept for prompts to come")
    if reuse.verdict:
        lines.append(f"restored state: {reuse.verdict}")
    lines += [f"why not more: {reason}" for reason in reuse.reasons]
    lines += [f"not used: {each.artifact}: {each.text} ({each.code})" for each in reuse.rejected]
    return "\n".join(escape(line) for line in lines)


def _reused(reuse: ExplainedReuse) -> str:
    of = f"{format_count(reuse.reused_tokens)} of {format_count(reuse.prompt_tokens)} tokens"
    if not reuse.reused_tokens:
        return f"{of} reused"
    if reuse.saved_s < 0:
        saved = f", {format_seconds(-reuse.saved_s)} slower than computing them"
    else:
        saved = f", saved about {format_seconds(reuse.saved_s)}" if reuse.saved_s else ""
    if len(reuse.sources) == 1:
        [source] = reuse.sources
        return f"{of} {_from(source, saved)}"
    return f"{of} from {'RAM' if reuse.source == 'ram' else reuse.source}{saved}"


def _from(source: Source, saved: str = "") -> str:
    where = source.peer_name or f"peer {source.peer}" if source.peer else source.source
    return (
        f"from {where} in {format_seconds(source.seconds)} ({format_bytes(source.bytes)}){saved}, "
        f"signed by {source.signed_by}, artifact {source.artifact}"
    )


def _prompt(data: dict[str, Any]) -> str:
    prompt = msgspec.convert(data, ExplainedPrompt)
    report = prompt.report
    if report is None:
        return prompt.note
    if report.against:
        return "\n".join(report_lines(report, "tokens"))
    rows = [(each.label, format_count(each.size)) for each in report.sections]
    lines = [f"{format_count(report.size)} tokens; no earlier request of this model to compare with"]
    return "\n".join([*lines, *pairs(rows).splitlines(), *killer_lines(report.killers)])


def _plan(data: dict[str, Any]) -> str:
    plan = msgspec.convert(data, ExplainedPlan)
    if plan.note:
        return plan.note
    lines = [escape(plan.words)]
    lines += [f"{_step(step)}: {_times(step.expected_s, step.took_s)}" for step in plan.steps]
    lines.append(f"in all: {_times(plan.expected_s, plan.ttft_s)}{', looking included' if plan.ttft_s else ''}")
    if plan.fetched_bytes or plan.ended_early:
        early = "; it was ended early, as computing the rest had become sooner" if plan.ended_early else ""
        came = f"{format_bytes(plan.fetched_bytes)} came, {format_count(plan.fetched_tokens)} tokens could be used"
        lines.append(f"fetched: {came}{early}")
    for other in plan.alternatives:
        steps = ", ".join(_step(step) for step in other.steps)
        lines.append(f"instead, {format_seconds(other.expected_s)}: {steps}")
    return "\n".join(lines)


def _step(step: ExplainedStep) -> str:
    if step.kind == "compute":
        return f"compute tokens {format_count(step.first_token)} to {format_count(step.end_token)}"
    peer = step.peer_name or f"peer {step.peer or 'unknown'}"
    source = f" ({format_bytes(step.bytes)}) from {escape(peer)}" if step.kind == "fetch" else ""
    return f"{step.kind} {format_count(step.end_token)} tokens{source}"


def _times(expected_s: float, took_s: float | None) -> str:
    took = f", took {format_seconds(took_s)}" if took_s is not None else ""
    return f"{format_seconds(expected_s)} expected{took}"


def _link(data: dict[str, Any]) -> str:
    link = msgspec.convert(data, ExplainedLink)
    parts = [link.note] if link.note else [f"this machine: {link.basis}"]
    if link.break_even:
        rows = [
            (
                format_count(each.position),
                each.codec,
                needed_rate(each, "none"),
            )
            for each in link.break_even
        ]
        parts.append(columns(rows, ("AT TOKEN", "CODEC", "FETCHING PAYS FROM")))
    known = [
        (each.name or each.peer, _milliseconds(each.rtt_s), _rate(each.bytes_s), each.verdict) for each in link.peers
    ]
    parts.append(columns(known, ("PEER", "ROUND TRIP", "RATE", "VERDICT")) if known else "no peer is connected")
    return "\n".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds is not None else "not measured"


def _rate(bytes_s: float | None) -> str:
    return f"{format_bytes(int(bytes_s))}/s" if bytes_s is not None else "not measured"


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "reuse": _reuse,
    "plan": _plan,
    "link": _link,
    "prompt": _prompt,
}
"""How each section is put for a person; a section that is not among them is shown as its values."""
