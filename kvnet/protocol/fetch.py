"""Fetch: get the chunks of one artifact from whoever has them, and believe nobody.

The machine is told what happens (`chunk_arrived`, `chunk_refused`, `peer_failed`, `on_time`, …) and returns
instructions for its driver. It hashes every chunk itself before it hands it out. It never waits for ever: a peer that
is silent, or slower than the least rate, loses its requests to the next one, and when nobody is left the fetch fails
and says how many chunks are missing.

Several peers are asked at the same time, each for as much as it delivers in `window_s`, so that everybody is busy and
the fast ones do most of the work. When nothing is left to ask for, a peer that is idle takes over what is late
elsewhere: at first as a second copy, within a budget of `duplicate_share`; beyond it the slow peer is let go and its
chunks are asked for anew.

Blame is exact, because a chunk comes from one peer. A peer that sends one wrong byte is never asked again for this
artifact; one that is slow, busy or gone goes to the end of the queue and may be tried again a few times.

A driver does this: `start`; for each `RequestChunks` send the indices on a chunk stream of that peer; for each answer
call `header_arrived` before it reads the bytes, `bytes_arrived` while it does, `chunk_arrived` with all of them, or
`chunk_refused`; `peer_failed` when the stream breaks; `paused` and `resumed` around the time in which it does not read,
because it keeps a chunk; call `on_time` when `next_deadline()` has come. `DropPeer` means:
close that peer's chunk stream. Events of a peer that was dropped are ignored, so the driver need not race.
"""

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvnet.errors import NotFoundError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import BytesLike, ChunkHash, blake3_hash
from kvnet.protocol.fetch_peer import DropReason, FetchPeer, ServiceTimes
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.chunks import MAX_CHUNKS_PER_REQUEST
from kvnet.protocol.messages.refusals import RefusalReason

__all__ = [
    "MISCONDUCT",
    "ChunkOrder",
    "ChunkVerified",
    "Completed",
    "DropPeer",
    "DropReason",
    "Failed",
    "FetchLimits",
    "FetchMachine",
    "Instruction",
    "RequestChunks",
]

MISCONDUCT = frozenset({DropReason.BAD_CHUNK, DropReason.UNASKED})
"""Reasons no honest peer gives: whoever keeps scores counts these."""
_FOUND_SLOW = frozenset({DropReason.SLOW, DropReason.SILENT})
_RETRIED = frozenset({DropReason.BUSY, DropReason.SILENT, DropReason.SLOW, DropReason.GONE})

HEDGE_GAIN = 2.0
"""A second copy is asked for only where it is expected this many times sooner than the first."""

TAKE_OVER_GAIN = 4.0
"""Beyond the budget for second copies, a peer is let go when another is this many times as soon done."""

LOOK_AGAIN_S = 0.25
"""How often late chunks are looked at, when the first look did not move them."""


class ChunkOrder(StrEnum):
    """Which missing chunk is asked for next."""

    FRONT_FIRST = "front_first"
    """The lowest index: somebody waits, and the beginning of a prefix is of use by itself."""
    RAREST_FIRST = "rarest_first"
    """What the fewest providers hold: replication, so that a chunk does not vanish with its last holder."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Patience and appetite.

    Attributes:
        idle_s: seconds without a byte from a peer, while chunks are asked for, when nobody else could be asked.
        idle_with_others_s: the same when somebody else could be.
        min_rate_bytes_s: the least rate, over each `rate_window_s`, while somebody who was not slow could be asked.
        floor_bytes_s: the least rate of anybody: a peer may be told to send slowly, and is then better than none.
        least_share: the least rate as a share of the fastest other peer's.
        rate_window_s: seconds.
        attempts: how often one peer is tried before it is given up.
        retry_s: seconds before a peer that failed is tried again; doubled each time.
        active_peers: peers asked at the same time.
        start_chunks: chunks asked for at once before a peer has delivered anything; one when it failed before.
        window_s: seconds of a peer's measured rate that are kept asked for.
        max_window_bytes: bytes asked for and not yet received, a peer; what a stream must be able to buffer.
        duplicate_share: bytes that may be asked for twice, as a share of all that are needed.
        order: which chunk comes next.
    """

    idle_s: float = 10.0
    idle_with_others_s: float = 2.0
    min_rate_bytes_s: float = 16 * 1024
    floor_bytes_s: float = 256.0
    least_share: float = 0.01
    rate_window_s: float = 8.0
    attempts: int = 3
    retry_s: float = 1.0
    active_peers: int = 4
    start_chunks: int = 2
    window_s: float = 2.0
    max_window_bytes: int = 16 * 1024 * 1024
    duplicate_share: float = 0.05
    order: ChunkOrder = ChunkOrder.FRONT_FIRST


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
    """This chunk matched its hash and may be kept; `data` is what was handed in."""

    index: int
    data: BytesLike
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


class FetchMachine:
    """See the module.

    Args:
        entries: the whole chunk list, verified (`kvnet.protocol.chunklist.verify_chunk_list`).
        needed: indices of the chunks to get.
        providers: whom to ask, the best first.
        have: indices held already.
        limits: patience and appetite.
        holds: what providers say they have; one that is not named may have everything.
        salt: varies the order among equally rare chunks, so that nodes that replicate at once begin at different ones.

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
        holds: Mapping[PeerId, Container[int]] | None = None,
        salt: int = 0,
    ) -> None:
        self._entries = entries
        self._limits = limits or FetchLimits()
        self._salt = salt
        self._missing = {index for index in needed if index not in have}
        absent = [index for index in self._missing if entries[index].length_bytes == 0]
        if absent:
            raise NotFoundError(
                f"expected every needed chunk to exist, found {len(absent)} that the artifact leaves out"
            )
        self._peers: dict[PeerId, FetchPeer] = {}
        self._active: dict[PeerId, FetchPeer] = {}
        self._ended = False
        for peer in providers:
            self._peers.setdefault(peer, FetchPeer(peer, (holds or {}).get(peer)))
        # A heap: the chunks nobody is asked for, the next one first.
        self._pending = [(self._rank(index), index) for index in self._missing]
        heapq.heapify(self._pending)
        self._hedged: set[int] = set()
        self._hedge_budget_bytes = int(self._limits.duplicate_share * self.missing_bytes)
        self._service = ServiceTimes()
        self._looked_s = float("-inf")

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

    def rates_bytes_s(self, now: float) -> dict[PeerId, float]:
        """What each peer that is asked delivers of late, in bytes per second."""
        return {peer: active.rate.bytes_s(now) for peer, active in self._active.items()}

    def expected_length(self, peer: PeerId, index: int) -> int | None:
        """The length of a chunk asked of this peer and not yet here; None when nothing of the kind is expected."""
        active = self._active.get(peer)
        asked = None if active is None else active.outstanding.get(index)
        return None if asked is None else asked.length_bytes

    def next_deadline(self) -> float | None:
        """When `on_time` must be called at the latest; None when no time matters: ended, or all peers are paused."""
        if self._ended:
            return None
        busy = [active for active in self._active.values() if active.outstanding and not active.paused]
        deadlines = [self._peer_deadline(active) for active in busy]
        if len(self._active) < self._limits.active_peers:
            waiting = (peer for peer in self._peers.values() if self._may_start(peer) and self._wanted_of(peer))
            deadlines += [peer.not_before for peer in waiting]
        late_s = self._service.late_s
        if late_s is not None and any(not active.outstanding for active in self._active.values()):
            # Somebody has nothing to do: as soon as something is late elsewhere, it is taken over.
            asked = [one.asked_s for active in busy for index, one in active.outstanding.items() if self._single(index)]
            if asked:
                deadlines.append(max(min(asked) + late_s, self._looked_s + LOOK_AGAIN_S))
        return min(deadlines, default=None)

    # --- what happens ---

    def start(self, now: float) -> list[Instruction]:
        """Begin. Nothing to get ends at once with `Completed`, nobody to ask with `Failed`."""
        return self._continue(now)

    def provider_found(self, peer: PeerId, now: float, holds: Container[int] | None = None) -> list[Instruction]:
        """Another provider turned up; it goes to the end of the queue. Known ones are not asked twice."""
        if self._ended or peer in self._peers:
            return []
        self._peers[peer] = FetchPeer(peer, holds)
        return self._continue(now)

    def holds_changed(self, peer: PeerId, holds: Container[int], now: float) -> list[Instruction]:
        """A known provider says which chunks it has by now."""
        known = self._peers.get(peer)
        if self._ended or known is None:
            return []
        known.holds = holds
        known.refused.clear()
        self._pending = [(self._rank(index), index) for _, index in self._pending]
        heapq.heapify(self._pending)
        return self._continue(now)

    def header_arrived(self, peer: PeerId, index: int, length_bytes: int, now: float) -> list[Instruction]:
        """A peer announces the bytes of a chunk. Read them only when nothing is returned."""
        active = self._active.get(peer)
        if active is None:
            return []
        asked = active.outstanding.get(index)
        if asked is None:
            return self._unexpected(active, index, now)
        if asked.length_bytes != length_bytes:
            return self._drop(active, DropReason.BAD_CHUNK, now)
        active.last_byte = now
        return []

    def bytes_arrived(self, peer: PeerId, n_bytes: int, now: float) -> None:
        """Some bytes of a chunk arrived. Call it for every piece read: it tells a slow peer from a dead one."""
        active = self._active.get(peer)
        if active is not None and n_bytes > 0:
            active.part_bytes += n_bytes
            active.count(n_bytes, now)

    def chunk_arrived(
        self, peer: PeerId, index: int, data: BytesLike, now: float, *, digest: ChunkHash | None = None
    ) -> list[Instruction]:
        """All bytes of a chunk arrived: it is verified here, or its sender is never asked again.

        Args:
            peer: who sent it.
            index: of the chunk.
            data: all of it.
            now: the time.
            digest: BLAKE3 of `data`, when the driver has computed it itself while it read them.
        """
        active = self._active.get(peer)
        if active is None:
            return []
        active.count(len(data) - active.part_bytes, now)
        active.part_bytes = 0
        asked = active.outstanding.get(index)
        if asked is None:
            unexpected = self._unexpected(active, index, now)
            active.earlier.discard(index)
            return unexpected
        if len(data) != asked.length_bytes or (digest or blake3_hash(data)) != self._entries[index].hash:
            return self._drop(active, DropReason.BAD_CHUNK, now)
        active.settle(index)
        self._service.note(now - asked.asked_s)
        if index not in self._missing:
            # The second copy: the other one was sooner.
            return self._continue(now)
        self._missing.discard(index)
        return [ChunkVerified(index, data, peer), *self._continue(now)]

    def window_known(self, peer: PeerId, max_window_bytes: int) -> None:
        """What the channel to a peer can have on its way; until then `FetchLimits.max_window_bytes` holds."""
        known = self._peers.get(peer)
        if known is not None:
            known.max_window_bytes = max_window_bytes

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
        active.settle(index)
        active.refused.add(index)
        self._return(index)
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
            active.resume(now)

    def on_time(self, now: float) -> list[Instruction]:
        """Let time pass: peers that are silent or too slow lose their requests."""
        if self._ended:
            return []
        instructions: list[Instruction] = []
        for active in [each for each in self._active.values() if each.outstanding and not each.paused]:
            if now >= active.last_byte + self._idle_s(active):
                instructions += self._drop(active, DropReason.SILENT, now)
            elif now >= active.window_begun + self._limits.rate_window_s:
                # No byte at all is silence, for which there is more patience when nobody else can be asked.
                if 0 < active.window_bytes < self._least_rate(active, now) * (now - active.window_begun):
                    instructions += self._drop(active, DropReason.SLOW, now)
                else:
                    active.window_begun, active.window_bytes = now, 0
        return instructions + self._continue(now)

    # --- peers: begun with, let go ---

    def _unexpected(self, active: FetchPeer, index: int, now: float) -> list[Instruction]:
        """An answer nobody waits for: a late one of an earlier attempt is ignored once, any other is misconduct."""
        return [] if index in active.earlier else self._drop(active, DropReason.UNASKED, now)

    def _idle_s(self, active: FetchPeer) -> float:
        others = any(self._useful(peer) for peer in self._peers.values() if peer is not active)
        return self._limits.idle_with_others_s if others else self._limits.idle_s

    def _least_rate(self, active: FetchPeer, now: float) -> float:
        others = [each.rate.bytes_s(now) for each in self._active.values() if each is not active and each.rate.known]
        limits = self._limits
        better = any(self._may_start(peer) and peer.last_reason not in _FOUND_SLOW for peer in self._peers.values())
        least = limits.min_rate_bytes_s if better else min(limits.floor_bytes_s, limits.min_rate_bytes_s)
        return max(least, limits.least_share * max(others, default=0.0))

    def _peer_deadline(self, active: FetchPeer) -> float:
        return min(active.last_byte + self._idle_s(active), active.window_begun + self._limits.rate_window_s)

    def _useful(self, peer: FetchPeer) -> bool:
        """Whether a peer may still give something that is missing."""
        return not peer.given_up and any(not peer.lacks(index) for index in self._missing)

    def _may_start(self, peer: FetchPeer) -> bool:
        """Whether a peer that is not active has something to give, now or after its pause."""
        return peer.peer not in self._active and self._useful(peer)

    def _wanted_of(self, peer: FetchPeer) -> bool:
        return any(not peer.lacks(index) for _, index in self._pending)

    def _drop(self, active: FetchPeer, reason: DropReason, now: float) -> list[Instruction]:
        return [self._end(active, reason, now), *self._continue(now)]

    def _end(self, active: FetchPeer, reason: DropReason, now: float) -> Instruction:
        del self._active[active.peer]
        outstanding = list(active.outstanding)
        active.earlier.update(outstanding)
        active.outstanding.clear()
        active.outstanding_bytes = 0
        for index in outstanding:
            self._return(index)
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
        if not self._missing:
            self._ended = True
            dropped = [self._end(active, DropReason.DONE, now) for active in list(self._active.values())]
            return [*dropped, Completed()]
        instructions: list[Instruction] = []
        # Whoever is done soonest gets the next chunk, which is the one that is wanted first.
        for active in sorted(self._active.values(), key=lambda each: each.backlog_s(now)):
            if active.peer in self._active:
                instructions += self._top_up(active, now)
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

    # --- chunks: asked for, given back ---

    def _rank(self, index: int) -> tuple[int, int]:
        """Its place in the order: smaller comes sooner."""
        if self._limits.order is ChunkOrder.FRONT_FIRST:
            return (0, index)
        holders = sum(1 for peer in self._peers.values() if not peer.given_up and not peer.lacks(index))
        # Knuth's multiplicative hash: neighbours end up far apart, and elsewhere for every salt.
        return (holders, (index + self._salt) * 2654435761 % 2**32)

    def _return(self, index: int) -> None:
        """A chunk is no longer asked of somebody; unless another is asked for it too, it is to be asked for again."""
        if index in self._missing and not any(index in each.outstanding for each in self._active.values()):
            self._hedged.discard(index)
            heapq.heappush(self._pending, (self._rank(index), index))

    def _top_up(self, active: FetchPeer, now: float) -> list[Instruction]:
        """Ask an active peer for more once half its window is free; let it go when it has nothing to give."""
        window = self._window_bytes(active, now)
        if active.outstanding and active.outstanding_bytes > window // 2:
            return []
        chosen = self._choose(active, window, now)
        if chosen:
            return [RequestChunks(active.peer, tuple(chosen))]
        if active.outstanding:
            return []
        if not self._useful(active):
            return [self._end(active, DropReason.EXHAUSTED, now)]
        return self._take_over(active, now)

    def _window_bytes(self, active: FetchPeer, now: float) -> int:
        """How many bytes may be asked for and on their way; 0 before the peer has delivered anything."""
        if active.total_bytes == 0:
            return 0
        most = active.max_window_bytes or self._limits.max_window_bytes
        return int(min(most, active.rate.bytes_s(now) * self._limits.window_s))

    def _choose(self, active: FetchPeer, window: int, now: float) -> list[int]:
        chosen: list[int] = []
        passed_over: list[tuple[tuple[int, int], int]] = []
        least = 1 if active.attempts > 1 else self._limits.start_chunks
        while self._pending and len(chosen) < MAX_CHUNKS_PER_REQUEST:
            _, index = self._pending[0]
            if active.lacks(index):
                passed_over.append(heapq.heappop(self._pending))
                continue
            length = self._entries[index].length_bytes
            full = active.outstanding_bytes + length > window
            if full and len(active.outstanding) >= least:
                break
            heapq.heappop(self._pending)
            active.ask(index, length, now)
            chosen.append(index)
        for passed in passed_over:
            heapq.heappush(self._pending, passed)
        return chosen

    # --- what is late elsewhere ---

    def _single(self, index: int) -> bool:
        """Whether an outstanding chunk is missing and asked of one peer only."""
        return index in self._missing and index not in self._hedged

    def _take_over(self, idle: FetchPeer, now: float) -> list[Instruction]:
        """A peer has nothing to do: it takes what is expected last, where that is late and it is much sooner itself."""
        self._looked_s = now
        late_s = self._service.late_s
        if late_s is None:
            return []
        rate = idle.rate.bytes_s(now) if idle.rate.known else 0.0
        found: tuple[float, int, FetchPeer] | None = None
        # While we do not read from a holder, what it sends is late through us.
        for holder in (each for each in self._active.values() if not each.paused):
            for index, left_s in self._left_s(holder, now):
                due = now - holder.outstanding[index].asked_s >= late_s
                if due and self._single(index) and not idle.lacks(index) and (found is None or left_s > found[0]):
                    found = (left_s, index, holder)
        if found is None:
            return []
        left_s, index, holder = found
        length = self._entries[index].length_bytes
        own_s = idle.seconds_for(length, rate) if rate else late_s
        if left_s >= HEDGE_GAIN * own_s and length <= self._hedge_budget_bytes:
            self._hedge_budget_bytes -= length
            self._hedged.add(index)
            idle.ask(index, length, now)
            return [RequestChunks(idle.peer, (index,))]
        if left_s >= TAKE_OVER_GAIN * own_s:
            # Second copies would cost too much; a slow peer costs at most the part of a chunk that it has sent.
            return [self._end(holder, DropReason.SLOW, now), *self._top_up(idle, now)]
        return []

    @staticmethod
    def _left_s(holder: FetchPeer, now: float) -> list[tuple[int, float]]:
        """For each chunk asked of a peer, in order: seconds until it is here, at the peer's rate of late."""
        rate = holder.rate.bytes_s(now)
        left: list[tuple[int, float]] = []
        ahead = -holder.part_bytes
        for index, asked in holder.outstanding.items():
            ahead += asked.length_bytes
            left.append((index, holder.seconds_for(ahead, rate)))
        return left
