"""How peers are reached: which addresses to try, side by side, and how long a failure is remembered."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from kvnet.errors import NetworkError, PeerUnreachableError, UsageError
from kvnet.network.interface import Network, ProviderHint
from kvnet.protocol.ids import PeerId, peer_text

_log = logging.getLogger(__name__)

Connection = TypeVar("Connection")

FIRST_PENALTY_S = 10.0
"""How long an address is left alone after its first failure; doubles with each further one."""

MAX_PENALTY_S = 600.0
"""A provider that came back is tried again after at most this long."""

MAX_REMEMBERED = 4096
"""Addresses whose failures are remembered; addresses come from peers, so the memory is bounded."""

STAGGER_S = 0.2
"""Head start of each address over the next (RFC 8305 recommends 250 ms between attempts)."""

MAX_ADDRESSES_PER_PEER = 8
"""Addresses of one peer that are tried; a hint from a peer may list any number."""

BOOTSTRAP_FIRST_RETRY_S = 1.0
"""The first pause after a bootstrap peer did not answer; doubles up to the interval asked for."""


@dataclass(slots=True)
class FailureMemory:
    """Which addresses failed lately; pure, the time comes in as an argument (any monotonic clock, in seconds)."""

    _failures: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)

    def note_failure(self, address: str, now_s: float) -> None:
        """Remember that nobody answered at `address`."""
        count, _ = self._failures.pop(address, (0, 0.0))
        penalty_s = min(FIRST_PENALTY_S * 2.0**count, MAX_PENALTY_S)
        self._failures[address] = (min(count + 1, 16), now_s + penalty_s)
        while len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def note_success(self, address: str) -> None:
        """Forget everything bad about `address`."""
        self._failures.pop(address, None)

    def usable(self, address: str, now_s: float) -> bool:
        """Whether `address` may be tried again; after its time is served an address keeps its count, not its ban."""
        _, until_s = self._failures.get(address, (0, now_s))
        return now_s >= until_s

    def usable_addresses(self, addresses: Sequence[str], now_s: float) -> list[str]:
        """The addresses of `addresses` that may be tried, at most `MAX_ADDRESSES_PER_PEER`, each once."""
        return [a for a in dict.fromkeys(addresses) if self.usable(a, now_s)][:MAX_ADDRESSES_PER_PEER]


async def dial_first(addresses: Sequence[str], dial: Callable[[str], Awaitable[Connection]]) -> Connection:
    """Dial addresses one after the other with a small head start each; the first connection wins.

    Args:
        addresses: what to dial, best first.
        dial: dials one; raises NetworkError when nobody answers there. The others are cancelled when one wins.

    Raises:
        PeerUnreachableError: every one failed; names each address with its reason.
    """
    won: list[Connection] = []
    reasons: list[str] = []

    async with trio.open_nursery() as nursery:

        async def attempt(address: str, failed: trio.Event) -> None:
            try:
                connection = await dial(address)
            except NetworkError as error:
                reasons.append(f"{address}: {error}")
                failed.set()
                return
            won.append(connection)
            nursery.cancel_scope.cancel()

        for address in addresses:
            failed = trio.Event()
            nursery.start_soon(attempt, address, failed)
            with trio.move_on_after(STAGGER_S):
                await failed.wait()
    if not won:
        raise PeerUnreachableError(
            f"expected an answer at one of {len(addresses)} addresses, found none: " + "; ".join(reasons)
        )
    return won[0]


async def connect_any(
    network: Network, hints: Sequence[ProviderHint], *, wanted: int, timeout_s: float = 5.0
) -> list[PeerId]:
    """Dial hints side by side until `wanted` of them are connected, each for at most `timeout_s`.

    Args:
        network: whose connections to use.
        hints: who to try; all are dialled at once, so callers pass a short list.
        wanted: stop after this many.
        timeout_s: limit per hint, in seconds.

    Returns:
        The connected peers, in the order in which they answered; possibly none.
    """
    reached: list[PeerId] = []

    async with trio.open_nursery() as nursery:

        async def dial(hint: ProviderHint) -> None:
            try:
                peer = await network.connect_hint(hint, timeout_s=timeout_s)
            except NetworkError:
                return
            if peer not in reached:
                reached.append(peer)
            if len(reached) >= wanted:
                nursery.cancel_scope.cancel()

        for hint in hints:
            nursery.start_soon(dial, hint)
    return reached


async def keep_connected(
    network: Network, addresses: Sequence[str], *, interval_s: float, timeout_s: float = 5.0
) -> None:
    """Stay connected to the bootstrap peers at `addresses`, for ever.

    A bootstrap peer that starts later, restarts or loses its data is found again within `interval_s`; without this a
    node that started first would stay alone. One that lost its data has lost its key with it and is another peer: what
    is wanted of a bootstrap peer is a way into the DHT, which is a hint and no authority, so whoever proves to be at
    that address will do.

    Args:
        network: whose connections to keep.
        addresses: multiaddrs of the bootstrap peers.
        interval_s: longest pause between attempts, in seconds; the first pauses are shorter.
        timeout_s: limit of one attempt, in seconds.
    """

    async def keep(address: str) -> None:
        pause_s = min(BOOTSTRAP_FIRST_RETRY_S, interval_s)
        target = address
        while True:
            try:
                await network.connect(target, timeout_s=timeout_s)
                pause_s = min(BOOTSTRAP_FIRST_RETRY_S, interval_s)
                # While connected this is only a look at a table, so the check may come often.
                await trio.sleep(min(interval_s, 5.0))
            except NetworkError as error:
                target = _in_place_of(address, error)
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, interval_s)

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(keep, address)


def _in_place_of(address: str, error: NetworkError) -> str:
    """What to dial next for a bootstrap peer: whoever answers at its address, else the peer that was named."""
    other = error.answered_by if isinstance(error, PeerUnreachableError) else None
    if other is None:
        return address
    place = address.rpartition("/p2p/")[0]
    _log.warning("the bootstrap peer at %s has another key than its address says; it is used all the same", place)
    return f"{place}/p2p/{peer_text(PeerId(other))}"


async def connect_first(network: Network, addresses: Sequence[str], *, timeout_s: float = 5.0) -> PeerId:
    """Connect to one peer at whichever of its addresses answers first, also those that failed lately.

    Args:
        network: whose connections to use.
        addresses: of one peer, best first; the caller bounds their number and how often it asks.
        timeout_s: limit per address, in seconds.

    Raises:
        PeerUnreachableError: none of them answers.
    """

    async def dial(address: str) -> PeerId:
        try:
            return await network.connect(address, timeout_s=timeout_s)
        except UsageError as error:
            raise PeerUnreachableError(str(error)) from error

    return await dial_first(addresses, dial)
