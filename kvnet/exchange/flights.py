"""Requests that want the same artifact at the same time share one fetch of it.

One of them does the work, the others wait for it, each no longer than its own deadline. When the one that works is
cancelled, one that waits takes over, with what has arrived; when its work fails, it has failed for all of them.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.events import FetchProgress

T = TypeVar("T")
V = TypeVar("V")

Watch = Callable[[FetchProgress], None]
"""Told how somebody else's fetch goes."""


class Patience(Protocol):
    """How long somebody waits for another's fetch."""

    def scope(self) -> trio.CancelScope:
        """A new scope that ends when it is not worth waiting any longer."""
        ...

    def judge(self, event: FetchProgress) -> None:
        """Judge how it goes; the last scope may end at once, or later than it would have."""
        ...


@dataclass(slots=True)
class _Turn(Generic[T]):
    """Somebody's attempt; neither result nor error when it was cancelled."""

    done: trio.Event = field(default_factory=trio.Event)
    results: list[T] = field(default_factory=list)
    error: KvnetError | None = None


class Shared(Generic[T]):
    """A piece of work that one task does for all that want it at the time."""

    def __init__(self) -> None:
        self._turn: _Turn[T] | None = None
        self._watches: list[Watch] = []

    def tell(self, event: FetchProgress) -> None:
        """The one that works tells those that wait how it goes."""
        for watch in tuple(self._watches):
            watch(event)

    async def get(self, work: Callable[[], Awaitable[T]], patience: Patience | None = None) -> tuple[T, bool] | None:
        """The result, and whether it was made here; ``None`` when patience ended first.

        Args:
            work: done unless somebody is at it.
            patience: how long to wait for somebody else's; for ever without.

        Raises:
            KvnetError: the work failed, here or where it was done.
        """
        while self._turn is not None:
            turn = self._turn
            if not await self._wait(turn, patience):
                return None
            if turn.error is not None:
                raise turn.error
            if turn.results:
                return turn.results[0], False
        return await self._work(work), True

    async def _wait(self, turn: _Turn[T], patience: Patience | None) -> bool:
        if patience is None:
            await turn.done.wait()
            return True
        self._watches.append(patience.judge)
        try:
            with patience.scope() as scope:
                await turn.done.wait()
        finally:
            self._watches.remove(patience.judge)
        return not scope.cancelled_caught

    async def _work(self, work: Callable[[], Awaitable[T]]) -> T:
        turn = self._turn = _Turn[T]()
        try:
            result = await work()
        except KvnetError as error:
            turn.error = error
            raise
        else:
            turn.results.append(result)
            return result
        finally:
            self._turn = None
            turn.done.set()


class Flights(Generic[V]):
    """One ``V`` for each key that somebody is interested in, forgotten when nobody is any more.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._flights: dict[Hashable, tuple[V, int]] = {}

    @contextmanager
    def join(self, key: Hashable) -> Iterator[V]:
        """The one for this key, as long as the context lasts."""
        flight, users = self._flights.get(key) or (self._make(), 0)
        self._flights[key] = (flight, users + 1)
        try:
            yield flight
        finally:
            flight, users = self._flights.pop(key)
            if users > 1:
                self._flights[key] = (flight, users - 1)
