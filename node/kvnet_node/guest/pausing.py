"""That the node is paused, and until when; kept in a file, so that a restart changes nothing."""

import math
from pathlib import Path

import msgspec

from kvnet_node.paths import keep_private


class _PauseFile(msgspec.Struct, frozen=True):
    until_s: float | None = None


class Pause:
    """A pause of this node.

    Args:
        file: where it is kept.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._until_s = -math.inf

    def load(self) -> None:
        """Take up a pause from before a restart."""
        try:
            until_s = msgspec.json.decode(self._file.read_bytes(), type=_PauseFile).until_s
        except FileNotFoundError:
            self._until_s = -math.inf
        except (OSError, msgspec.DecodeError):
            # Whoever paused the node wanted nothing to be served; a damaged file is no reason to begin again.
            self._until_s = math.inf
        else:
            self._until_s = math.inf if until_s is None else until_s

    def begin(self, until_s: float = math.inf) -> None:
        """Pause until a time in seconds since 1970, or until it is ended."""
        keep_private(self._file, msgspec.json.encode(_PauseFile(until_s if math.isfinite(until_s) else None)))
        self._until_s = until_s

    def end(self) -> bool:
        """End the pause; whether there was one."""
        was = self._until_s > -math.inf
        self._file.unlink(missing_ok=True)
        self._until_s = -math.inf
        return was

    def left_s(self, now_s: float) -> float:
        """Seconds that are left of it at a time; 0 for none, infinity for one without an end."""
        return max(0.0, self._until_s - now_s)
