"""The last requests, in RAM alone: what ``kvnet explain`` tells about. Never on disk, never in a log."""

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvnet.engine.prompts import PreparedPrompt
from kvnet.exchange.answers import Asked, Finished, Reuse
from kvnet_node.api.failures import ApiFailure
from kvnet_node.prompts.normalise import Removed

MAX_REQUESTS = 100
MAX_BYTES = 64 << 20
"""Of bodies and tokens together; older requests then keep their figures only."""

_TOKEN_BYTES = 36
"""A Python integer and its place in a tuple."""


@dataclass(slots=True)
class LoggedRequest:
    """One request.

    Attributes:
        id: what the client got as ``x-kvnet-request``.
        time_s: when it came, in seconds since 1970.
        path: of the endpoint.
        model: as the client wrote it.
        answered_by: the model that it came to; "" before that.
        asked: what was run; None before that, for a private request, and when it grew too old to be kept.
        removed: what normalising took out.
        reuse: what was reused, without the prompt; None before the answer began.
        prepared: the prompt; None as ``asked``.
        finished: how it ended; None when it did not.
        failure: why it failed, or None.
        cancelled: the client went away before the end.
    """

    id: str
    time_s: float
    path: str
    model: str
    asked: Asked | None = None
    removed: tuple[Removed, ...] = ()
    reuse: Reuse | None = None
    prepared: PreparedPrompt | None = None
    finished: Finished | None = None
    failure: ApiFailure | None = None
    cancelled: bool = False
    private: bool = False
    answered_by: str = ""

    @property
    def size_bytes(self) -> int:
        """RAM its body and tokens take, roughly."""
        body = len(self.asked.body) if self.asked is not None else 0
        return body + (len(self.prepared.tokens) * _TOKEN_BYTES if self.prepared is not None else 0)


_NO_PROMPT = PreparedPrompt((), (), 0, 0)


class RequestLog:
    """The last ``MAX_REQUESTS`` requests, oldest first."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._requests: OrderedDict[str, LoggedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._requests.values()))

    def begin(self, *, time_s: float, path: str, model: str) -> LoggedRequest:
        """Note a request that has come."""
        request = LoggedRequest(f"req-{secrets.token_hex(8)}", time_s, path, model)
        self._requests[request.id] = request
        while len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)
        return request

    def run(self, request: LoggedRequest, asked: Asked, removed: tuple[Removed, ...]) -> None:
        """Note what a request became; of a private one only that there was one."""
        request.removed = removed
        request.private = asked.private
        if not asked.private:
            request.asked = asked
            self._shrink(request)

    def reused(self, request: LoggedRequest, reuse: Reuse) -> None:
        """Note what of it was reused."""
        request.reuse = replace(reuse, prepared=_NO_PROMPT)
        if not request.private:
            request.prepared = reuse.prepared
            self._shrink(request)

    def finish(self, request: LoggedRequest, finished: Finished) -> None:
        """Note how it ended."""
        completed = replace(finished.completed, tokens=()) if request.private else finished.completed
        request.finished = replace(finished, completed=completed, reuse=replace(finished.reuse, prepared=_NO_PROMPT))

    def last(self) -> LoggedRequest | None:
        """The newest request."""
        return next(reversed(self._requests.values()), None)

    def find(self, id_: str) -> LoggedRequest | None:
        """The request of this id, or the only one whose id begins so."""
        found = [request for request in self._requests.values() if request.id.startswith(id_)] if id_ else []
        exact = self._requests.get(id_)
        return exact if exact is not None else found[0] if len(found) == 1 else None

    def _shrink(self, newest: LoggedRequest) -> None:
        total = sum(request.size_bytes for request in self._requests.values())
        for request in self._requests.values():
            if total <= self._max_bytes:
                return
            if request is not newest or request.size_bytes > self._max_bytes:
                total -= request.size_bytes
                request.asked = request.prepared = None
