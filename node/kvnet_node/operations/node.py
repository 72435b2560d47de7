"""Operations on the node itself."""

import math
import os
import time

import trio

import kvnet
from kvnet.engine.interface import Engine
from kvnet.errors import EngineError, StoreAwayError, UsageError
from kvnet.store.interface import StoreUsage
from kvnet_node.guest.policy import Why
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import (
    LiveEntry,
    StatusRequest,
    StatusResult,
    StopRequest,
    StopResult,
    WritesEntry,
)
from kvnet_node.operations.swarms import removed_from
from kvnet_node.services import Services
from kvnet_node.writes import Writes

LIVE_ANSWER_S = 1.0
"""How long the status waits for engines to say what they keep in memory."""


async def status(context: OperationContext, request: StatusRequest) -> StatusResult:  # noqa: ARG001
    """How the node is."""
    services = context.services
    usage = await _usage(services)
    model, no_model = await services.engines.default()
    return StatusResult(
        running=context.serving,
        data_dir=str(services.paths.shown or services.paths.data_dir),
        version=kvnet.__version__,
        publisher=services.identity.publisher(),
        peer=services.peer_text,
        policy=services.identity.policy_name,
        artifacts=usage.artifacts if usage is not None else 0,
        held_bytes=usage.held_bytes if usage is not None else 0,
        quota_bytes=usage.quota_bytes if usage is not None else services.config.quota_bytes,
        store_away=services.store.away,
        pid=os.getpid() if context.serving else 0,
        uptime_s=services.uptime_s(),
        addresses=services.addresses(),
        endpoint=services.endpoint,
        bulk=services.bulk_text(),
        peers=len(services.peer_entries()),
        model=model,
        no_model=no_model,
        engines=services.engines.loaded(),
        reuse_verified=services.verified_models(),
        counters=services.counters(),
        ram_only=services.config.ram_only,
        writes=None if services.config.ram_only else _writes(services.writes),
        live=await _live(services.engines.engines()),
        not_serving=_not_serving(services),
        removed=removed_from(services),
        pause_left_s=left_s if 0 < (left_s := services.pause.left_s(time.time())) < math.inf else None,
    )


def _not_serving(services: Services) -> str:
    """Why peers get nothing from this node; "" when they do."""
    if services.guest is not None:
        return services.guest.conduct.why.value
    return Why.PAUSED.value if services.pause.left_s(time.time()) > 0 else ""


async def _live(engines: list[Engine]) -> list[LiveEntry]:
    found: dict[str, LiveEntry] = {}

    async def ask(engine: Engine) -> None:
        try:
            held = await engine.live()
        except EngineError:
            return
        name = engine.info.name
        found[name] = LiveEntry(name, held.n_caches, held.size_bytes, held.cap_bytes)

    with trio.move_on_after(LIVE_ANSWER_S):
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(ask, engine)
    return [found[name] for name in sorted(found)]


async def _usage(services: Services) -> StoreUsage | None:
    """How full the store is; None while its drive is away."""
    try:
        return await services.lane.run(services.store.usage)
    except StoreAwayError:
        return None


def _writes(writes: Writes) -> WritesEntry:
    state = writes.state()
    left_bytes = max(0, int(state.left_bytes))
    day_bytes = writes.budget.day_bytes
    return WritesEntry(day_bytes, left_bytes, state.kept_bytes, state.fetched_bytes, state.named_bytes)


async def stop(context: OperationContext, request: StopRequest) -> StopResult:  # noqa: ARG001
    """End the running node, after this answer is on its way."""
    if not context.serving:
        raise UsageError("expected a running node of this data directory, found none")
    context.services.stop_requested.set()
    return StopResult(os.getpid())
