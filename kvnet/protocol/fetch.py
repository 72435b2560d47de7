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

import math
from collections.abc import Container, Iterable, Mapping, Sequence

from kvnet.errors import NotFoundError
from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import BytesLike, ChunkHash, blake3_hash
from kvnet.protocol.fetch_instructions import ChunkVerified, Completed, DropPeer, Failed, Instruction, RequestChunks
from kvnet.protocol.fetch_late import AskTwice, LateChunks, LetGo
from kvnet.protocol.fetch_limits import ChunkOrder, FetchLimits
from kvnet.protocol.fetch_peer import FOUND_SLOW, MISCONDUCT, DropReason, FetchPeer
from kvnet.protocol.fetch_pending import PendingChunks
from kvnet.protocol.fetch_roster import Roster
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.chunks import MAX_CHUNKS_PER_REQUEST
from kvnet.protocol.messages.refusals import RefusalReason

GROWTH = 4
"""How many times what it has delivered a peer may be asked for."""

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


class FetchMachine:
    """See the module.

    Args:
        entries: the whole chunk list, verified (`kvnet.protocol.chunklist.verify_chunk_list`).
        needed: indices of the chunks to get.
        providers: whom to ask, the best first.
        have: indices held already.
        limits: patience and appetite.
        holds: what providers say they have; one that is not named may have everything.
        first: chunks that are asked for before all others, whatever the order: the rest is of no use without them.

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
        first: Container[int] = (),
    ) -> None:
        self._entries = entries
        self._limits = limits or FetchLimits()
        self._missing = {index for index in needed if index not in have}
        absent = [index for index in self._missing if entries[index].length_bytes == 0]
        if absent:
            raise NotFoundError(
                f"expected every needed chunk to exist, found {len(absent)} that the artifact leaves out"
            )
        self._roster = Roster(self._limits, self._missing)
        for peer in providers:
            self._roster.add(peer, (holds or {}).get(peer), 0.0)
        self._active = self._roster.active
        self._started = self._ended = False
        self._pending = PendingChunks(self._missing, self._limits.order, self._roster.peers, first=first)
        self._late = LateChunks(self._missing, int(self._limits.duplicate_share * self.missing_bytes))

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

    @property
    def waiting(self) -> bool:
        """Whether nobody is asked just now: it waits for a provider to be back, or for another."""
        return self._started and not self._ended and not self._active

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
        busy = self._roster.busy()
        deadlines = [self._roster.deadline(active) for active in busy]
        if not self._roster.settled:
            deadlines += [peer.not_before for peer in self._roster.waiting() if self._may_begin(peer)]
        if math.isfinite(self._roster.trial_ends_s):
            deadlines.append(self._roster.trial_ends_s)
        if any(not active.outstanding for active in self._active.values()):
            # Somebody has nothing to do: as soon as something is late elsewhere, it is taken over.
            look_s = self._late.next_look_s(busy)
            deadlines += [] if look_s is None else [look_s]
        patient_until_s = self._roster.patient_until_s
        deadlines += [] if patient_until_s is None else [patient_until_s]
        return min(deadlines, default=None)

    # --- what happens ---

    def start(self, now: float) -> list[Instruction]:
        """Begin. Nothing to get ends at once with `Completed`, nobody to ask with `Failed` unless there is patience."""
        self._started = True
        self._roster.progress_s = now
        return self._continue(now)

    def provider_found(self, peer: PeerId, now: float, holds: Container[int] | None = None) -> list[Instruction]:
        """A provider turned up, or one that was let go came back or has more; it goes to the end of the queue.

        One that sent something wrong is not asked again, and nobody who only ever comes back.
        """
        if self._ended or not self._roster.add(peer, holds, now):
            return []
        self._pending.holders_changed()
        return self._continue(now)

    def holds_changed(self, peer: PeerId, holds: Container[int], now: float) -> list[Instruction]:
        """A known provider says which chunks it has by now."""
        known = self._roster.peers.get(peer)
        if self._ended or known is None:
            return []
        known.holds = holds
        known.refused.clear()
        self._pending.holders_changed()
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
        self._late.service.note(now - asked.asked_s)
        if index not in self._missing:
            # The second copy: the other one was sooner.
            return self._continue(now)
        self._missing.discard(index)
        active.prove()
        self._roster.progress_s = now
        return [ChunkVerified(index, data, peer), *self._continue(now)]

    def window_known(self, peer: PeerId, max_window_bytes: int) -> None:
        """What the channel to a peer can have on its way; until then `FetchLimits.max_window_bytes` holds."""
        known = self._roster.peers.get(peer)
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
            # Who had it a moment ago may have closed the session that was named: there may be another one soon.
            return self._drop(active, DropReason.GONE if active.proven else DropReason.UNKNOWN, now)
        if reason != RefusalReason.NOT_HELD:
            return self._drop(active, DropReason.BUSY, now)
        active.last_byte = now
        active.settle(index)
        active.refused.add(index)
        self._pending.holders_changed()
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
        for active in self._roster.busy():
            # Letting one go may have ended, or begun anew, another.
            reason = self._roster.overdue(active, now) if active.outstanding else None
            if reason is not None:
                instructions += self._drop(active, reason, now)
        return instructions + self._continue(now)

    # --- peers: begun with, let go ---

    def _unexpected(self, active: FetchPeer, index: int, now: float) -> list[Instruction]:
        """An answer nobody waits for: a late one of an earlier attempt is ignored once, any other is misconduct."""
        return [] if index in active.earlier else self._drop(active, DropReason.UNASKED, now)

    def _drop(self, active: FetchPeer, reason: DropReason, now: float) -> list[Instruction]:
        return [self._end(active, reason, now), *self._continue(now)]

    def _end(self, active: FetchPeer, reason: DropReason, now: float) -> Instruction:
        outstanding = self._roster.end(active, reason, now)
        if active.given_up:
            self._pending.holders_changed()
        for index in outstanding:
            self._return(index)
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
        if now >= self._roster.trial_ends_s or not self._roster.settled:
            instructions += self._begin_others(now)
        self._roster.give_another_try(now)
        if self._roster.hopeless(now):
            self._ended = True
            instructions.append(Failed(tuple(sorted(self._missing)), self._roster.reasons()))
        return instructions

    def _begin_others(self, now: float) -> list[Instruction]:
        """Begin with those who wait, where there is room or somebody makes it."""
        instructions: list[Instruction] = []
        waiting = [each for each in self._roster.waiting() if each.not_before <= now]
        wanted = any(map(self._pending.wanted_of, waiting))
        while (spare := self._roster.spare(now, wanted=wanted)) is not None:
            instructions.append(self._end(spare, DropReason.SPARE, now))
        for peer in waiting:
            if self._may_begin(peer):
                self._roster.begin(peer, now)
                instructions += self._top_up(peer, now)
        return instructions

    def _may_begin(self, peer: FetchPeer) -> bool:
        """Whether a peer that may start has work, what nobody is asked for or what may get late, and there is room."""
        wanted = self._pending.wanted_of(peer)
        return (wanted or peer.last_reason not in FOUND_SLOW) and self._roster.place_for(peer, wanted=wanted)

    # --- chunks: asked for, given back ---

    def _return(self, index: int) -> None:
        """A chunk is no longer asked of somebody; unless another is asked for it too, it is to be asked for again."""
        if index in self._missing and not any(index in each.outstanding for each in self._active.values()):
            self._late.returned(index)
            self._pending.push(index)

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
        if not self._roster.useful(active):
            return [self._end(active, DropReason.EXHAUSTED, now)]
        return self._take_over(active, now)

    def _window_bytes(self, active: FetchPeer, now: float) -> int:
        """How many bytes may be asked for and on their way; 0 before the peer has delivered anything.

        No more than `GROWTH` times what it has delivered: the first chunks may come at once and say nothing of the
        rate, and what is asked of one is there for no other who turns up.
        """
        if active.total_bytes == 0:
            return 0
        most = min(active.max_window_bytes or self._limits.max_window_bytes, GROWTH * active.total_bytes)
        return int(min(most, active.rate.bytes_s(now) * self._limits.window_s))

    def _choose(self, active: FetchPeer, window: int, now: float) -> list[int]:
        least = 1 if active.attempts > 1 else self._limits.start_chunks

        def fits(index: int) -> bool:
            length = self._entries[index].length_bytes
            if active.outstanding_bytes + length > window and len(active.outstanding) >= least:
                return False
            active.ask(index, length, now)
            return True

        return self._pending.take(active, MAX_CHUNKS_PER_REQUEST, fits)

    def _take_over(self, idle: FetchPeer, now: float) -> list[Instruction]:
        """A peer has nothing to do: it takes what is late elsewhere."""
        holders = [each for each in self._active.values() if not each.paused]
        match self._late.look(idle, holders, now):
            case AskTwice(index):
                idle.ask(index, self._entries[index].length_bytes, now)
                return [RequestChunks(idle.peer, (index,))]
            case LetGo(holder):
                return [self._end(holder, DropReason.SLOW, now), *self._top_up(idle, now)]
        return []
