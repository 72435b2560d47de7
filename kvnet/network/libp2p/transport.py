"""TCP over listening sockets that we opened ourselves."""

import logging
from collections.abc import Mapping
from typing import Any

import trio
from libp2p.abc import IRawConnection
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

from kvnet.network.libp2p.ports import BoundSocket
from kvnet.network.places import host_of, port_of, split_scoped

_logger = logging.getLogger(__name__)


class BoundTcp(TCP):
    """The TCP transport, listening only on sockets from `kvnet.network.libp2p.ports`.

    Args:
        bound: the listening sockets, by multiaddr text.
        nursery: where connections are accepted.
    """

    def __init__(self, bound: Mapping[str, BoundSocket], nursery: trio.Nursery) -> None:
        super().__init__()
        self._bound = bound
        self._nursery = nursery

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Dial as py-libp2p does, which leaves out the interface that a link-local address needs.

        Its own streams do not know either where an IPv6 peer is, and then no bulk connection can be dialled there.
        """
        text = str(maddr)
        if split_scoped(text) is None:
            dialled = await super().dial(maddr)
            if isinstance(dialled, RawConnection) and isinstance(dialled.stream, TrioTCPStream):
                return RawConnection(_TcpStream(dialled.stream.stream), True)
            return dialled
        try:
            stream = await trio.open_tcp_stream(host_of(text), int(port_of(text)))
        except OSError as error:
            raise OpenConnectionError(f"expected an answer at {text}, found: {error}") from error
        return RawConnection(_TcpStream(stream), True)

    def create_listener(self, handler_function: Any) -> "BoundListener":
        """A listener that hands accepted connections to `handler_function`."""
        return BoundListener(self._bound, self._nursery, handler_function)


class BoundListener(TCPListener):
    """Accepts connections on sockets that listen already, in our nursery instead of a system task."""

    def __init__(self, bound: Mapping[str, BoundSocket], nursery: trio.Nursery, handler: Any) -> None:
        super().__init__(handler)
        self._bound = bound
        self._home = nursery
        self._addresses: list[Multiaddr] = []
        self._scope = trio.CancelScope()
        self._ended: list[trio.Event] = []

    async def listen(self, maddr: Multiaddr) -> None:
        """Start to accept on the socket bound for `maddr`."""
        bound = self._bound[str(maddr)]
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound.socket))
        await self._home.start(self._accept, listener)
        self._addresses.append(maddr)

    async def _accept(self, listener: trio.SocketListener, *, task_status: Any) -> None:
        ended = trio.Event()
        self._ended.append(ended)
        try:
            with self._scope:
                await trio.serve_listeners(self._serve, [listener], task_status=task_status)
        finally:
            ended.set()

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            await self.handler(_TcpStream(stream))
        except Exception:
            _logger.debug("an incoming connection failed", exc_info=True)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Where this listener listens."""
        return tuple(self._addresses)

    async def close(self) -> None:
        """Stop accepting; connections that were accepted end as well."""
        self._scope.cancel()
        for ended in self._ended:
            await ended.wait()
        self._addresses.clear()


class _TcpStream(TrioTCPStream):
    """A TCP stream that also knows where an IPv6 peer is; py-libp2p expects address and port alone."""

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port, *_ = self.stream.socket.getpeername()
        except OSError:
            return None
        return str(host).partition("%")[0], int(port)
