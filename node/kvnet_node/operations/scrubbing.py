"""Scrub: read the store through, and get back from peers what went bad."""

import trio

from kvnet.format.hashes import artifact_text
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.reaching import BOOTSTRAP_WAIT_S


async def scrub(ctx: OperationContext, request: r.ScrubRequest) -> r.ScrubResult:  # noqa: ARG001
    """Read everything at full speed: somebody waits."""
    services = ctx.services
    began_s = trio.current_time()
    if services.node is not None and not ctx.serving and services.bootstrap():
        await services.node.wait_for_members(BOOTSTRAP_WAIT_S)

    async def progress(done_bytes: int, total_bytes: int) -> None:
        ctx.progress("scrub", done_bytes, total_bytes, unit="bytes")

    found = await services.scrubber().scrub(progress=progress)
    return r.ScrubResult(
        artifacts=found.artifacts,
        chunks=found.chunks,
        bytes=found.size_bytes,
        bad_chunks=found.bad,
        repaired=[artifact_text(artifact) for artifact in found.repaired],
        damaged=[artifact_text(artifact) for artifact in found.damaged if artifact not in found.repaired],
        seconds=trio.current_time() - began_s,
    )
