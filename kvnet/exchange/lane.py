"""Where blocking store work runs: one at a time, off the trio loop."""

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import trio

P = ParamSpec("P")
T = TypeVar("T")


class Lane(Protocol):
    """The single ordered place where a kind of blocking work runs."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` and return its result; its exceptions pass through unchanged."""
        ...


class ThreadLane:
    """Runs work in a worker thread, one piece at a time.

    The work is never abandoned half-way: a cancelled caller waits until the current piece is done, so that the
    store never sees two writers.
    """

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(*args, **kwargs)`` in the lane's thread."""
        return await trio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._limiter)


class InlineLane:
    """Runs work in place.

    For simulated time: under an autojumping clock a worker thread makes the clock leap.
    """

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(*args, **kwargs)`` here and now, after one checkpoint."""
        await trio.lowlevel.checkpoint()
        return function(*args, **kwargs)
