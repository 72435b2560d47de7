"""Connections of py-libp2p: whether one lives, and how it is ended without waiting for a peer that is stuck."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from libp2p.abc import INetConn
from libp2p.host.basic_host import BasicHost
from libp2p.network.swarm import Swarm

from kvnet.network.libp2p.muxer import SafeYamux
from kvnet.network.libp2p.translate import FOREIGN


def quietly(close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """A call that closes something and that nothing interrupts or makes fail."""

    async def closing() -> None:
        with trio.CancelScope(shield=True), suppress(*FOREIGN):
            await close()

    return closing


def is_alive(connection: INetConn) -> bool:
    """Whether bytes may still pass over it."""
    muxed = connection.muxed_conn
    return not connection.is_closed and (not isinstance(muxed, SafeYamux) or muxed.is_alive)


async def abort(connection: INetConn) -> None:
    """Close its socket, whatever the peer does."""
    if isinstance(connection.muxed_conn, SafeYamux):
        await quietly(connection.muxed_conn.abort)()


async def abort_all(swarm: Swarm) -> None:
    """Close every socket: a cancelled py-libp2p stops closing at the first one."""
    for connection in swarm.get_connections():
        await abort(connection)


def swarm_of(host: BasicHost) -> Swarm:
    """What holds the connections of a host."""
    swarm = host.get_network()
    if not isinstance(swarm, Swarm):
        raise TypeError(f"expected a Swarm from py-libp2p 0.8.1, found {type(swarm).__name__}")
    return swarm
