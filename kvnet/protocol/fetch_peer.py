"""One provider of a fetch: what it was asked for, how fast it is, and what became of it.

Arithmetic and bookkeeping only; `kvnet.protocol.fetch` decides.
"""

import math
from collections.abc import Container
from dataclasses import dataclass, field
from enum import StrEnum

from kvnet.protocol.ids import PeerId

RATE_MEMORY_S = 2.0
"""What a peer delivered this long ago weighs 1/e of what it delivers now: long against the gaps between chunks, short
against a transfer, so that a link that drops to a tenth is noticed while it matters."""


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
    """Less than the least rate, or so slow that others deliver its part sooner; may be tried again."""
    GONE = "gone"
    """The stream broke; may be tried again."""
    EXHAUSTED = "exhausted"
    """It has refused everything that is still missing."""
    SPARE = "spare"
    """Others are asked in its place, for what it lacks or because they are faster; it may be asked again."""
    DONE = "done"
    """Nothing is missing any more."""


MISCONDUCT = frozenset({DropReason.BAD_CHUNK, DropReason.UNASKED})
"""Reasons no honest peer gives: whoever keeps scores counts these."""

FOUND_SLOW = frozenset({DropReason.SLOW, DropReason.SILENT})
"""It was asked, and hardly anything came."""

PASSING = frozenset({DropReason.BUSY, DropReason.SILENT, DropReason.SLOW, DropReason.GONE})
"""Reasons that may be over soon: such a peer is tried again."""


class Rate:
    """Bytes per second, of late: each second weighs the less the longer it is past."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._counted_s = 0.0
        self.known = False

    def begin(self, now: float) -> None:
        """Start counting; nothing is known yet."""
        self._bytes = self._seconds = 0.0
        self._counted_s = now
        self.known = False

    def count(self, n_bytes: int, now: float) -> None:
        """So many bytes arrived since the last call."""
        self._pass(now)
        self._bytes += n_bytes
        self.known = True

    def skip(self, now: float) -> None:
        """The time since the last call is nobody's fault."""
        self._counted_s = now

    def bytes_s(self, now: float) -> float:
        """The rate; infinite when all of it came in no time, 0 when nothing did."""
        elapsed = max(0.0, now - self._counted_s)
        fading = math.exp(-elapsed / RATE_MEMORY_S)
        seconds = self._seconds * fading + elapsed
        if self._bytes == 0.0:
            return 0.0
        return self._bytes * fading / seconds if seconds > 0 else math.inf

    def _pass(self, now: float) -> None:
        elapsed = max(0.0, now - self._counted_s)
        fading = math.exp(-elapsed / RATE_MEMORY_S)
        self._bytes *= fading
        self._seconds = self._seconds * fading + elapsed
        self._counted_s = now


class ServiceTimes:
    """How long chunks take from being asked for to being here.

    Mean and mean deviation, as round-trip times are smoothed (Jacobson 1988: weights of 1/8 and 1/4).
    """

    def __init__(self) -> None:
        self._mean: float | None = None
        self._deviation = 0.0

    def note(self, seconds: float) -> None:
        """One more chunk arrived."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        off = seconds - self._mean
        self._mean += off / 8
        self._deviation += (abs(off) - self._deviation) / 4

    @property
    def late_s(self) -> float | None:
        """Seconds after which a chunk counts as late; ``None`` before the first one arrived."""
        return None if self._mean is None else self._mean + self._deviation / 2


@dataclass(frozen=True, slots=True)
class Asked:
    """A chunk asked of a peer and not here yet."""

    length_bytes: int
    asked_s: float


@dataclass(slots=True)
class FetchPeer:
    """What is known of one provider.

    Attributes:
        peer: who.
        holds: the chunks it says it has; ``None`` when it has not said.
        attempts: how often it was begun with.
        not_before: when it may be tried again.
        last_reason: why it was last let go.
        given_up: not to be asked again in this fetch, unless it comes back.
        proven: a chunk that it sent since it was begun with was verified.
        comebacks: how often it came back since a chunk of it was verified.
        refused: chunks it refused one by one.
        earlier: chunks of an attempt that was given up: each may still arrive once.
        outstanding: chunks asked for, in the order in which they were.
        outstanding_bytes: their bytes.
        total_bytes: bytes of chunks since it was begun with.
        last_byte: when the last byte came, or the waiting for one began.
        window_begun: when the present measure of the least rate began.
        window_bytes: bytes since then.
        part_bytes: bytes of the chunk that is arriving.
        paused: nothing is read from it at the moment.
        max_window_bytes: what the channel to it can have on its way; 0 when that is not known.
    """

    peer: PeerId
    holds: Container[int] | None = None
    attempts: int = 0
    not_before: float = float("-inf")
    last_reason: DropReason | None = None
    given_up: bool = False
    proven: bool = False
    comebacks: int = 0
    refused: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    outstanding: dict[int, Asked] = field(default_factory=dict)
    outstanding_bytes: int = 0
    total_bytes: int = 0
    last_byte: float = 0.0
    window_begun: float = 0.0
    window_bytes: int = 0
    part_bytes: int = 0
    paused: bool = False
    max_window_bytes: int = 0
    rate: Rate = field(default_factory=Rate)

    def begin(self, now: float) -> None:
        """It is asked from now on."""
        self.attempts += 1
        self.paused = self.proven = False
        self.last_byte = self.window_begun = now
        self.total_bytes = self.window_bytes = self.part_bytes = 0
        self.rate.begin(now)

    def come_back(self, holds: Container[int] | None, now: float) -> None:
        """It was away, or lacked things, and turned up anew: what it did before counts no more."""
        self.comebacks += 1
        self.attempts = 0
        self.given_up = False
        self.not_before = now
        self.refused.clear()
        self.holds = holds if holds is not None else self.holds

    def prove(self) -> None:
        """A chunk that it sent was verified."""
        self.proven = True
        self.comebacks = 0

    def count(self, n_bytes: int, now: float) -> None:
        """Bytes arrived."""
        self.last_byte = now
        self.total_bytes += n_bytes
        self.window_bytes += n_bytes
        self.rate.count(n_bytes, now)

    def resume(self, now: float) -> None:
        """It is read from again; the time in between is not its own."""
        self.paused = False
        self.last_byte = self.window_begun = now
        self.window_bytes = 0
        self.rate.skip(now)

    def ask(self, index: int, length_bytes: int, now: float) -> None:
        """One more chunk was asked of it."""
        if not self.outstanding:
            # Its silence counts from here: before, there was nothing to send.
            self.last_byte = max(self.last_byte, now)
            self.window_begun, self.window_bytes = now, 0
            self.rate.skip(now)
        self.outstanding[index] = Asked(length_bytes, now)
        self.outstanding_bytes += length_bytes

    def settle(self, index: int) -> Asked:
        """A chunk asked of it has arrived or was refused."""
        asked = self.outstanding.pop(index)
        self.outstanding_bytes -= asked.length_bytes
        return asked

    def clear(self) -> list[int]:
        """It is asked for nothing any more; what it was asked for may still arrive once."""
        indices = list(self.outstanding)
        self.earlier.update(indices)
        self.outstanding.clear()
        self.outstanding_bytes = 0
        return indices

    def lacks(self, index: int) -> bool:
        """Whether it is known not to have a chunk."""
        return index in self.refused or (self.holds is not None and index not in self.holds)

    def backlog_s(self, now: float) -> float:
        """Seconds until all that it was asked for is here, at its rate of late; 0 when that is nothing or unknown."""
        rate = self.rate.bytes_s(now) if self.rate.known else math.inf
        return self.seconds_for(self.outstanding_bytes, rate)

    def left_s(self, now: float) -> list[tuple[int, float]]:
        """For each chunk asked of it, in order: seconds until it is here, at its rate of late."""
        rate = self.rate.bytes_s(now)
        left: list[tuple[int, float]] = []
        ahead = -self.part_bytes
        for index, asked in self.outstanding.items():
            ahead += asked.length_bytes
            left.append((index, self.seconds_for(ahead, rate)))
        return left

    @staticmethod
    def seconds_for(n_bytes: int, rate_bytes_s: float) -> float:
        """Seconds that so many bytes take; infinite at a rate of 0."""
        if n_bytes == 0:
            return 0.0
        return n_bytes / rate_bytes_s if rate_bytes_s > 0 else math.inf
