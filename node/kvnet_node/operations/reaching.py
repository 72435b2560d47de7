"""Reach whoever has an artifact: the peers that were named, those that are connected, and those the DHT names."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import trio

from kvnet.errors import KvnetError, NetworkError, NotFoundError
from kvnet.exchange.locating import Located
from kvnet.exchange.node import ExchangeNode
from kvnet.format.hashes import ArtifactHash
from kvnet.network.dialing import connect_any
from kvnet_node.operations.context import OperationContext

BOOTSTRAP_WAIT_S = 3.0
"""How long a short-lived node waits for its bootstrap peers before it asks whoever is there."""

DHT_TIMEOUT_S = 10.0
MAX_DIALS = 8

REACH_AGAIN_S = 3.0
"""How often peers that were named are connected to again, should they have gone, while a fetch is under way."""

LOOK_AGAIN_S = 30.0
"""How often the DHT is asked for more providers meanwhile."""

T = TypeVar("T")


async def reach(ctx: OperationContext, node: ExchangeNode, addresses: Sequence[str]) -> None:
    """Connect to the peers that were named; without any, give the bootstrap peers a moment."""
    for address in addresses:
        try:
            await node.connect(address)
        except NetworkError as error:
            ctx.warn(f"{address}: {error}")
    if not addresses and ctx.services.bootstrap():
        await node.wait_for_members(BOOTSTRAP_WAIT_S)


async def locate(ctx: OperationContext, node: ExchangeNode, artifact: ArtifactHash) -> Located:
    """Ask the connected peers first: their answer is quicker and surer; then whoever the DHT names.

    Raises:
        NotFoundError: nobody has it.
        TrustError: it is not used.
    """
    with suppress(NotFoundError):
        return await node.fetcher.locate(artifact)
    found = await meet_providers(node, artifact)
    if found:
        ctx.progress("look up", found, text=f"{found} peers say they have it")
    return await node.fetcher.locate(artifact)


async def meet_providers(node: ExchangeNode, artifact: ArtifactHash) -> int:
    """Have sessions with those whom the DHT names for an artifact, as far as they are there; how many it names."""
    found = await node.providers_of(artifact, timeout_s=DHT_TIMEOUT_S)
    for peer in await connect_any(node.network, found[:MAX_DIALS], wanted=MAX_DIALS):
        await node.open_session(peer)
    return len(found)


async def reaching(
    node: ExchangeNode, addresses: Sequence[str], artifact: ArtifactHash, work: Callable[[], Awaitable[T]]
) -> T:
    """Do something, and stay connected to the peers that were named and look for others that have it meanwhile."""
    results: list[T] = []
    failure: KvnetError | None = None
    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(_stay_connected, node, address)
        nursery.start_soon(_look_for_more, node, artifact)
        try:
            results.append(await work())
        except KvnetError as error:
            # Out of the nursery it goes as itself, not in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def _stay_connected(node: ExchangeNode, address: str) -> None:
    while True:
        await trio.sleep(REACH_AGAIN_S)
        with suppress(KvnetError):
            await node.connect(address)


async def _look_for_more(node: ExchangeNode, artifact: ArtifactHash) -> None:
    pause_s = REACH_AGAIN_S
    while True:
        # A fetch that is soon done needs nobody else.
        await trio.sleep(pause_s)
        pause_s = LOOK_AGAIN_S
        with suppress(KvnetError):
            await meet_providers(node, artifact)
