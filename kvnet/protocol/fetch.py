"""Fetch: get the chunks of one artifact from whoever has them, and believe nobody.

The machine is told what happens (`chunk_arrived`, `chunk_refused`, `peer_failed`, `on_time`, …) and returns
instructions for its driver. It hashes every chunk itself before it hands it out. It never waits for ever: a peer that
is silent, or slower than the least rate, loses its requests to the next one, and when nobody is left the fetch fails
and says how many chunks are missing.

Blame is exact, because a chunk comes from one peer. A peer that sends one wrong byte is never asked again for this
artifact; one that is slow, busy or gone goes to the end of the queue and may be tried again a few times.

A driver does this: `start`; for each `RequestChunks` send the indices on a chunk stream of that peer; for each answer
call `header_arrived` before it reads the bytes, `bytes_arrived` while it does, `chunk_arrived` with all of them, or
`chunk_refused`; `peer_failed` when the stream breaks; `paused` and `resumed` around the time in which it does not read,
because it keeps a chunk; call `on_time` when `next_deadline()` has come. `DropPeer` means:
close that peer's chunk stream. Events of a peer that was dropped are ignored, so the driver need not race.
"""

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvnet.errors import NotFoundError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import blake3_hash
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import MAX_CHUNKS_PER_REQUEST, RefusalReason


class DropReason(StrEnum):
    """Why a peer is not asked any further; stable, for counters."""

    BAD_CHUNK = "bad_chunk"
    """Its bytes do not match the hash, or have another length: never asked again for this artifact."""
    UNASKED = "unasked"
    """It sent or refused a chunk that was not asked for: never asked again for this artifact."""
    UNKNOWN = "unknown"
    """It says it does not know the artifact."""
    BUSY = "busy"
    """It has too much to do; may be tried again."""
    SILENT = "silent"
    """No byte for too long; may be tried again."""
    SLOW = "slow"
    """Less than the least rate; may be tried again."""
    GONE = "gone"
    """The stream broke; may be tried again."""
    EXHAUSTED = "exhausted"
    """It has refused everything that is still missing."""
    DONE = "done"
    """Nothing is missing any more."""


MISCONDUCT = frozenset({DropReason.BAD_CHUNK, DropReason.UNASKED})
"""Reasons no honest peer gives: whoever keeps scores counts these."""
_RETRIED = frozenset({DropReason.BUSY, DropReason.SILENT, DropReason.SLOW, DropReason.GONE})


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Patience and appetite.

    Attributes:
        idle_s: seconds without a byte from a peer, while chunks are asked for, when nobody else could be asked.
        idle_with_others_s: the same when somebody else could be.
        min_rate_bytes_s: the least rate, over each `rate_window_s`.
        rate_window_s: seconds.
        attempts: how often one peer is tried before it is given up.
        retry_s: seconds before a peer that failed is tried again; doubled each time.
        active_peers: peers asked at the same time.
        start_chunks: chunks asked for at once before a peer has delivered anything.
        window_s: seconds of a peer's measured rate that are kept asked for.
        max_window_bytes: bytes asked for and not yet received, a peer; what a stream must be able to buffer.
    """

    idle_s: float = 10.0
    idle_with_others_s: float = 4.0
    min_rate_bytes_s: float = 16 * 1024
    rate_window_s: float = 8.0
    attempts: int = 3
    retry_s: float = 1.0
    active_peers: int = 1
    start_chunks: int = 2
    window_s: float = 2.0
    max_window_bytes: int = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RequestChunks:
    """Ask this peer for these chunks, in this order, behind those it was asked for already."""

    peer: PeerId
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Stop the stream of this peer; whatever it still sends is not wanted."""

    peer: PeerId
    reason: DropReason


@dataclass(frozen=True, slots=True)
class ChunkVerified:
    """This chunk matched its hash and may be kept."""

    index: int
    data: bytes
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Completed:
    """Every needed chunk was verified."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nobody is left to ask.

    Attributes:
        missing: the chunks that did not come, ascending.
        reasons: why each provider fell away.
    """

    missing: tuple[int, ...]
    reasons: tuple[tuple[PeerId, DropReason], ...]

    @property
    def text(self) -> str:
        """The failure in words."""
        if not self.reasons:
            return f"{len(self.missing):,} chunks are missing and no peer has them"
        counts = {reason: sum(1 for _, other in self.reasons if other is reason) for _, reason in self.reasons}
        why = ", ".join(f"{count} {reason.value}" for reason, count in counts.items())
        return f"{len(self.missing):,} chunks are missing and none of {len(self.reasons)} providers gave them ({why})"


Instruction = RequestChunks | DropPeer | ChunkVerified | Completed | Failed


@dataclass(slots=True)
class _Peer:
    """What is known of one provider."""

    peer: PeerId
    attempts: int = 0
    not_before: float = float("-inf")
    last_reason: DropReason | None = None
    given_up: bool = False
    refused: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)  # asked in an attempt that was given up: may still arrive once
    # While it is active:
    outstanding: dict[int, int] = field(default_factory=dict)
    outstanding_bytes: int = 0
    begun: float = 0.0
    total_bytes: int = 0
    last_byte: float = 0.0
    window_begun: float = 0.0
    window_bytes: int = 0
    part_bytes: int = 0
    paused: bool = False

    def begin(self, now: float) -> None:
        self.attempts += 1
        self.paused = False
        self.begun = self.last_byte = self.window_begun = now
        self.total_bytes = self.window_bytes = self.part_bytes = 0

    def count(self, n_bytes: int, now: float) -> None:
        self.last_byte = now
        self.total_bytes += n_bytes
        self.window_bytes += n_bytes


class FetchMachine:
    """See the module.

    Args:
        entries: the whole chunk list, verified (`kvnet.protocol.chunklist.verify_chunk_list`).
        needed: indices of the chunks to get.
        providers: whom to ask, the best first.
        have: indices held already.
        limits: patience and appetite.

    Raises:
        NotFoundError: a needed chunk is marked absent: nobody can have it.
    """

    def __init__(
        self,
        entries: Sequence[ChunkEntry],
        needed: Iterable[int],
        providers: Iterable[PeerId],
        *,
        have: Container[int] = (),
        limits: FetchLimits | None = None,
    ) -> None:
        self._entries = entries
        self._limits = limits or FetchLimits()
        self._missing = {index for index in needed if index not in have}
        absent = [index for index in self._missing if entries[index].length_bytes == 0]
        if absent:
            raise NotFoundError(
                f"expected every needed chunk to exist, found {len(absent)} that the artifact leaves out"
            )
        self._pending = sorted(self._missing)  # a heap: the chunks nobody is asked for, the lowest index first
        self._peers: dict[PeerId, _Peer] = {}
        self._active: dict[PeerId, _Peer] = {}
        self._ended = False
        for peer in providers:
            self._peers.setdefault(peer, _Peer(peer))

    # --- what the driver reads ---

    @property
    def missing(self) -> int:
        """How many chunks are not verified yet."""
        return len(self._missing)

    @property
    def missing_bytes(self) -> int:
        """How many bytes those have."""
        return sum(self._entries[index].length_bytes for index in self._missing)

    @property
    def ended(self) -> bool:
        """Whether `Completed` or `Failed` was returned; nothing happens after that."""
        return self._ended

    def expected_length(self, peer: PeerId, index: int) -> int | None:
        """The length of a chunk asked of this peer and not yet here; None when nothing of the kind is expected."""
        active = self._active.get(peer)
        return None if active is None else active.outstanding.get(index)

    def next_deadline(self) -> float | None:
        """When `on_time` must be called at the latest; None when no time matters: ended, or all peers are paused."""
        if self._ended:
            return None
        deadlines = [self._peer_deadline(active) for active in self._active.values() if not active.paused]
        if len(self._active) < self._limits.active_peers:
            waiting = (peer for peer in self._peers.values() if self._may_start(peer) and self._wanted_of(peer))
            deadlines += [peer.not_before for peer in waiting]
        return min(deadlines, default=None)

    # --- what happens ---

    def start(self, now: float) -> list[Instruction]:
        """Begin. Nothing to get ends at once with `Completed`, nobody to ask with `Failed`."""
        return self._continue(now)

    def provider_found(self, peer: PeerId, now: float) -> list[Instruction]:
        """Another provider turned up; it goes to the end of the queue. Known ones are not asked twice."""
        if self._ended or peer in self._peers:
            return []
        self._peers[peer] = _Peer(peer)
        return self._continue(now)

    def header_arrived(self, peer: PeerId, index: int, length_bytes: int, now: float) -> list[Instruction]:
        """A peer announces the bytes of a chunk. Read them only when nothing is returned."""
        active = self._active.get(peer)
        if active is None:
            return []
        expected = active.outstanding.get(index)
        if expected is None:
            return self._unexpected(active, index, now)
        if expected != length_bytes:
            return self._drop(active, DropReason.BAD_CHUNK, now)
        active.last_byte = now
        return []

    def bytes_arrived(self, peer: PeerId, n_bytes: int, now: float) -> None:
        """Some bytes of a chunk arrived. Call it for every piece read: it tells a slow peer from a dead one."""
        active = self._active.get(peer)
        if active is not None and n_bytes > 0:
            active.part_bytes += n_bytes
            active.count(n_bytes, now)

    def chunk_arrived(self, peer: PeerId, index: int, data: bytes, now: float) -> list[Instruction]:
        """All bytes of a chunk arrived: it is verified here, or its sender is never asked again."""
        active = self._active.get(peer)
        if active is None:
            return []
        active.count(len(data) - active.part_bytes, now)
        active.part_bytes = 0
        expected = active.outstanding.get(index)
        if expected is None:
            unexpected = self._unexpected(active, index, now)
            active.earlier.discard(index)
            return unexpected
        if len(data) != expected or blake3_hash(data) != self._entries[index].hash:
            return self._drop(active, DropReason.BAD_CHUNK, now)
        del active.outstanding[index]
        active.outstanding_bytes -= expected
        self._missing.discard(index)
        return [ChunkVerified(index, data, peer), *self._continue(now)]

    def chunk_refused(self, peer: PeerId, index: int, reason: str, now: float) -> list[Instruction]:
        """A peer does not send a chunk it was asked for; ``not_held`` concerns that chunk, all else the peer."""
        active = self._active.get(peer)
        if active is None:
            return []
        if index not in active.outstanding:
            unexpected = self._unexpected(active, index, now)
            active.earlier.discard(index)
            return unexpected
        if reason in (RefusalReason.UNKNOWN, RefusalReason.NOT_SERVING):
            return self._drop(active, DropReason.UNKNOWN, now)
        if reason != RefusalReason.NOT_HELD:
            return self._drop(active, DropReason.BUSY, now)
        active.last_byte = now
        active.outstanding_bytes -= active.outstanding.pop(index)
        active.refused.add(index)
        heapq.heappush(self._pending, index)
        return self._continue(now)

    def peer_failed(self, peer: PeerId, now: float) -> list[Instruction]:
        """The stream of a peer broke, or it could not be opened."""
        active = self._active.get(peer)
        return [] if active is None else self._drop(active, DropReason.GONE, now)

    def paused(self, peer: PeerId) -> None:
        """The driver stops reading from a peer, as it has to keep what came: the time that takes is not the peer's."""
        active = self._active.get(peer)
        if active is not None:
            active.paused = True

    def resumed(self, peer: PeerId, now: float) -> None:
        """The driver reads from a peer again; its patience begins anew."""
        active = self._active.get(peer)
        if active is not None:
            active.paused = False
            active.last_byte = active.window_begun = now
            active.window_bytes = 0

    def on_time(self, now: float) -> list[Instruction]:
        """Let time pass: peers that are silent or too slow lose their requests."""
        if self._ended:
            return []
        instructions: list[Instruction] = []
        for active in [active for active in self._active.values() if not active.paused]:
            if now >= active.last_byte + self._idle_s(active):
                instructions += self._drop(active, DropReason.SILENT, now)
            elif now >= active.window_begun + self._limits.rate_window_s:
                # No byte at all is silence, for which there is more patience when nobody else can be asked.
                if 0 < active.window_bytes < self._limits.min_rate_bytes_s * (now - active.window_begun):
                    instructions += self._drop(active, DropReason.SLOW, now)
                else:
                    active.window_begun, active.window_bytes = now, 0
        return instructions + self._continue(now)

    # --- inside ---

    def _unexpected(self, active: _Peer, index: int, now: float) -> list[Instruction]:
        """An answer nobody waits for: a late one of an earlier attempt is ignored once, any other is misconduct."""
        return [] if index in active.earlier else self._drop(active, DropReason.UNASKED, now)

    def _idle_s(self, active: _Peer) -> float:
        others = any(self._may_start(peer) for peer in self._peers.values() if peer is not active)
        return self._limits.idle_with_others_s if others else self._limits.idle_s

    def _peer_deadline(self, active: _Peer) -> float:
        return min(active.last_byte + self._idle_s(active), active.window_begun + self._limits.rate_window_s)

    def _may_start(self, peer: _Peer) -> bool:
        """Whether a peer that is not active has something to give, now or after its pause."""
        return not peer.given_up and peer.peer not in self._active and not peer.refused.issuperset(self._missing)

    def _drop(self, active: _Peer, reason: DropReason, now: float) -> list[Instruction]:
        return [self._end(active, reason, now), *self._continue(now)]

    def _end(self, active: _Peer, reason: DropReason, now: float) -> Instruction:
        del self._active[active.peer]
        for index in active.outstanding:
            heapq.heappush(self._pending, index)
        active.earlier.update(active.outstanding)
        active.outstanding.clear()
        active.outstanding_bytes = 0
        active.last_reason = reason
        if reason in _RETRIED:
            active.given_up = active.attempts >= self._limits.attempts
            active.not_before = now + self._limits.retry_s * 2 ** (active.attempts - 1)
            # To the end of the queue.
            self._peers[active.peer] = self._peers.pop(active.peer)
        elif reason is not DropReason.EXHAUSTED:
            active.given_up = True
        return DropPeer(active.peer, reason)

    def _continue(self, now: float) -> list[Instruction]:
        """Ask for more, start peers, and see whether it is over."""
        if self._ended:
            return []
        instructions: list[Instruction] = []
        for active in list(self._active.values()):
            instructions += self._top_up(active, now)
        if not self._missing:
            self._ended = True
            instructions += [self._end(active, DropReason.DONE, now) for active in list(self._active.values())]
            return [*instructions, Completed()]
        for peer in list(self._peers.values()):
            if len(self._active) >= self._limits.active_peers:
                break
            if self._may_start(peer) and peer.not_before <= now and self._wanted_of(peer):
                peer.begin(now)
                self._active[peer.peer] = peer
                instructions += self._top_up(peer, now)
        if not self._active and not any(self._may_start(peer) for peer in self._peers.values()):
            self._ended = True
            reasons = tuple((peer.peer, peer.last_reason or DropReason.EXHAUSTED) for peer in self._peers.values())
            instructions.append(Failed(tuple(sorted(self._missing)), reasons))
        return instructions

    def _wanted_of(self, peer: _Peer) -> bool:
        return any(index not in peer.refused for index in self._pending)

    def _top_up(self, active: _Peer, now: float) -> list[Instruction]:
        """Ask an active peer for more once half its window is free; let it go when it has nothing to give."""
        window = self._window_bytes(active, now)
        if active.outstanding and active.outstanding_bytes > window // 2:
            return []
        chosen = self._choose(active, window)
        if chosen:
            return [RequestChunks(active.peer, tuple(chosen))]
        if active.outstanding or not self._missing:
            return []
        return [self._end(active, DropReason.EXHAUSTED, now)]

    def _window_bytes(self, active: _Peer, now: float) -> int:
        """How many bytes may be asked for and on their way; 0 before the peer has delivered anything."""
        if active.total_bytes == 0:
            return 0
        elapsed = now - active.begun
        if elapsed <= 0:
            return self._limits.max_window_bytes
        return min(self._limits.max_window_bytes, int(active.total_bytes / elapsed * self._limits.window_s))

    def _choose(self, active: _Peer, window: int) -> list[int]:
        chosen: list[int] = []
        passed_over: list[int] = []
        while self._pending and len(chosen) < MAX_CHUNKS_PER_REQUEST:
            index = self._pending[0]
            if index in active.refused:
                passed_over.append(heapq.heappop(self._pending))
                continue
            length = self._entries[index].length_bytes
            full = active.outstanding_bytes + length > window
            if full and len(active.outstanding) >= self._limits.start_chunks:
                break
            active.outstanding[heapq.heappop(self._pending)] = length
            active.outstanding_bytes += length
            chosen.append(index)
        for index in passed_over:
            heapq.heappush(self._pending, index)
        return chosen
