"""Virtual time: what happens next, and when. Two clocks of one kind, so that one can be held against the other."""

import heapq
from collections.abc import Callable
from typing import Any, Protocol

import simpy

Call = Callable[..., None]


class Clock(Protocol):
    """Calls things at their time; of several at the same time, the one that was asked for first."""

    now: float

    def at(self, at_s: float, call: Call, *args: Any) -> None:
        """Call `call(*args)` at `at_s`, which is not before now."""
        ...

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due before `end_s`, and be there."""
        ...

    def run(self) -> None:
        """Let everything happen."""
        ...


class HeapClock:
    """A heap of calls: what a million requests run on. See decision 75."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._count = 0

    def at(self, at_s: float, call: Call, *args: Any) -> None:
        """See `Clock`."""
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call, args))

    def run_until(self, end_s: float) -> None:
        """See `Clock`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < end_s:
            self.now, _, call, args = pop(heap)
            call(*args)
        self.now = max(self.now, end_s)

    def run(self) -> None:
        """See `Clock`."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call, args = pop(heap)
            call(*args)


class SimpyClock:
    """The same on simpy's event queue."""

    def __init__(self) -> None:
        self._env = simpy.Environment()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return float(self._env.now)

    @now.setter
    def now(self, value: float) -> None:
        self._env.run(until=value)

    def at(self, at_s: float, call: Call, *args: Any) -> None:
        """See `Clock`."""
        due = self._env.timeout(max(0.0, at_s - self._env.now))
        assert due.callbacks is not None  # noqa: S101 - it has not happened yet
        due.callbacks.append(lambda _event: call(*args))

    def run_until(self, end_s: float) -> None:
        """See `Clock`."""
        if end_s > self._env.now:
            self._env.run(until=end_s)

    def run(self) -> None:
        """See `Clock`."""
        self._env.run()
