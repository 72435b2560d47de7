"""``kvnet node pause`` and ``kvnet node resume``."""

from typing import Annotated

from cyclopts import Parameter

from kvnet_node.guest.policy import parse_duration_s
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import PauseRequest, PauseResult, ResumeRequest, ResumeResult
from kvnet_node.output import format_seconds


def pause(
    *,
    for_: Annotated[str | None, Parameter(name="--for", help="how long, such as 30m, 1h or 2d")] = None,
    context: Context,
) -> None:
    """Serve nothing to peers until it is resumed; own requests go on, and a restart changes nothing."""
    for_s = parse_duration_s(for_) if for_ is not None else None
    result = context.run("node pause", PauseRequest(for_s), PauseResult)

    def render(done: PauseResult) -> str:
        end = f"for {format_seconds(done.left_s)}" if done.left_s is not None else "until kvnet node resume"
        return f"paused {end}; " + ("members are told" if done.running else "no node is running at the moment")

    context.output.result(result, render)


def resume(*, context: Context) -> None:
    """Serve peers again."""
    result = context.run("node resume", ResumeRequest(), ResumeResult)

    def render(done: ResumeResult) -> str:
        if done.why_not:
            return f"not paused, but {done.why_not}: nothing is served for now"
        return "serving" if done.running else "not paused; no node is running at the moment"

    context.output.result(result, render)
