"""Provider records on the Kademlia DHT: sending ours, finding others'.

py-libp2p's own calls are not used for this. Its lookup answers from a local cache first (for 48 h, possibly with only
ourselves), keeps what others claim as if it had been told it, repeats peers, cannot dial the closer peers it hears of,
and goes on until it has crawled everything; its announcement says True whatever happened, and repeats all keys at once
every 22 h. What is here speaks the same messages (libp2p kad-dht specification, version 1.0.0).
"""

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht.common import PROTOCOL_ID as DHT_PROTOCOL
from libp2p.kad_dht.kad_dht import KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from kvnet.errors import NetworkError
from kvnet.format.hashes import dht_key
from kvnet.network.dialing import MAX_ADDRESSES_PER_PEER
from kvnet.network.interface import ProvideReport, ProviderHint
from kvnet.network.libp2p.translate import FOREIGN, translate_stream
from kvnet.protocol.dialable import plausible
from kvnet.protocol.ids import MAX_PEER_ID_BYTES, PeerId

_logger = logging.getLogger(__name__)

REPLICATION = 20
"""Kademlia's k: a record goes to this many of the closest servers."""

PARALLEL = 6
"""Servers asked at a time; the specification's alpha is 10, more than two cores gain from."""

QUERY_LIMIT_S = 4.0
"""Dialling one server and getting its answer; a stuck server costs this much and no more."""

ACKNOWLEDGEMENT_LIMIT_S = 2.0
"""How long a server may take to acknowledge a record. Some never do; then it counts as sent. One that drops it (more
than 10 in 10 s from one sender) resets the stream at once, and then it does not."""

MAX_REPLY_BYTES = 256 * 1024
"""A reply names at most 20 providers and 20 closer peers, with a few addresses and a signed record each."""

MAX_PEERS_PER_REPLY = 32
PROVIDE_QUEUE = 64
PROVIDE_WORKERS = 3

MAX_KEYS_HELD = 50_000
"""Keys of other nodes we keep records for; py-libp2p sets no limit."""

PRUNE_INTERVAL_S = 60.0


class Dialer(Protocol):
    """What the records need of the host."""

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""

    def known_addresses(self, peer: PeerId) -> list[str]:
        """Addresses remembered for a peer."""

    async def connect_hint(self, hint: ProviderHint, *, timeout_s: float) -> PeerId:
        """Connect to a peer."""

    async def open_raw(self, peer: PeerId, protocol: str, *, timeout_s: float) -> INetStream:
        """Open a stream to a connected peer."""


@dataclass(slots=True)
class _Walk:
    """The state of one iterative lookup."""

    target: int
    addresses: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    asked: set[PeerId] = field(default_factory=set)
    failed: set[PeerId] = field(default_factory=set)
    providers: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)

    def closest(self) -> list[PeerId]:
        """The k closest servers known and not failed, nearest first."""
        alive = [peer for peer in self.addresses if peer not in self.failed]
        return sorted(alive, key=lambda peer: _coordinate(peer) ^ self.target)[:REPLICATION]

    def next_batch(self) -> list[PeerId]:
        return [peer for peer in self.closest() if peer not in self.asked][:PARALLEL]


class ProviderRecords:
    """Sends and finds provider records.

    Args:
        dialer: makes connections and streams.
        dht: py-libp2p's DHT, which answers others and keeps the routing table.
        host: the host of both.
    """

    def __init__(self, dialer: Dialer, dht: KadDHT, host: BasicHost) -> None:
        self._dialer = dialer
        self._dht = dht
        self._host = host
        self._queue, self._waiting = trio.open_memory_channel[tuple[bytes, ProvideReport | None]](PROVIDE_QUEUE)

    async def run(self) -> None:
        """Send what `provide_soon` was given, and keep other nodes' records within bounds, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(PROVIDE_WORKERS):
                nursery.start_soon(self._provide_all)
            while True:
                await trio.sleep(PRUNE_INTERVAL_S)
                held = self._dht.provider_store.providers
                for key in list(held)[: max(0, len(held) - MAX_KEYS_HELD)]:
                    del held[key]

    def routing_peers(self) -> int:
        """How many peers the routing table holds."""
        return int(self._dht.get_routing_table_size())

    async def note_peer(self, peer: PeerId) -> None:
        """Take a peer we just reached into the routing table, and ask it for those near us, in the background."""
        await self._dht.add_peer(ID(peer))
        if self.routing_peers() < REPLICATION:
            self._dht.manager.run_task(self._look_around)

    async def _look_around(self) -> None:
        walk = await self._walk(self._dialer.peer_id, wanted=None)
        _logger.debug("looked around the DHT: %d servers answered", len(walk.asked - walk.failed))

    # --- sending -----------------------------------------------------------------------------------------------------

    def provide_soon(self, key32: bytes, report: ProvideReport | None) -> None:
        """Queue our record for `key32`.

        The DHT's key is the multihash of those 32 bytes, tagged as BLAKE3. Other implementations reach the same record
        through the CIDv1 (raw) of that multihash, because only the multihash of a CID goes to the DHT.

        Raises:
            NetworkError: the queue is full.
            ValueError: the key is not 32 bytes.
        """
        dht_key(key32)
        try:
            self._queue.send_nowait((key32, report))
        except trio.WouldBlock:
            raise NetworkError(f"expected fewer than {PROVIDE_QUEUE} records waiting to be announced") from None

    async def _provide_all(self) -> None:
        async for key32, report in self._waiting:
            sent_to = 0
            try:
                sent_to = await self._provide(dht_key(key32))
            except FOREIGN:
                _logger.debug("a provider record was not sent", exc_info=True)
            if report is not None:
                report(key32, sent_to)

    async def _provide(self, key: bytes) -> int:
        walk = await self._walk(key, wanted=None)
        servers = [peer for peer in walk.closest() if peer in walk.asked]
        sent_to: list[PeerId] = []
        limit = trio.CapacityLimiter(PARALLEL)

        async def send(peer: PeerId) -> None:
            async with limit:
                with trio.move_on_after(QUERY_LIMIT_S), suppress(NetworkError):
                    await self._exchange(peer, self._record(key), reply_limit_s=ACKNOWLEDGEMENT_LIMIT_S)
                    sent_to.append(peer)

        async with trio.open_nursery() as nursery:
            for peer in servers:
                nursery.start_soon(send, peer)
        return len(sent_to)

    def _record(self, key: bytes) -> Message:
        message = self._message(Message.MessageType.ADD_PROVIDER, key)
        ours = message.providerPeers.add()
        ours.id = bytes(self._dialer.peer_id)
        ours.addrs.extend(address.to_bytes() for address in self._host.get_addrs())
        ours.signedRecord = message.senderRecord
        return message

    # --- finding -----------------------------------------------------------------------------------------------------

    async def find(self, key32: bytes, *, limit: int, timeout_s: float) -> list[ProviderHint]:
        """Peers who say they have what `key32` names, each once, without ourselves.

        What other nodes told us as a DHT server counts too; it was told to us, not cached by us.
        """
        key = dht_key(key32)
        walk = _Walk(_coordinate(key))
        for record in self._dht.provider_store.get_providers(key):
            _note(walk.providers, record.peer_id.to_bytes(), (str(a) for a in record.addrs))
        with trio.move_on_after(timeout_s):
            await self._walk(key, wanted=limit, walk=walk)
        await trio.lowlevel.checkpoint_if_cancelled()
        walk.providers.pop(self._dialer.peer_id, None)
        return [ProviderHint(peer, addresses) for peer, addresses in walk.providers.items()][:limit]

    async def is_announced(self, key32: bytes, *, timeout_s: float) -> bool | None:
        """Whether servers near `key32` name us as a provider; None when none of them answered in time."""
        key = dht_key(key32)
        walk = _Walk(_coordinate(key))
        with trio.move_on_after(timeout_s):
            await self._walk(key, wanted=None, walk=walk)
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._dialer.peer_id in walk.providers:
            return True
        return False if walk.asked - walk.failed else None

    async def _walk(self, key: bytes, *, wanted: int | None, walk: _Walk | None = None) -> _Walk:
        """Ask ever closer servers about `key` until the closest have answered or `wanted` providers are known."""
        walk = walk or _Walk(_coordinate(key))
        for near in self._dht.routing_table.find_local_closest_peers(key, REPLICATION):
            known = PeerId(near.to_bytes())
            walk.addresses[known] = tuple(self._dialer.known_addresses(known))
        while batch := walk.next_batch():
            walk.asked.update(batch)
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(self._ask, peer, key, walk)
            if wanted is not None and len(walk.providers) >= wanted:
                break
        return walk

    async def _ask(self, peer: PeerId, key: bytes, walk: _Walk) -> None:
        reply: Message | None = None
        with trio.move_on_after(QUERY_LIMIT_S), suppress(NetworkError):
            told = plausible(walk.addresses[peer], map(str, self._host.get_addrs()))
            await self._dialer.connect_hint(ProviderHint(peer, told), timeout_s=QUERY_LIMIT_S)
            question = self._message(Message.MessageType.GET_PROVIDERS, key)
            reply = await self._exchange(peer, question, reply_limit_s=QUERY_LIMIT_S)
        if reply is None:
            walk.failed.add(peer)
            self._dht.routing_table.remove_peer(ID(peer))
            return
        await self._dht.add_peer(ID(peer), skip_server_mode_check=True)
        for found, into in ((reply.providerPeers, walk.providers), (reply.closerPeers, walk.addresses)):
            for each in list(found)[:MAX_PEERS_PER_REPLY]:
                _note(into, each.id, _texts(each.addrs))
        walk.addresses.pop(self._dialer.peer_id, None)

    def _message(self, kind: Message.MessageType, key: bytes) -> Message:
        message = Message(type=kind, key=key)
        message.senderRecord, _ = env_to_send_in_RPC(self._host)
        return message

    async def _exchange(self, peer: PeerId, message: Message, *, reply_limit_s: float) -> Message | None:
        """Send one message on a stream of its own and read the answer; None when there is none within the limit.

        Raises:
            NetworkError: the peer did not take it, dropped it, or answered with something else.
        """
        raw = await self._dialer.open_raw(peer, DHT_PROTOCOL, timeout_s=QUERY_LIMIT_S)
        finished = False
        try:
            await raw.write(encode_varint_prefixed(message.SerializeToString()))
            reply: Message | None = None
            with trio.move_on_after(reply_limit_s):
                reply = await self._read(raw, message.type)
            finished = True
        except (*FOREIGN, DecodeError) as error:
            raise translate_stream(error) from error
        finally:
            with trio.CancelScope(shield=True), suppress(*FOREIGN):
                await (raw.close() if finished else raw.reset())
        return reply

    async def _read(self, raw: INetStream, kind: Message.MessageType) -> Message:
        reply = Message()
        reply.ParseFromString(await read_varint_prefixed_bytes_limited(raw, MAX_REPLY_BYTES))
        if reply.type != kind:
            raise ValueError(f"expected a reply of type {kind}, found {reply.type}")
        return reply


def _coordinate(key: bytes) -> int:
    """A key's or peer's place in the DHT's key space."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def _note(into: dict[PeerId, tuple[str, ...]], peer: bytes, addresses: Iterable[str]) -> None:
    """Add what somebody said about a peer, bounded."""
    if not 0 < len(peer) <= MAX_PEER_ID_BYTES:
        return
    suffix = f"/p2p/{ID(peer)}"
    texts = [f"{text.removesuffix(suffix)}{suffix}" for text in addresses]
    known = into.get(PeerId(peer), ())
    into[PeerId(peer)] = tuple(dict.fromkeys((*known, *texts)))[:MAX_ADDRESSES_PER_PEER]


def _texts(addresses: Iterable[bytes]) -> list[str]:
    texts: list[str] = []
    for address in list(addresses)[:MAX_ADDRESSES_PER_PEER]:
        with suppress(Exception):  # the parser's exceptions have no common base; a bad address is left out
            texts.append(str(Multiaddr(address)))
    return texts
