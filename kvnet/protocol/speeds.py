"""What was measured, and how long something takes by it: prefill by position, restoring, and the way to a peer.

Pure arithmetic; all times are seconds, all rates bytes or tokens per second.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvnet.format.codecs import Codec
from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """At `position` tokens, prefill runs at `tokens_s`."""

    position: int
    tokens_s: float


class PrefillSpeed:
    """Prefill speed by position: later tokens attend to more, and take longer.

    Between two measured positions the seconds per token are taken to grow evenly, which is what attention does; before
    the first and after the last one they are those measured there.

    Args:
        points: measured; at least one, speeds above 0.

    Raises:
        ValueError: no point, or a speed that is not above 0.
    """

    def __init__(self, points: Iterable[SpeedPoint]) -> None:
        ordered = sorted({point.position: point for point in points}.values(), key=lambda point: point.position)
        if not ordered or any(not 0 < point.tokens_s < math.inf for point in ordered):
            raise ValueError("expected at least one measured speed above 0")
        self._positions = [point.position for point in ordered]
        self._seconds = [1.0 / point.tokens_s for point in ordered]
        self._before = [self._positions[0] * self._seconds[0]]
        for at in range(1, len(ordered)):
            width = self._positions[at] - self._positions[at - 1]
            self._before.append(self._before[-1] + width * (self._seconds[at - 1] + self._seconds[at]) / 2)

    @property
    def last_position(self) -> int:
        """The last position at which it was measured; beyond it the speed is taken to stay."""
        return self._positions[-1]

    def seconds(self, first_token: int, end_token: int) -> float:
        """Seconds of prefilling tokens `first_token` up to `end_token`, the state before them being there."""
        if end_token <= first_token:
            return 0.0
        return self._until(end_token) - (self._until(first_token) if first_token else 0.0)

    def _until(self, end_token: int) -> float:
        """Seconds of all tokens before one."""
        at = bisect_left(self._positions, end_token)
        if at == 0:
            return end_token * self._seconds[0]
        before, width = self._seconds[at - 1], end_token - self._positions[at - 1]
        last = before
        if at < len(self._positions):
            share = width / (self._positions[at] - self._positions[at - 1])
            last += share * (self._seconds[at] - before)
        return self._before[at - 1] + width * (before + last) / 2

    def tokens_s(self, position: int) -> float:
        """Tokens per second at a position."""
        return 1.0 / self._per_token(position)

    def turns(self, token_s: float) -> list[float]:
        """Positions where it was measured, and those between them where a token takes `token_s` seconds."""
        found: list[float] = list(self._positions)
        for (left, right), (before_s, after_s) in zip(pairwise(self._positions), pairwise(self._seconds), strict=True):
            if min(before_s, after_s) < token_s < max(before_s, after_s):
                found.append(left + (right - left) * (token_s - before_s) / (after_s - before_s))
        return found

    def _per_token(self, position: int) -> float:
        at = bisect_left(self._positions, position)
        if at == 0:
            return self._seconds[0]
        if at == len(self._positions):
            return self._seconds[-1]
        left, right = self._positions[at - 1], self._positions[at]
        share = (position - left) / (right - left)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does with one model.

    Attributes:
        prefill: its speed.
        restore_bytes_s: raw K/V bytes restored per second.
        restore_fixed_s: seconds of any restore, however small.
        decode_bytes_s: raw bytes decoded per second, by codec; one that is not named takes no time.
        calibrated: all of it was measured for its own sake, and not only guessed from a request or two.
    """

    prefill: PrefillSpeed
    restore_bytes_s: float
    restore_fixed_s: float = 0.0
    decode_bytes_s: Mapping[Codec, float] = field(default_factory=dict)
    calibrated: bool = True

    def restore_s(self, n_bytes: int) -> float:
        """Seconds until so many raw bytes of K/V are in the model's caches."""
        return self.restore_fixed_s + n_bytes / self.restore_bytes_s if n_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """How chunks get here from one peer, in one codec.

    Attributes:
        peer: whom from.
        rtt_s: seconds of a round trip.
        bytes_s: stored bytes per second.
        decode_bytes_s: raw bytes decoded per second; infinite for a codec that needs none.
    """

    peer: PeerId
    rtt_s: float
    bytes_s: float
    decode_bytes_s: float = math.inf

    def seconds(self, stored_bytes: int, raw_bytes: int) -> float:
        """Seconds until so many bytes are here and decoded."""
        if not stored_bytes:
            return 0.0
        return self.rtt_s + stored_bytes / self.bytes_s + raw_bytes / self.decode_bytes_s
