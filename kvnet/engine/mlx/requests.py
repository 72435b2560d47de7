"""One request inside the engine process: who asked, since when, whether it still matters."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvnet.engine.wire import Record


class CancelledRequestError(Exception):
    """The caller no longer wants the answer; nothing is sent."""


@dataclass(slots=True)
class _Interest:
    """Whether a request is still wanted, and who wants to know when it no longer is."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False
    watchers: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """A running request.

    Attributes:
        id: the caller's number for it.
        send: puts an event on the way to the caller; never blocks.
        accepted_s: monotonic time at which it was read.
    """

    id: int
    send: Callable[[Record], None]
    accepted_s: float = field(default_factory=time.monotonic)
    _interest: _Interest = field(default_factory=_Interest)

    def cancel(self) -> None:
        """Marks it as no longer wanted."""
        with self._interest.lock:
            self._interest.gone = True
            watchers, self._interest.watchers = self._interest.watchers, []
        for tell in watchers:
            tell()

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Calls ``tell`` once the caller gives up, in the thread that says so; at once when that was before."""
        with self._interest.lock:
            if not self._interest.gone:
                self._interest.watchers.append(tell)
                return
        tell()

    def answered_to(self, send: Callable[[Record], None]) -> "Request":
        """The same request, wanted as long as this one, whose events go to ``send``."""
        return replace(self, send=send)

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave up."""
        return self._interest.gone

    def raise_if_cancelled(self) -> None:
        """Raises ``CancelledRequestError`` once the caller gave up."""
        if self.cancelled:
            raise CancelledRequestError


def microseconds(seconds: float) -> int:
    """A duration as it crosses the boundary."""
    return max(0, round(seconds * 1e6))
