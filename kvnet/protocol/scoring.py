"""What is remembered of peers between fetches: how fast they are, and whether they may be asked at all.

Misconduct - a chunk that does not match its hash, an answer nobody asked for - leads to a ban, longer each time. Faults
that happen to honest peers - silence, a broken stream, too much to do - only put a peer further back. So do lies: a
claim of more than there was. All fade: a machine with a bad disk may have been repaired, and the only provider of
something, flaky once, is not lost for good.
Pure: `now` comes in, in seconds of any clock that does not go backwards.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvnet.protocol.fetch_peer import MISCONDUCT, DropReason
from kvnet.protocol.ids import PeerId

FADE_S = 3600.0
"""Misconduct, faults and lies count half as much after this time."""

LIAR_LIES = 1.5
"""Who has more than this against it is asked last: after the second lie, until an hour has passed or so."""

DOUBT_S = 120.0
"""What was measured this long ago may be twice as fast by now: a link that was slow once is tried again some time."""

MAX_DOUBLINGS = 40.0
"""After these any rate is beyond what a network does."""

# See SETTLED_S.
SETTLED_ROUND_TRIPS = 4
SETTLED_S = 0.05
"""A delivery that took less than so many round trips and this says how far away a peer is, not how fast."""

FAULTS = frozenset({DropReason.SILENT, DropReason.SLOW, DropReason.GONE, DropReason.BUSY})
"""Reasons for which a peer is put further back."""


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """How hard it is judged.

    Attributes:
        ban_s: seconds of a first ban.
        ban_growth: by how much each further one is longer, while the earlier ones have not faded.
        max_ban_s: the longest.
        doubt_s: seconds after which a measured rate may be twice what it was.
        max_peers: peers remembered; those heard of longest ago are forgotten first, banned ones last.
    """

    ban_s: float = 60.0
    ban_growth: float = 8.0
    max_ban_s: float = 24 * 3600.0
    doubt_s: float = DOUBT_S
    max_peers: int = 4096


@dataclass(slots=True)
class _Score:
    misconduct: float = 0.0
    faults: float = 0.0
    lies: float = 0.0
    judged_s: float = 0.0
    banned_until_s: float = float("-inf")
    rate_bytes_s: float = 0.0
    rated_s: float = 0.0
    rtt_s: float = 0.0
    heard_s: float = 0.0

    def fade(self, now: float) -> None:
        share = 0.5 ** (max(0.0, now - self.judged_s) / FADE_S)
        self.misconduct *= share
        self.faults *= share
        self.lies *= share
        self.judged_s = now


class PeerScores:
    """Judges peers by what they did.

    Args:
        limits: how hard.
    """

    def __init__(self, limits: ScoreLimits | None = None) -> None:
        self._limits = limits or ScoreLimits()
        self._scores: dict[PeerId, _Score] = {}

    def dropped(self, peer: PeerId, reason: DropReason, now: float) -> None:
        """A fetch let a peer go."""
        score = self._of(peer, now)
        if reason in MISCONDUCT:
            ban_s = self._limits.ban_s * self._limits.ban_growth**score.misconduct
            score.banned_until_s = now + min(self._limits.max_ban_s, ban_s)
            score.misconduct += 1.0
        elif reason in FAULTS:
            score.faults += 1.0

    def lied(self, peer: PeerId, now: float) -> None:
        """A peer claimed a prefix, and had less of it, or another model's."""
        self._of(peer, now).lies += 1.0

    def liar(self, peer: PeerId, now: float) -> bool:
        """Whether a peer lied more than once of late: others are asked before it."""
        score = self._scores.get(peer)
        if score is None:
            return False
        score.fade(now)
        return score.lies > LIAR_LIES

    def delivered(self, peer: PeerId, n_bytes: int, seconds: float, now: float) -> None:
        """A peer delivered so many verified bytes in so much time; half of what is known is what was known before.

        Setting up costs round trips: a delivery that took hardly longer is only a lower bound of the rate.
        """
        score = self._of(peer, now)
        score.faults /= 2
        if n_bytes <= 0 or seconds <= 0:
            return
        rate = n_bytes / seconds
        if seconds >= SETTLED_S + SETTLED_ROUND_TRIPS * score.rtt_s:
            score.rate_bytes_s = rate if score.rate_bytes_s == 0.0 else (score.rate_bytes_s + rate) / 2
        elif 0.0 < score.rate_bytes_s < rate:
            score.rate_bytes_s = rate
        else:
            return
        score.rated_s = now

    def waited(self, peer: PeerId, n_bytes: int, seconds: float, now: float) -> None:
        """Less than `n_bytes` came from a peer in so much time: it is no faster than that."""
        score = self._of(peer, now)
        if seconds < SETTLED_S + SETTLED_ROUND_TRIPS * score.rtt_s:
            return
        most = n_bytes / seconds
        score.rate_bytes_s = min(score.rate_bytes_s or most, most)
        score.rated_s = now

    def answered(self, peer: PeerId, seconds: float, now: float) -> None:
        """A peer answered a small request after so much time; smoothed as round-trip times are (1/8 of the new)."""
        score = self._of(peer, now)
        score.rtt_s = seconds if score.rtt_s == 0.0 else score.rtt_s + (seconds - score.rtt_s) / 8

    def banned(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is not to be asked."""
        score = self._scores.get(peer)
        return score is not None and now < score.banned_until_s

    def banned_until_s(self, peer: PeerId) -> float:
        """When its last ban ends or ended; minus infinity when it never had one."""
        score = self._scores.get(peer)
        return float("-inf") if score is None else score.banned_until_s

    def rate_bytes_s(self, peer: PeerId) -> float:
        """What it delivered lately, in bytes per second; 0 when unknown."""
        score = self._scores.get(peer)
        return 0.0 if score is None else score.rate_bytes_s

    def expected_bytes_s(self, peer: PeerId, now: float) -> float:
        """What may be expected of it: the longer ago it was measured, the more; infinite when it never was."""
        score = self._scores.get(peer)
        if score is None or score.rate_bytes_s == 0.0:
            return math.inf
        doublings = max(0.0, now - score.rated_s) / self._limits.doubt_s
        return score.rate_bytes_s * math.exp2(min(doublings, MAX_DOUBLINGS))

    def rtt_s(self, peer: PeerId) -> float:
        """Seconds of a round trip; 0 when unknown."""
        score = self._scores.get(peer)
        return 0.0 if score is None else score.rtt_s

    def standing(self, peer: PeerId, now: float) -> float:
        """From 1 (nothing against it) towards 0."""
        score = self._scores.get(peer)
        if score is None:
            return 1.0
        score.fade(now)
        return 1.0 / (1.0 + score.faults + 4.0 * (score.misconduct + score.lies))

    def order(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Those that may be asked, the best first: by standing times rate; equal ones stay as they came.

        One whose rate is unknown counts as the fastest known of them: it is worth finding out.
        """
        allowed = [peer for peer in peers if not self.banned(peer, now)]
        fastest = max((self.rate_bytes_s(peer) for peer in allowed), default=0.0) or 1.0
        return sorted(allowed, key=lambda peer: -(self.rate_bytes_s(peer) or fastest) * self.standing(peer, now))

    def _of(self, peer: PeerId, now: float) -> _Score:
        score = self._scores.get(peer)
        if score is None:
            if len(self._scores) >= self._limits.max_peers:
                self._forget(now)
            score = self._scores[peer] = _Score(judged_s=now)
        score.fade(now)
        score.heard_s = now
        return score

    def _forget(self, now: float) -> None:
        """Make room for one."""
        oldest = min(self._scores, key=lambda peer: (self.banned(peer, now), self._scores[peer].heard_s))
        del self._scores[oldest]
