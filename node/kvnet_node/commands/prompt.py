"""``kvnet prompt check``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvnet.errors import UsageError
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import (
    FoundKiller,
    PromptCheckRequest,
    PromptCheckResult,
    PromptReport,
    TextPlace,
)
from kvnet_node.output import columns, escape, format_count

TOO_LITTLE_SHARED = 1
"""Exit code of ``--fail-below`` when less is shared."""


def check(
    *files: Path,
    model: str | None = None,
    fail_below: Annotated[float | None, Parameter(help="exit with 1 when a smaller share than this is shared")] = None,
    context: Context,
) -> int:
    """Show what keeps requests from sharing their beginning with the next ones; nothing is sent or stored.

    Args:
        files: a request body (OpenAI or Anthropic style), a JSON list of them, or a log with one JSON object a line.
            One request is compared with itself at another moment, several each with the one before it.
        model: whose tokenizer and chat template to use; by default the one the request names, or the default.
    """
    from kvnet_node.invocation import absolute, chosen_model

    if not files:
        raise UsageError("expected a file with a request body, found none", hint="kvnet prompt check request.json")
    if fail_below is not None and not 0 < fail_below <= 1:
        raise UsageError(f"--fail-below expects a share above 0 and at most 1, found {fail_below}")
    request = PromptCheckRequest([str(absolute(file)) for file in files], chosen_model(context, model))
    result = context.run("prompt check", request, PromptCheckResult)
    context.output.result(result, render)
    return TOO_LITTLE_SHARED if fail_below is not None and result.share < fail_below else 0


def render(result: PromptCheckResult) -> str:
    """The whole result for a person."""
    head = f"in {result.unit}" + (f" of {result.model}" if result.model else "")
    return "\n\n".join([escape(head), *("\n".join(report_lines(each, result.unit)) for each in result.reports)])


def report_lines(report: PromptReport, unit: str) -> list[str]:
    """One comparison for a person."""
    against = f" after {report.against}" if report.against else ""
    rows = [(each.label, format_count(each.size), format_count(each.shared)) for each in report.sections]
    lines = [
        f"{report.request}{against}: {format_count(report.size)} {unit}",
        *_indented(columns(rows, ("SECTION", unit.upper(), "SHARED")).splitlines()),
        *_indented(divergence_lines(report, unit)),
        *_indented(killer_lines(report.killers)),
    ]
    return [escape(line) for line in lines]


def divergence_lines(report: PromptReport, unit: str) -> list[str]:
    """How much is shared, and where it ends."""
    percent = f"{100 * report.share:.1f} %"
    shared = f"shareable: {format_count(report.common)} of {format_count(report.against_size)} {unit} ({percent})"
    if not report.section:
        return [f"{shared}; nothing before the end varies"]
    where = report.later or report.earlier
    lines = [
        shared,
        f"first that varies: {unit.removesuffix('s')} {format_count(report.common + 1)}, in {report.section}",
    ]
    if report.in_template or where is None:
        lines.append("  the texts of the requests agree there: the chat template makes the difference")
        names = ("rendered before", "rendered now") if report.against else ("rendered another day", "rendered now")
        return lines + [f"  {name}: {_quoted(text)}" for name, text in zip(names, report.rendered, strict=False)]
    lines[-1] += f": {_where(where)}"
    # A single request is compared with itself, what probably varies set to other values.
    names = ("before", "after") if report.against else ("another", "this one")
    return lines + [
        f"  {name}: {_quoted(place.excerpt)}"
        for name, place in zip(names, (report.earlier, report.later), strict=True)
        if place is not None
    ]


def killer_lines(killers: Sequence[FoundKiller]) -> list[str]:
    """What was found, each with its remedy once."""
    lines: list[str] = []
    told: set[str] = set()
    for each in killers:
        state = "taken out" if each.removed else "varies" if each.certain else "likely"
        where = f", {_where(each.place)}" if each.place is not None else ""
        lines.append(escape(f"{state}: {each.title} ({each.killer}): {each.words}{where}"))
        if each.place is not None and not each.removed:
            lines.append(f"  {_quoted(each.place.excerpt)}")
        if each.killer not in told and not each.removed:
            lines.append(f"  next: {each.remedy}")
        told.add(each.killer)
    return lines or ["no known killer found"]


def _where(place: TextPlace) -> str:
    return f"{place.path}, line {place.line}, column {place.column}"


def _quoted(text: str) -> str:
    return f"“{escape(text)}”"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
