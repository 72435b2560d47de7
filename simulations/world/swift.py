"""Second forms of the node's code that give the same figures sooner, where a million requests ask for them.

Each is held against the node's own in a test, on any input.
"""

from itertools import pairwise

from kvnet.exchange.write_budget import DAY_S
from kvnet.protocol.fetch import MISCONDUCT
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet.protocol.scoring import PeerScores, ScoreLimits
from kvnet.protocol.speeds import PrefillSpeed


class RememberedSpeed(PrefillSpeed):
    """A prefill speed that is asked about the same prompts' ends again and again.

    Args:
        speed: what it remembers.
    """

    def __init__(self, speed: PrefillSpeed) -> None:
        vars(self).update(vars(speed))
        self._known = _Known(speed)
        self._pieces = [
            (left, right - left, before_s, after_s - before_s, min(before_s, after_s), max(before_s, after_s))
            for (left, right), (before_s, after_s) in zip(
                pairwise(self._positions), pairwise(self._seconds), strict=True
            )
        ]

    def seconds(self, first_token: int, end_token: int) -> float:
        """See `PrefillSpeed`."""
        if end_token <= first_token:
            return 0.0
        if first_token:
            return self._known[end_token] - self._known[first_token]
        return self._known[end_token]

    def turns(self, token_s: float) -> list[float]:
        """See `PrefillSpeed`."""
        found: list[float] = list(self._positions)
        for left, width, before_s, more_s, least_s, most_s in self._pieces:
            if least_s < token_s < most_s:
                found.append(left + width * (token_s - before_s) / more_s)
        return found


class _Known(dict[int, float]):
    """Seconds of all tokens before one."""

    def __init__(self, speed: PrefillSpeed) -> None:
        super().__init__()
        self._speed = speed

    def __missing__(self, end_token: int) -> float:
        seconds = self[end_token] = self._speed.seconds(0, end_token)
        return seconds


class Scores(PeerScores):
    """Peers' scores that know when nobody was ever banned, so that nobody need be asked about.

    Attributes:
        all_welcome: nobody was.
    """

    def __init__(self, limits: ScoreLimits) -> None:
        super().__init__(limits)
        self.all_welcome = True

    def dropped(self, peer: PeerId, reason: DropReason, now: float) -> None:
        """See `PeerScores`."""
        if reason in MISCONDUCT:
            self.all_welcome = False
        super().dropped(peer, reason, now)

    def banned(self, peer: PeerId, now: float) -> bool:
        """See `PeerScores`."""
        return not self.all_welcome and super().banned(peer, now)


class Bucket:
    """`kvnet.exchange.write_budget.WriteBudget` without what that counts by day for people to read.

    Args:
        day_bytes: what may be written in a day, which is also the most it holds.
        now_s: the time; it begins full.
    """

    __slots__ = ("_as_of_s", "_left_bytes", "_most", "day_bytes")

    def __init__(self, day_bytes: int, now_s: float) -> None:
        self.day_bytes = day_bytes
        self._most = self._left_bytes = float(day_bytes)
        self._as_of_s = now_s

    def left_bytes(self, now_s: float) -> int:
        """What may still be written of the node's own accord; at least 0."""
        self._refill(now_s)
        return max(0, int(self._left_bytes))

    def spend(self, n_bytes: int, now_s: float) -> None:
        """So many bytes were written, into debt if need be."""
        if n_bytes > 0:
            self._refill(now_s)
            self._left_bytes = max(-self._most, self._left_bytes - n_bytes)

    def _refill(self, now_s: float) -> None:
        filled = self._left_bytes + max(0.0, now_s - self._as_of_s) * self.day_bytes / DAY_S
        self._left_bytes = min(self._most, max(-self._most, filled))
        self._as_of_s = now_s
