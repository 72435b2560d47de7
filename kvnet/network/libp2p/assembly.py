"""Puts py-libp2p's host together as this project needs it: what it offers, how much it takes, what must not end it."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht.kad_dht import KadDHT
from libp2p.network import swarm as swarm_module
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.rcmgr import ResourceLimits, ResourceManager
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport

from kvnet.network.libp2p.addresses import advertised_addresses
from kvnet.network.libp2p.connections import quietly, swarm_of
from kvnet.network.libp2p.muxer import SafeMuxers
from kvnet.network.libp2p.ports import BoundSocket
from kvnet.network.libp2p.transport import BoundTcp

_logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 640
"""Connections in all; room for a few hundred silent ones beside the honest, below common limits on open files."""

HANDSHAKE_LIMIT_S = 5.0
"""A connection that has not finished its handshake by then is closed: silent ones must not use up the limit."""

DHT_REQUEST_LIMIT_S = 20.0
"""How long a peer may hold one of the DHT server's 12 places."""


class _NoAutoConnector(AutoConnector):
    """Dials nobody. The stock one dials every peer it has heard of until half of all connections are used."""

    async def maybe_connect(self) -> None:
        """Leave things as they are."""
        await trio.lowlevel.checkpoint()


def build_host(pair: Any, bound: Mapping[str, BoundSocket], nursery: trio.Nursery) -> BasicHost:
    """A host that listens where `bound` says and dials nobody by itself; its listeners run in `nursery`."""
    # Every dial would wait this long for a failure even after it succeeded; the constant has no setting.
    swarm_module._HAPPY_EYEBALLS_DELAY = 0.0
    noise = NoiseTransport(pair, noise_privkey=new_x25519_key_pair().private_key)
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE_PROTOCOL: noise},  # the default would also offer plaintext
        transports=[BoundTcp(bound, nursery)],
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections_per_peer=3,
            inbound_upgrade_timeout=HANDSHAKE_LIMIT_S,
            outbound_upgrade_timeout=HANDSHAKE_LIMIT_S,
        ),
        resource_manager=_resource_manager(),
        addrs_factory=advertised_addresses,
        disable_identify_address_discovery=True,
        enable_metrics=False,  # its queue has no reader, and a full one hangs every dial
    )
    if not isinstance(host, BasicHost):
        raise TypeError(f"expected a BasicHost from py-libp2p 0.8.1, found {type(host).__name__}")
    swarm = swarm_of(host)
    swarm.upgrader.muxer_multistream = SafeMuxers()
    swarm.auto_connector = _NoAutoConnector(swarm)
    swarm.retry_config = RetryConfig(max_retries=0)  # we decide ourselves what is tried again, and when
    return host


def _resource_manager() -> ResourceManager:
    # Memory limits look at the whole machine's memory and the circuit breaker refuses everybody: both off.
    return ResourceManager(
        limits=ResourceLimits(max_connections=2 * MAX_CONNECTIONS, max_streams=4096),  # counts each connection twice
        connection_limits=ConnectionLimits(
            max_pending_inbound=MAX_CONNECTIONS,
            max_pending_outbound=64,
            max_established_inbound=MAX_CONNECTIONS,
            max_established_outbound=MAX_CONNECTIONS,
            max_established_per_peer=8,
            max_established_total=MAX_CONNECTIONS,
        ),
        enable_metrics=False,
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
    )


def guard_handlers(host: BasicHost) -> None:
    """Catch what escapes any stream handler, py-libp2p's own included, before it ends the process.

    A peer that negotiates with bytes that are not UTF-8 makes py-libp2p 0.8.1 itself raise there.
    """
    unguarded = swarm_of(host).common_stream_handler

    async def guarded(stream: INetStream) -> None:
        try:
            await unguarded(stream)
        except Exception:
            _logger.debug("a stream ended with an error; it is reset", exc_info=True)
            await quietly(stream.reset)()

    swarm_of(host).set_stream_handler(guarded)


def dht_handler(dht: KadDHT) -> Callable[[INetStream], Awaitable[None]]:
    """The DHT server's handler, with a limit in time: without one a silent peer keeps one of 12 places for good."""

    async def handle(stream: INetStream) -> None:
        with trio.move_on_after(DHT_REQUEST_LIMIT_S) as scope:
            await dht.handle_stream(stream)
        if scope.cancelled_caught:
            await quietly(stream.reset)()
        # A peer that asks is a server too, but at its first request identify has not yet told us its addresses, and
        # py-libp2p then leaves it out of the routing table; by now it has.
        await dht.add_peer(stream.muxed_conn.peer_id, skip_server_mode_check=True)

    return handle
