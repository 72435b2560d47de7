"""HTTP/1.1 and HTTP/2 over TCP: hypercorn's connections on sockets and with limits of our own.

hypercorn is asked for one connection at a time, because its own server neither limits how many there are nor gives up
on a client that does not read: what it sends is shielded from every cancellation.
"""

import logging
import socket as stdlib_socket
from collections.abc import Sequence
from contextlib import suppress
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
"""Open connections; more are closed at once. A hundred clients with a few connections each stay below."""
HEADER_TIMEOUT_S = 20.0
"""For the whole head of a request, and for a connection between two requests."""
SEND_TIMEOUT_S = 30.0
"""A client that takes none of what is sent for this long has gone away."""
MAX_HEADER_BYTES = 64 << 10

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


class HttpServer:
    """Serves one ASGI application on listening sockets.

    Args:
        app: the application.
        sockets: bound and listening; closed at the end.
    """

    def __init__(self, app: Any, sockets: Sequence[stdlib_socket.socket]) -> None:
        self._app = ASGIWrapper(_typed(app))
        self._sockets = sockets
        self._streams: set[trio.SocketStream] = set()
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
        if len(self._streams) >= MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        self._streams.add(stream)
        try:
            with suppress(OSError):
                stream.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
            await TCPServer(self._app, self._config, self._context, ConnectionState({}), _typed(_BoundedStream(stream)))
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away in the middle of something
        except* Exception as failures:  # noqa: BLE001 - one connection is never the node's end
            _log.error("a connection failed; it is closed", exc_info=failures)
        finally:
            self._streams.discard(stream)
            await trio.aclose_forcefully(stream)

    async def _cut_at_the_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            # What hypercorn sends is shielded from this cancellation; with its socket it ends.
            for stream in self._streams:
                stream.socket.close()


def _typed(value: Any) -> Any:
    """Values whose types hypercorn names more narrowly than it uses them."""
    return value
