"""Drive the fetch machine: open channels, read chunks, hand verified ones to the store."""

import math
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from kvnet.errors import KvnetError, NetworkError, NotFoundError
from kvnet.exchange.events import PeerPart
from kvnet.exchange.provider import Delivered, Provider
from kvnet.exchange.transport import ChunkChannel, ChunkTransport
from kvnet.format.chunks import ChunkEntry, VerifiedChunk
from kvnet.network.arrivals import BytesArrived, ChunkArrived, ChunkEvent
from kvnet.network.news import News
from kvnet.protocol.fetch import (
    ChunkVerified,
    Completed,
    DropPeer,
    Failed,
    FetchLimits,
    FetchMachine,
    Instruction,
    RequestChunks,
)
from kvnet.protocol.fetch_limits import limits_for
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.chunks import ChunkHeader, ChunkRefused, GetChunks
from kvnet.protocol.pace import Pace, Purpose

Sink = Callable[[Sequence[VerifiedChunk], PeerId], Awaitable[None]]
"""Keeps verified chunks of one peer. Their bytes are valid until it returns: a channel uses their memory again, so
whoever keeps them keeps a copy."""


Join = Callable[[Provider], Awaitable[None]]
"""Takes in a provider that turned up, or that is in another session than before."""


class Sources(Protocol):
    """What is known of providers while a fetch is under way."""

    async def have(self, peer: PeerId) -> Container[int] | None:
        """Which chunks a peer says that it has; ``None`` when it does not say. Does not raise."""
        ...

    async def arriving(self, join: Join) -> None:
        """Have providers join as they turn up, until cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Manner:
    """How a fetch goes about it.

    Attributes:
        purpose: what for; told to providers.
        limits: patience and appetite; order, and patience with nobody left, follow from the purpose.
        first: chunks that are asked for before all others.
        pace: what may arrive, shared with other fetches.
    """

    purpose: Purpose = Purpose.INTERACTIVE
    limits: FetchLimits | None = None
    first: Container[int] = ()
    pace: Pace = field(default_factory=lambda: Pace(0.0))


@dataclass(slots=True)
class _Active:
    scope: trio.CancelScope
    wanted: trio.MemorySendChannel[tuple[int, ...]]


@dataclass(slots=True)
class _Outcome:
    failed: Failed | None = None
    sink_error: BaseException | None = None
    delivered: dict[PeerId, Delivered] = field(default_factory=dict)


class ChunkFetch:
    """One fetch of some chunks of one artifact.

    Args:
        transport: how chunk bytes get here.
        entries: the whole chunk list, verified.
        needed: indices to get.
        providers: whom to ask, the best first.
        sink: keeps verified chunks.
        manner: how.
        sources: of more providers, and what they hold; without, nobody joins, and each may have all until it refuses.
    """

    def __init__(
        self,
        transport: ChunkTransport,
        entries: Sequence[ChunkEntry],
        needed: Iterable[int],
        providers: Sequence[Provider],
        sink: Sink,
        manner: Manner | None = None,
        *,
        sources: Sources | None = None,
    ) -> None:
        manner = manner or Manner()
        self._purpose = manner.purpose
        self._pace = manner.pace
        self._sources = sources
        self._transport = transport
        self._entries = entries
        self._providers = {provider.peer: provider for provider in providers}
        self._machine = FetchMachine(
            entries,
            needed,
            list(self._providers),
            limits=limits_for(manner.purpose, manner.limits),
            first=manner.first,
        )
        self._sink = sink
        self._active: dict[PeerId, _Active] = {}
        self._paths: dict[PeerId, str] = {}
        self._began_s: dict[PeerId, float] = {}
        self._outcome = _Outcome()
        self._changed = News()
        self._wakes_s = math.inf
        self._heard_s = trio.current_time()

    @property
    def delivered(self) -> Mapping[PeerId, Delivered]:
        """What each peer has delivered so far."""
        return self._outcome.delivered

    def waited_s(self) -> dict[PeerId, float]:
        """Seconds since chunks were first asked of those who were not left since and brought none."""
        now_s = trio.current_time()
        return {
            peer: now_s - self._began_s[peer]
            for peer in self._active
            if peer not in self.delivered or not self.delivered[peer].n_chunks
        }

    @property
    def waiting(self) -> bool:
        """Whether nobody is asked just now: it waits for a provider to be back, or for another."""
        return self._machine.waiting

    @property
    def silent_s(self) -> float:
        """Seconds since a byte last came, or it began."""
        return trio.current_time() - self._heard_s

    def parts(self) -> tuple[PeerPart, ...]:
        """What each peer has brought so far, and how fast it is just now."""
        rates = self._machine.rates_bytes_s(trio.current_time())
        peers = dict.fromkeys([*self._outcome.delivered, *self._active])
        return tuple(
            PeerPart(peer, each.n_bytes, each.n_chunks, rates.get(peer, 0.0), each.path or self._paths.get(peer, ""))
            for peer in peers
            for each in [self._outcome.delivered.get(peer, Delivered())]
        )

    async def run(self) -> None:
        """Fetch everything needed.

        Raises:
            NotFoundError: nobody is left to ask; says how many chunks are missing. What arrived is in the sink.
            StoreError: the sink could not keep a chunk.
        """
        async with trio.open_nursery() as nursery:
            for peer in self._providers:
                nursery.start_soon(self._learn_holds, peer, nursery)
            if self._sources is not None:
                nursery.start_soon(self._sources.arriving, partial(self._join, nursery))
            await self._apply(self._machine.start(trio.current_time()), nursery)
            while not self._machine.ended and self._outcome.sink_error is None:
                self._wakes_s = self._deadline_s()
                with trio.move_on_at(self._wakes_s) as scope:
                    await self._changed.wait()
                # What arrives moves the deadline on without waking anybody.
                if scope.cancelled_caught and self._deadline_s() <= trio.current_time():
                    await self._apply(self._machine.on_time(trio.current_time()), nursery)
            nursery.cancel_scope.cancel()
        if self._outcome.sink_error is not None:
            raise self._outcome.sink_error
        if self._outcome.failed is not None:
            raise NotFoundError(
                self._outcome.failed.text, hint="Try again when a peer that has it is reachable (`kvnet peers`)."
            )

    async def _apply(self, instructions: list[Instruction], nursery: trio.Nursery) -> None:
        """Do as the machine says: ask for more first, so that it comes while what has come is kept."""
        verified: dict[PeerId, list[VerifiedChunk]] = {}
        for instruction in instructions:
            match instruction:
                case RequestChunks(peer, indices):
                    self._request(peer, indices, nursery)
                case ChunkVerified(index, data, peer):
                    chunk = VerifiedChunk(index, data, self._entries[index].hash)
                    verified.setdefault(peer, []).append(chunk)
                case DropPeer(peer, reason):
                    self._delivered_by(peer).dropped = reason.value
                    active = self._active.pop(peer, None)
                    if active is not None:
                        active.scope.cancel()
                case Failed():
                    self._outcome.failed = instruction
                case Completed():
                    pass
        try:
            for peer, chunks in verified.items():
                await self._keep(chunks, peer)
        finally:
            # Also when the peer whose task this is was let go just now.
            if self._machine.ended or self._outcome.sink_error is not None or self._deadline_s() < self._wakes_s:
                self._changed.tell()

    def _deadline_s(self) -> float:
        deadline = self._machine.next_deadline()
        return deadline if deadline is not None else math.inf

    def _request(self, peer: PeerId, indices: tuple[int, ...], nursery: trio.Nursery) -> None:
        active = self._active.get(peer)
        if active is None:
            # Never full: the machine asks only for what fits its window, and each request is taken at once.
            send, receive = trio.open_memory_channel[tuple[int, ...]](1024)
            active = self._active[peer] = _Active(trio.CancelScope(), send)
            self._began_s.setdefault(peer, trio.current_time())
            nursery.start_soon(self._serve_peer, peer, active, receive, nursery)
        active.wanted.send_nowait(indices)

    def _delivered_by(self, peer: PeerId) -> Delivered:
        return self._outcome.delivered.setdefault(peer, Delivered(path=self._paths.get(peer, "")))

    async def _keep(self, chunks: Sequence[VerifiedChunk], peer: PeerId) -> None:
        """Chunks that are verified are kept even when their peer is dropped meanwhile."""
        delivered = self._delivered_by(peer)
        before = delivered.n_bytes
        delivered.seconds = trio.current_time() - self._began_s[peer]
        delivered.n_chunks += len(chunks)
        delivered.n_bytes += sum(len(chunk.data) for chunk in chunks)
        self._machine.paused(peer)
        with trio.CancelScope(shield=True):
            try:
                await self._sink(chunks, peer)
            except KvnetError as error:
                self._outcome.sink_error = error
        await self._hold_back(peer, delivered.n_bytes - before)
        self._machine.resumed(peer, trio.current_time())

    async def _hold_back(self, peer: PeerId, n_bytes: int) -> None:
        """Read no further from a peer until what it sent has had its time; TCP tells it to wait."""
        if self._pace.limited:
            await trio.sleep(self._pace.spread_s(peer, self._purpose, n_bytes, trio.current_time()))

    async def _join(self, nursery: trio.Nursery, provider: Provider) -> None:
        """A provider turned up, or is in another session: requests name that one from now on."""
        self._providers[provider.peer] = provider
        nursery.start_soon(self._learn_holds, provider.peer, nursery)
        await self._apply(self._machine.provider_found(provider.peer, trio.current_time()), nursery)

    async def _learn_holds(self, peer: PeerId, nursery: trio.Nursery) -> None:
        """Nobody waits for this: what a peer does not have it refuses, only later."""
        holds = await self._sources.have(peer) if self._sources is not None else None
        if holds is not None:
            await self._apply(self._machine.holds_changed(peer, holds, trio.current_time()), nursery)

    async def _serve_peer(
        self,
        peer: PeerId,
        active: _Active,
        wanted: trio.MemoryReceiveChannel[tuple[int, ...]],
        nursery: trio.Nursery,
    ) -> None:
        """Talk to one peer until it is dropped; whatever breaks is told to the machine and nobody else."""
        channel: ChunkChannel | None = None
        try:
            with active.scope:
                try:
                    channel = await self._transport.open(peer)
                    self._paths[peer] = channel.path
                    if channel.window_bytes:
                        self._machine.window_known(peer, channel.window_bytes)
                    async with trio.open_nursery() as pair:
                        pair.start_soon(self._send_requests, channel, peer, wanted)
                        await self._read_answers(channel, peer, nursery)
                except* KvnetError:
                    await self._apply(self._machine.peer_failed(peer, trio.current_time()), nursery)
        finally:
            # Also when the whole fetch is over or cancelled.
            if channel is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                    await channel.aclose()

    async def _send_requests(
        self, channel: ChunkChannel, peer: PeerId, wanted: trio.MemoryReceiveChannel[tuple[int, ...]]
    ) -> None:
        async for indices in wanted:
            provider = self._providers[peer]
            await channel.request(
                GetChunks(
                    session=provider.session,
                    slot=provider.slot,
                    artifact=provider.artifact,
                    indices=indices,
                    purpose=self._purpose,
                ),
                {index: self._entries[index].length_bytes for index in indices},
            )

    async def _read_answers(self, channel: ChunkChannel, peer: PeerId, nursery: trio.Nursery) -> None:
        while True:
            events = await channel.next_events()
            now = trio.current_time()
            instructions: list[Instruction] = []
            unwanted = False
            for event in events:
                told = self._told(peer, event, now)
                instructions += told
                unwanted |= bool(told) and isinstance(event, ChunkHeader)
                if any(isinstance(each, DropPeer) and each.peer == peer for each in told):
                    break  # what follows belongs to nothing that was asked
            await self._apply(instructions, nursery)
            for event in events:
                if isinstance(event, ChunkArrived):
                    channel.finished(event.data)
            if unwanted:
                await trio.lowlevel.checkpoint()
                raise NetworkError("the peer sent a chunk that was not asked for")

    def _told(self, peer: PeerId, event: ChunkEvent, now: float) -> list[Instruction]:
        """What the machine says to something that happened."""
        if isinstance(event, BytesArrived | ChunkArrived):
            self._heard_s = now
        match event:
            case BytesArrived(n_bytes):
                self._machine.bytes_arrived(peer, n_bytes, now)
                return []
            case ChunkArrived(index, data, digest):
                told = self._machine.chunk_arrived(peer, index, data, now, digest=digest)
                if not any(isinstance(each, ChunkVerified) for each in told):
                    self._delivered_by(peer).surplus_bytes += len(data)
                return told
            case ChunkRefused():
                return self._machine.chunk_refused(peer, event.index, event.reason, now)
            case ChunkHeader():
                return self._machine.header_arrived(peer, event.index, event.length_bytes, now)
