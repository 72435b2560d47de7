"""The providers of one fetch: who is asked, who may be, who is too slow, and who is given up."""

import math
from collections.abc import Collection, Container, Iterator

from kvnet.protocol.fetch_limits import FetchLimits
from kvnet.protocol.fetch_peer import FOUND_SLOW, MISCONDUCT, PASSING, DropReason, FetchPeer
from kvnet.protocol.ids import PeerId

MAX_COMEBACKS = 3
"""How often a provider may come back before a chunk of it is verified: one that only ever comes back ends too."""


TRIAL_S = 4.0
"""Seconds in which one who was never asked, beyond those who are, shows what it delivers."""


class Roster:
    """Keeps providers in the order in which they are begun with.

    Args:
        limits: patience and appetite.
        missing: the chunks that are not verified yet, as they are at any time.

    Attributes:
        peers: all of them, by peer id.
        active: those that are asked.
        progress_s: when the last chunk was verified, or it began.
        trial_ends_s: when it is known who of too many is the slowest; infinite where there are not too many.
    """

    def __init__(self, limits: FetchLimits, missing: Collection[int]) -> None:
        self._limits = limits
        self._missing = missing
        self.peers: dict[PeerId, FetchPeer] = {}
        self.active: dict[PeerId, FetchPeer] = {}
        self.progress_s = 0.0
        self.trial_ends_s = math.inf
        self._untried = 0

    def add(self, peer: PeerId, holds: Container[int] | None, now: float) -> bool:
        """A provider turned up, or came back: whether there is a new one to ask, at the end of the queue."""
        known = self.peers.get(peer)
        if known is None:
            if len(self.peers) >= self._limits.max_providers:
                return False
            self.peers[peer] = FetchPeer(peer, holds)
            self._untried += 1
            return True
        if known.last_reason is None or known.last_reason in MISCONDUCT or peer in self.active:
            return False
        if known.comebacks >= MAX_COMEBACKS:
            return False
        self._untried += known.attempts > 0
        known.come_back(holds, now)
        return True

    def useful(self, peer: FetchPeer) -> bool:
        """Whether a peer may still give something that is missing."""
        return not peer.given_up and any(not peer.lacks(index) for index in self._missing)

    def may_start(self, peer: FetchPeer) -> bool:
        """Whether a peer that is not active has something to give, now or after its pause."""
        return peer.peer not in self.active and self.useful(peer)

    def waiting(self) -> Iterator[FetchPeer]:
        """Those that may be begun with, now or after their pause, in order."""
        return (peer for peer in self.peers.values() if self.may_start(peer))

    @property
    def full(self) -> bool:
        """Whether no more are asked at the same time."""
        return len(self.active) >= self._limits.active_peers

    def place_for(self, peer: FetchPeer, *, wanted: bool) -> bool:
        """Whether a peer may be begun with: there is room, or one more is tried to find out how fast it is.

        Args:
            peer: it may start.
            wanted: something is to be asked for that it may have; who has nothing to do makes room for it.
        """
        if not self.full:
            return True
        return wanted and peer.attempts == 0 and self._may_try

    @property
    def settled(self) -> bool:
        """Whether nobody can be begun with, before a trial is over: a quick look, for after every chunk."""
        if len(self.active) == len(self.peers):
            return True
        return self.full and not self._may_try and all(each.outstanding for each in self.active.values())

    @property
    def _may_try(self) -> bool:
        """Whether one more is tried beside those that are asked: when it is known how fast those are."""
        room = self._untried > 0 and len(self.active) < self._limits.active_peers + self._limits.trials
        return room and all(each.rate.known for each in self.active.values())

    def spare(self, now: float, *, wanted: bool) -> FetchPeer | None:
        """Who is asked no longer in favour of others: one with nothing to do, or after a trial the slowest.

        Args:
            now: the time.
            wanted: somebody who is not asked may have what is to be asked for.
        """
        if wanted and self.full:
            idle = next((each for each in self.active.values() if not each.outstanding), None)
            if idle is not None:
                return idle
        if now < self.trial_ends_s:
            return None
        return min(self.active.values(), key=lambda each: each.rate.bytes_s(now))

    def begin(self, peer: FetchPeer, now: float) -> None:
        """It is asked from now on."""
        self._untried -= peer.attempts == 0
        peer.begin(now)
        self.active[peer.peer] = peer
        if len(self.active) > self._limits.active_peers:
            self.trial_ends_s = now + TRIAL_S

    def end(self, active: FetchPeer, reason: DropReason, now: float) -> list[int]:
        """It is asked no longer; the chunks that it was asked for."""
        del self.active[active.peer]
        if len(self.active) <= self._limits.active_peers:
            self.trial_ends_s = math.inf
        outstanding = active.clear()
        active.last_reason = reason
        if reason in PASSING:
            if active.proven and reason is not DropReason.SLOW:
                # A connection that breaks now and then, hours apart, is no reason to give up what comes in between.
                active.attempts = 1
            active.given_up = active.attempts >= self._limits.attempts
            active.not_before = now + self._limits.retry_s * 2 ** (active.attempts - 1)
            # To the end of the queue.
            self.peers[active.peer] = self.peers.pop(active.peer)
        elif reason not in (DropReason.EXHAUSTED, DropReason.SPARE):
            active.given_up = True
        return outstanding

    @property
    def nobody_left(self) -> bool:
        """Whether nobody is asked, and nobody may be, now or after a pause."""
        return not self.active and not any(self.waiting())

    @property
    def patient_until_s(self) -> float | None:
        """Until when somebody may turn up, while there is nobody at all to ask; None otherwise."""
        return self.progress_s + self._limits.patience_s if self.nobody_left else None

    def give_another_try(self, now: float) -> None:
        """Where nobody is left and there is patience: those who may be back are asked again, after a pause."""
        if not self.nobody_left or now >= self.progress_s + self._limits.patience_s:
            return
        for peer in self.peers.values():
            if peer.given_up and peer.last_reason in PASSING:
                peer.given_up = False
                peer.not_before = now + self._limits.patient_retry_s

    def hopeless(self, now: float) -> bool:
        """Whether nobody is left, and those who are known have nothing more to give, or patience has run out.

        To be asked after `give_another_try`. As long as nobody was ever known, somebody may turn up.
        """
        return self.nobody_left and (bool(self.peers) or now >= self.progress_s + self._limits.patience_s)

    def reasons(self) -> tuple[tuple[PeerId, DropReason], ...]:
        """Why each was let go last."""
        return tuple((peer.peer, peer.last_reason or DropReason.EXHAUSTED) for peer in self.peers.values())

    # --- time ---

    def busy(self) -> list[FetchPeer]:
        """Those that are asked for something, and read from."""
        return [active for active in self.active.values() if active.outstanding and not active.paused]

    def deadline(self, active: FetchPeer) -> float:
        """When it is to be looked at whether a busy peer is silent or too slow."""
        return min(self._silent_at_s(active), active.window_begun + self._limits.rate_window_s)

    def overdue(self, active: FetchPeer, now: float) -> DropReason | None:
        """Why a busy peer is let go now, if it is; otherwise a new measure of the least rate may begin."""
        if now >= self._silent_at_s(active):
            return DropReason.SILENT
        if now >= active.window_begun + self._limits.rate_window_s:
            # No byte at all is silence, for which there is more patience when nobody else can be asked.
            if 0 < active.window_bytes < self._least_rate(active, now) * (now - active.window_begun):
                return DropReason.SLOW
            active.window_begun, active.window_bytes = now, 0
        return None

    def _silent_at_s(self, active: FetchPeer) -> float:
        """When a busy peer counts as silent; at patience's end one that was before, and has sent nothing since."""
        limits, idle_s = self._limits, self._idle_s(active)
        again = active.last_reason is DropReason.SILENT and not (active.total_bytes or active.part_bytes)
        if again and limits.patience_s:
            left_s = self.progress_s + limits.patience_s - active.last_byte
            idle_s = min(idle_s, max(limits.idle_with_others_s, left_s))
        return active.last_byte + idle_s

    def _idle_s(self, active: FetchPeer) -> float:
        others = any(self.useful(peer) for peer in self.peers.values() if peer is not active)
        return self._limits.idle_with_others_s if others else self._limits.idle_s

    def _least_rate(self, active: FetchPeer, now: float) -> float:
        others = [each.rate.bytes_s(now) for each in self.active.values() if each is not active and each.rate.known]
        limits = self._limits
        better = any(peer.last_reason not in FOUND_SLOW for peer in self.waiting())
        least = limits.min_rate_bytes_s if better else min(limits.floor_bytes_s, limits.min_rate_bytes_s)
        return max(least, limits.least_share * max(others, default=0.0))
