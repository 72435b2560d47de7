"""Reach whoever has an artifact: the peers that were named, those that are connected, and those the DHT names."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio

from kvnet.errors import KvnetError, NetworkError, NotFoundError, elsewhere
from kvnet.exchange.locating import HEAD_START_S, Located
from kvnet.exchange.node import ExchangeNode
from kvnet.format.hashes import ArtifactHash
from kvnet.network.dialing import connect_any
from kvnet.protocol.ids import PeerId, short_peer_text
from kvnet_node.away_text import last_seen
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.peer_names import known_peer_names
from kvnet_node.operations.swarms import removed_from, seen_s
from kvnet_node.removed_text import removed_text
from kvnet_node.services import Services

BOOTSTRAP_WAIT_S = 3.0
"""How long a short-lived node waits for its bootstrap peers before it asks whoever is there."""

DHT_TIMEOUT_S = 10.0
MAX_DIALS = 8

REACH_AGAIN_S = 3.0
"""How often peers that were named are connected to again, should they have gone, while a fetch is under way."""

LOOK_AGAIN_S = 30.0
"""How often the DHT is asked for more providers meanwhile."""

JOIN_FIRST = (
    f"kvnet join - takes the line that the other machine prints; there: {elsewhere('kvnet invite --device')}, or for a "
    f"colleague {elsewhere('kvnet invite --colleague --swarm NAME')}"
)
"""What to do on a machine that shares a namespace with nobody."""

SAY_S = 0.25
"""How often it is said what is waited for; whoever shows it shows nothing of what is over within a second."""

MAX_NAMED = 3
"""Peers that are named when it is said who is asked."""

T = TypeVar("T")


async def saying(ctx: OperationContext, words: Callable[[], str] | str, work: Callable[[], Awaitable[T]]) -> T:
    """Do something, and say what is waited for as long as it takes."""

    async def say() -> None:
        while True:
            ctx.progress("look up", 0, text=words if isinstance(words, str) else words())
            await trio.sleep(SAY_S)

    return await _beside(work, say)


async def _beside(work: Callable[[], Awaitable[T]], *others: Callable[[], Awaitable[None]]) -> T:
    """Do something, and others until it is done."""
    results: list[T] = []
    failure: KvnetError | None = None
    async with trio.open_nursery() as nursery:
        for other in others:
            nursery.start_soon(other)
        try:
            results.append(await work())
        except KvnetError as error:
            # Out of the nursery it goes as itself, not in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def reach(ctx: OperationContext, node: ExchangeNode, addresses: Sequence[str]) -> None:
    """Connect to the peers that were named; without any, give the bootstrap peers a moment."""
    for address in addresses:
        try:
            await saying(ctx, f"connecting to {address}", partial(node.connect, address))
        except NetworkError as error:
            ctx.warn(f"{address}: {error}")
    if not addresses and ctx.services.bootstrap():
        await saying(
            ctx,
            waiting_words(ctx.services.config.bootstrap),
            partial(node.wait_for_members, BOOTSTRAP_WAIT_S),
        )


def waiting_words(bootstrap: Sequence[str]) -> str:
    """What is waited for while nobody is connected; members are looked for where they were last, too."""
    return "waiting for a member to be reached" + (" through the bootstrap nodes" if bootstrap else "")


async def locate(
    ctx: OperationContext, node: ExchangeNode, artifact: ArtifactHash, addresses: Sequence[str] = ()
) -> Located:
    """Ask the connected peers: their answer is quicker and surer. Where they have none, or are slow, ask the DHT too.

    Args:
        ctx: of the operation.
        node: that asks.
        artifact: its hash.
        addresses: of peers that were named, and connected to if they are there.

    Raises:
        NotFoundError: nobody has it.
        TrustError: it is not used.
    """
    looking = Looking(node, artifact, known_peer_names(ctx.services))
    try:
        return await saying(ctx, looking.words, looking.locate)
    except NotFoundError as error:
        hint = error.hint if looking.asked_anybody else _next_step(ctx, node, addresses)
        away = await _holders_away(ctx.services, node, artifact)
        raise not_found(error.message, hint, away, removed_from(ctx.services), time.time()) from error


def not_found(
    message: str, hint: str, away: Mapping[str, float], removed: Sequence[str], now_s: float
) -> NotFoundError:
    """That nobody has an artifact, and why not, as far as it is known here.

    Args:
        message: what was expected and found.
        hint: what to do where nothing more is known.
        away: what members that hold it and are away are called, and when each was seen, in seconds since 1970, or 0.
        removed: swarms that this machine was removed from.
        now_s: in seconds since 1970.
    """
    if away:
        who = " and ".join(last_seen(name, seen_s, now_s) for name, seen_s in away.items())
        several = len(away) > 1
        message = f"{message}; {who} {'hold it and are' if several else 'holds it and is'} away"
        hint = f"{elsewhere('kvnet node start')} on {'one of them' if several else 'it'}, then the same again"
    if removed:
        hint = f"{removed_text(removed)}; {hint}"
    return NotFoundError(message, hint=hint)


async def _holders_away(services: Services, node: ExchangeNode, artifact: ArtifactHash) -> dict[str, float]:
    """What members are called that say they hold an artifact, and are not connected; when each was, or 0."""
    if services.tables is None:
        return {}
    here = {session.peer for session in node.sessions() if session.slots}
    gone = removed_from(services)
    holders = [
        peer
        for namespace in services.identity.namespaces()
        if namespace.name not in gone
        for peer, entry in services.tables.held(namespace)
        if peer not in here and entry.artifact == bytes(namespace.keyed_artifact(artifact))
    ]
    if not holders:
        return {}
    seen, names = await seen_s(services), known_peer_names(services)
    found = {names.get(peer) or short_peer_text(peer): seen.get(bytes(peer), 0.0) for peer in holders}
    return dict(sorted(found.items(), key=lambda each: -each[1])[:MAX_NAMED])


def _next_step(ctx: OperationContext, node: ExchangeNode, addresses: Sequence[str]) -> str:
    """What to do where there was nobody to ask."""
    if addresses:
        return f"kvnet doctor --network --peer {addresses[0]} says whether it is reached and what it has in common"
    if knows_nobody(ctx.services, node):
        return JOIN_FIRST
    return (
        f"kvnet peers shows who is reachable; {elsewhere('kvnet node start')} on the machine that has it, or --from "
        "ADDR names a peer"
    )


def knows_nobody(services: Services, node: ExchangeNode) -> bool:
    """Whether no other machine can be in a namespace of this node, as far as it knows."""
    files, rosters = services.identity.swarms, services.memberships.rosters
    own = {key.public for key in services.identity.publisher_keys()}
    known = [roster for namespace in files.all() if (roster := rosters.roster(namespace.id)) is not None]
    others = any(member not in own for roster in known for member in roster.members)
    return not (others or files.swarms() or node.sessions() or services.bootstrap())


class Looking:
    """One search for whoever has an artifact, and whom it asks at the moment.

    Args:
        node: that asks.
        artifact: its hash.
        names: of peers, for people.
    """

    def __init__(self, node: ExchangeNode, artifact: ArtifactHash, names: Mapping[PeerId, str]) -> None:
        self._node = node
        self._artifact = artifact
        self._names = names
        self._locator = node.fetcher.locator
        self._connected = self._locator.asked()
        self._asked = self._connected
        self._in_dht = False

    @property
    def asked_anybody(self) -> bool:
        """Whether there was somebody to ask."""
        return bool(self._connected or self._asked)

    def words(self) -> str:
        """Who is asked."""
        named = sorted(self._names.get(peer) or short_peer_text(peer) for peer in self._asked)
        more = len(named) - MAX_NAMED
        who = ", ".join(named[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        asking = [f"asking {who}"] if who else []
        return ", ".join([*asking, "looking in the DHT"] if self._in_dht else asking)

    async def locate(self) -> Located:
        """The first answer.

        Raises:
            NotFoundError: nobody has it.
            TrustError: it is not used.
        """
        found: list[Located] = []
        failures: list[KvnetError] = []
        failed = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask_connected() -> None:
                try:
                    found.append(await self._locator.locate(self._artifact))
                except KvnetError as error:
                    failures.append(error)
                    self._asked -= self._connected
                    failed.set()
                    if isinstance(error, NotFoundError):
                        return
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask_connected)
            with trio.move_on_after(HEAD_START_S):
                await failed.wait()
            try:
                found.append(await self._locate_by_dht())
                nursery.cancel_scope.cancel()
            except KvnetError as error:
                # Nobody new to ask says less than what those said who were asked.
                failures += [error] if self._asked - self._connected or not self._connected else []
        if found:
            return found[0]
        raise failures[-1]

    async def _locate_by_dht(self) -> Located:
        """From whoever the DHT names, and was not asked before."""
        self._in_dht = True
        try:
            await meet_providers(self._node, self._artifact)
        finally:
            self._in_dht = False
        self._asked |= self._locator.asked() - self._connected
        return await self._locator.locate(self._artifact, besides=self._connected)


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
    stay = [partial(_stay_connected, node, address) for address in addresses]
    return await _beside(work, *stay, partial(_look_for_more, node, artifact))


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
