"""One request inside the engine process: who asked, since when, whether it still matters."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvnet.engine.wire import Record


class CancelledRequestError(Exception):
    """The caller no longer wants the answer; nothing is sent."""


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
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Marks it as no longer wanted."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave up."""
        return self._cancelled.is_set()

    def raise_if_cancelled(self) -> None:
        """Raises ``CancelledRequestError`` once the caller gave up."""
        if self.cancelled:
            raise CancelledRequestError


def microseconds(seconds: float) -> int:
    """A duration as it crosses the boundary."""
    return max(0, round(seconds * 1e6))
