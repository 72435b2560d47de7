"""Measured prefill speed of each model on this machine: what estimates and lookup deadlines are made from."""

from pathlib import Path

import msgspec

from kvnet_node.paths import write_private

MIN_TOKENS = 64
"""Shorter prefills say more about overhead than about speed."""

NEWEST_SHARE = 0.5
"""Weight of the newest measurement against what was known before."""


class Speeds:
    """Prefill speeds, in tokens a second, by model folder.

    Args:
        file: where they are kept; a missing or broken one counts as empty.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._known = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
        except (FileNotFoundError, msgspec.DecodeError):
            self._known = {}

    def prefill_tokens_s(self, model: Path) -> float:
        """The speed known for a model; 0 when it was never measured."""
        return self._known.get(str(model), 0.0)

    def note(self, model: Path, n_tokens: int, seconds: float) -> None:
        """A prefill of ``n_tokens`` took ``seconds``."""
        if n_tokens < MIN_TOKENS or seconds <= 0:
            return
        speed = n_tokens / seconds
        before = self._known.get(str(model), speed)
        self._known[str(model)] = NEWEST_SHARE * speed + (1 - NEWEST_SHARE) * before
        write_private(self._file, msgspec.json.encode(self._known))
