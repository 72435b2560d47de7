"""HTTP/1.1 and HTTP/2 over TCP: hypercorn's connections on sockets and with limits of our own.

hypercorn is asked for one connection at a time, because its own server neither limits how many there are nor gives up
on a client that does not read: what it sends is shielded from every cancellation.
"""

import logging
import resource
import socket as stdlib_socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

MAX_CONNECTIONS = 256
"""Open connections. A hundred clients with a few connections each stay below; of more, the longest idle one goes."""
FILES_SHARE = 4
"""Connections take one part in so many of the files this process may have open; store, peers and engines need some."""
SPARED_S = 1.0
"""A connection younger than this, or idle for less, is not closed for another one."""
HEADER_TIMEOUT_S = 20.0
"""For the whole head of a request, and for a connection between two requests."""
SEND_TIMEOUT_S = 30.0
"""A client that takes none of what is sent for this long has gone away."""
MAX_HEADER_BYTES = 64 << 10
MAX_COMING_BYTES = 256 << 20
"""Of request bodies that have not come whole: four of the longest. Beyond that the one that takes longest goes."""
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})

_log = logging.getLogger(__name__)


class _BoundedStream:
    """A TCP connection whose sends end: by the client's reading, or by an error after ``SEND_TIMEOUT_S``.

    It has what hypercorn uses of ``trio.SocketStream``, and no ``do_handshake``, by which hypercorn knows plain TCP.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_TIMEOUT_S) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            await trio.aclose_forcefully(self._stream)
            raise trio.BrokenResourceError("the client stopped reading")

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Connection(TCPServer):
    """A connection that is over once its client has closed it; hypercorn's goes on until its idle time is."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


@dataclass(slots=True, eq=False)
class _Place:
    """What one connection takes up.

    Attributes:
        stream: of the connection.
        idle_since_s: when its last request ended, or the first that is not whole yet began.
        running: requests, those that are still coming included.
        reading: of those, requests that are still coming.
        coming_bytes: what has come of them.
    """

    stream: trio.SocketStream
    idle_since_s: float
    running: int = 0
    reading: int = 0
    coming_bytes: int = 0

    def gives_way(self, latest_s: float) -> bool:
        """Whether nobody waits for an answer here: no request has come whole, and none has just begun to come."""
        return self.running == self.reading and self.idle_since_s <= latest_s


class HttpServer:
    """Serves one ASGI application on listening sockets.

    Args:
        app: the application.
        sockets: bound and listening; closed at the end.
        max_connections: open at a time; by default ``MAX_CONNECTIONS``, or fewer where few files may be open.
        spared_s: see ``SPARED_S``.
        max_coming_bytes: see ``MAX_COMING_BYTES``.
    """

    def __init__(
        self,
        app: Any,
        sockets: Sequence[stdlib_socket.socket],
        *,
        max_connections: int | None = None,
        spared_s: float = SPARED_S,
        max_coming_bytes: int = MAX_COMING_BYTES,
    ) -> None:
        self._app = app
        self._sockets = sockets
        self._max_connections = max_connections or _most_connections()
        self._spared_s = spared_s
        self._max_coming_bytes = max_coming_bytes
        self._places: set[_Place] = set()
        self._config = HypercornConfig()
        self._config.keep_alive_timeout = HEADER_TIMEOUT_S
        self._config.h11_max_incomplete_size = MAX_HEADER_BYTES
        self._config.include_server_header = False
        self._config.errorlog = logging.getLogger("kvnet_node.api.hypercorn")
        self._config.accesslog = None

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; connections that are open then are closed, whatever they are doing."""
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in self._sockets]
        self._context = WorkerContext(None)
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(trio.serve_listeners, self._serve, [listener])
                nursery.start_soon(self._cut_at_the_end)
                task_status.started()
        finally:
            for listener in listeners:
                await trio.aclose_forcefully(listener)

    async def _serve(self, stream: trio.SocketStream) -> None:
        if len(self._places) >= self._max_connections and not self._close_an_idle_one():
            await trio.aclose_forcefully(stream)
            return
        place = _Place(stream, trio.current_time())
        self._places.add(place)
        try:
            with suppress(OSError):
                stream.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
            app = ASGIWrapper(_typed(self._watched(place)))
            await _Connection(app, self._config, self._context, ConnectionState({}), _typed(_BoundedStream(stream)))
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away in the middle of something
        except* Exception as failures:  # noqa: BLE001 - one connection is never the node's end
            _log.error("a connection failed; it is closed", exc_info=failures)
        finally:
            self._places.discard(place)
            await trio.aclose_forcefully(stream)

    def _close_an_idle_one(self) -> bool:
        """Make room: of the connections without a whole request the one that has been so for longest ends.

        One between two requests goes before one that sends a request: slowly sent bodies must keep nobody out.
        """
        latest_s = trio.current_time() - self._spared_s
        idle = [place for place in self._places if place.gives_way(latest_s)]
        if not idle:
            return False
        self._close(min(idle, key=lambda place: (place.reading > 0, place.idle_since_s)))
        return True

    def _bound_coming(self) -> None:
        """Keep what has come of bodies that are not whole within bounds; one alone is bounded by its reader."""
        reading = [place for place in self._places if place.reading]
        while len(reading) > 1 and sum(place.coming_bytes for place in reading) > self._max_coming_bytes:
            longest = min(reading, key=lambda place: place.idle_since_s)
            reading.remove(longest)
            self._close(longest)

    def _close(self, place: _Place) -> None:
        self._places.discard(place)
        # Its tasks see the end of it and are gone soon after.
        place.stream.socket.close()

    def _watched(self, place: _Place) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            coming = scope["type"] == "http" and scope["method"] not in _WITHOUT_BODY
            if not place.running:
                place.idle_since_s = trio.current_time()
            place.running += 1
            place.reading += coming

            come_bytes = 0

            def has_come() -> None:
                nonlocal coming, come_bytes
                place.reading -= coming
                place.coming_bytes -= come_bytes
                coming, come_bytes = False, 0

            async def receiving() -> Any:
                nonlocal come_bytes
                message = await receive()
                come_bytes += (n_bytes := len(message.get("body", b"")))
                place.coming_bytes += n_bytes
                if not message.get("more_body", False):
                    has_come()
                self._bound_coming()
                return message

            try:
                await self._app(scope, receiving, send)
            finally:
                has_come()
                place.running -= 1
                place.idle_since_s = trio.current_time()

        return app

    async def _cut_at_the_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            # What hypercorn sends is shielded from this cancellation; with its socket it ends.
            for place in self._places:
                place.stream.socket.close()


def _most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // FILES_SHARE))


def _typed(value: Any) -> Any:
    """Values whose types hypercorn names more narrowly than it uses them."""
    return value
