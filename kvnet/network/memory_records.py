"""The provider records that one node of a simulated network keeps for others, as a small real DHT server would."""

import trio

from kvnet.protocol.ids import PeerId

DHT_RECORDS_PER_WINDOW = 10
DHT_WINDOW_S = 10.0
"""A real DHT server keeps this many records per sender in this time and silently drops the rest."""


class ProviderTable:
    """Provider records by key: who, since when, and where."""

    def __init__(self) -> None:
        self._records: dict[bytes, dict[PeerId, tuple[float, tuple[str, ...]]]] = {}
        self._arrivals: dict[PeerId, tuple[float, int]] = {}

    def put(self, key32: bytes, provider: PeerId, address: str) -> None:
        """Keep a record from now on."""
        self._records.setdefault(key32, {})[provider] = (trio.current_time(), (address,))

    def take(self, key32: bytes, provider: PeerId, address: str) -> bool:
        """Keep a record that somebody sends, if there are not too many of its sender's; whether it is kept."""
        now_s = trio.current_time()
        started_s, count = self._arrivals.get(provider, (now_s, 0))
        if now_s - started_s >= DHT_WINDOW_S:
            started_s, count = now_s, 0
        if count >= DHT_RECORDS_PER_WINDOW:
            return False
        self._arrivals[provider] = started_s, count + 1
        self.put(key32, provider, address)
        return True

    def find(self, key32: bytes, ttl_s: float) -> dict[PeerId, tuple[str, ...]]:
        """Providers of a key with their addresses, as far as their records are no older than `ttl_s`."""
        oldest_s = trio.current_time() - ttl_s
        kept = self._records.get(key32, {})
        return {provider: addresses for provider, (kept_at_s, addresses) in kept.items() if kept_at_s > oldest_s}

    def clear(self) -> None:
        """Lose all records."""
        self._records.clear()
