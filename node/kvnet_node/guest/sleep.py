"""Notices that the machine was asleep, by two clocks of which one stood still meanwhile.

Nothing is asked of the system for it: whatever put the machine to sleep, and whether or not the system said so before
(`sleep_notice`), what counts is to be there again at once.
"""

import sys
import time

LOOK_S = 2.0
"""Seconds from one look at the clocks to the next."""

ASLEEP_S = 5.0
"""So many seconds between the clocks are a sleep; less is the time between two readings."""


def asleep_s() -> float:
    """Seconds that this machine has been asleep since it was started; 0 where no clock says."""
    if sys.platform == "darwin":
        # There CLOCK_MONOTONIC goes on in sleep, and CLOCK_UPTIME_RAW does not.
        return max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_UPTIME_RAW))
    if hasattr(time, "CLOCK_BOOTTIME"):
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC))
    return 0.0


class SleepWatch:
    """Says how long the machine was asleep since the last look.

    Args:
        asleep_s: as `asleep_s` at the start.
    """

    def __init__(self, asleep_s: float) -> None:
        self._before_s = asleep_s

    def look(self, asleep_s: float) -> float:
        """Seconds of sleep since the last look; 0 when it was awake."""
        slept_s = asleep_s - self._before_s
        if slept_s < ASLEEP_S:
            return 0.0
        self._before_s = asleep_s
        return slept_s
