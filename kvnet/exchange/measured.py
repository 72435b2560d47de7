"""What was measured of other machines' arithmetic: one finding per pair of nodes and model, kept between runs.

Reuse goes by the producer record of an artifact, not by who brings it. What one machine of a kind was measured to
compute therefore counts for everything that kind of machine has made of that model, and the worst finding counts.
"""

from collections.abc import Callable, Iterable

import msgspec

from kvnet.format.fingerprint import Producer
from kvnet.protocol.ids import PeerId
from kvnet.protocol.matching import Measured

MAX_FINDINGS = 2048
"""Findings kept; those made longest ago go first."""

KEEP_S = 30 * 24 * 3600.0
"""Seconds a finding counts that was not made again: whoever was wrong once may have been mended."""


class Finding(msgspec.Struct, frozen=True):
    """What came of comparing one peer's sample of a model with the own one.

    Attributes:
        peer: whose sample.
        fingerprint: hash of the model's fingerprint.
        our_producer: what computed the own sample.
        their_producer: what computed theirs.
        ours: hash of the own sample.
        theirs: hash of theirs.
        difference: as in `Measured`.
        words: as in `Measured`.
        tolerated: as in `Measured`.
        found_s: when, in seconds since 1970.
    """

    peer: bytes
    fingerprint: bytes
    our_producer: Producer
    their_producer: Producer
    ours: bytes
    theirs: bytes
    difference: float | None
    words: str
    tolerated: bool
    found_s: float

    @property
    def measured(self) -> Measured:
        """The comparison itself."""
        return Measured(self.difference, self.words, self.tolerated)


class Measurements:
    """All findings of a node."""

    def __init__(self) -> None:
        self._of_model: dict[bytes, dict[bytes, Finding]] = {}
        self.changed: Callable[[], None] = lambda: None

    def load(self, findings: Iterable[Finding], now_s: float) -> None:
        """Take up what an earlier run found; `now_s` is seconds since 1970."""
        for each in findings:
            if each.found_s > now_s - KEEP_S:
                self._put(each)

    def all(self) -> list[Finding]:
        """Every finding, those made longest ago first."""
        found = [each for of_peer in self._of_model.values() for each in of_peer.values()]
        return sorted(found, key=lambda each: each.found_s)

    def find(self, peer: PeerId, fingerprint: bytes, ours: bytes, theirs: bytes) -> Measured | None:
        """What was found of these two samples; None when they have not been compared."""
        found = self._of_model.get(fingerprint, {}).get(peer)
        return found.measured if found is not None and (found.ours, found.theirs) == (ours, theirs) else None

    def note(self, finding: Finding) -> None:
        """Keep a finding; an older one of the same peer and model counts no longer."""
        self._put(finding)
        for each in self.all()[:-MAX_FINDINGS]:
            del self._of_model[each.fingerprint][each.peer]
        self.changed()

    def worst(self, fingerprint: bytes, ours: Producer, theirs: Producer) -> Measured | None:
        """The worst that was found between two kinds of machines with a model; None when nothing was."""
        found = [
            each.measured
            for each in self._of_model.get(fingerprint, {}).values()
            if (each.our_producer, each.their_producer) == (ours, theirs)
        ]
        return max(found, key=lambda each: (not each.tolerated, each.difference or 0.0), default=None)

    def _put(self, finding: Finding) -> None:
        self._of_model.setdefault(finding.fingerprint, {})[finding.peer] = finding
