"""Pausing and resuming what this node does for others."""

import math
import time

from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import PauseRequest, PauseResult, ResumeRequest, ResumeResult


async def pause(context: OperationContext, request: PauseRequest) -> PauseResult:
    """Serve nothing until the time is over, or until it is resumed; also after a restart."""
    services = context.services
    until_s = math.inf if request.for_s is None else time.time() + request.for_s
    services.pause.begin(until_s)
    if services.guest is not None:
        services.guest.apply()
    return PauseResult(context.serving, request.for_s)


async def resume(context: OperationContext, request: ResumeRequest) -> ResumeResult:  # noqa: ARG001
    """Serve again, as far as battery and link allow."""
    services = context.services
    was_paused = services.pause.left_s(time.time()) > 0
    services.pause.end()
    guest = services.guest
    if guest is not None:
        guest.apply()
    return ResumeResult(context.serving, was_paused, guest.conduct.why.value if guest is not None else "")
