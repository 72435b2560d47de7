"""Scrub: read everything that is held, slowly, before somebody needs it; get back from peers what has gone bad."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from kvnet.errors import IntegrityError, KvnetError, NotInStoreError
from kvnet.exchange.lane import Lane
from kvnet.format.hashes import ArtifactHash, ChunkHash, short_text
from kvnet.store.interface import ArtifactRecord, Store

_log = logging.getLogger(__name__)

Repair = Callable[[ArtifactHash, Sequence[int]], Awaitable[bool]]
"""Fetches some chunks of an artifact; whether all of them are here afterwards."""

ScrubProgress = Callable[[int, int], Awaitable[None]]
"""Called with (bytes read, bytes in all)."""

FAILED_AGAIN_S = 600.0
"""Seconds until a scrub that the disk ended is tried again."""


@dataclass(frozen=True, slots=True)
class ScrubPace:
    """How a running node scrubs.

    Attributes:
        interval_s: seconds from one scrub to the next.
        bytes_s: the most that is read per second.
    """

    interval_s: float = 7 * 24 * 3600.0
    bytes_s: float = 32e6

    def due_in_s(self, last_s: float, now_s: float) -> float:
        """Seconds until the next scrub; both in seconds since 1970. A last one ahead is a clock that was set back."""
        return max(0.0, min(last_s, now_s) + self.interval_s - now_s)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a scrub found.

    Attributes:
        artifacts: artifacts looked at.
        chunks: chunks that match their hash.
        size_bytes: their bytes.
        bad: chunks that did not match; they count as not held from then on.
        damaged: artifacts that lacked something because of that.
        repaired: those of them that are whole again.
    """

    artifacts: int
    chunks: int
    size_bytes: int
    bad: int
    damaged: tuple[ArtifactHash, ...]
    repaired: tuple[ArtifactHash, ...]


class Scrubber:
    """Reads the store through.

    Args:
        store: what is held.
        lane: where blocking store work runs; one chunk at a time, so that other work gets its turn.
        repair: how to get back what went bad; ``None`` without a network.
    """

    def __init__(self, store: Store, lane: Lane, repair: Repair | None) -> None:
        self._store = store
        self._lane = lane
        self._repair = repair

    async def scrub(self, *, bytes_s: float = 0.0, progress: ScrubProgress | None = None) -> Scrubbed:
        """Read and hash every chunk once, whoever shares it; then repair.

        Args:
            bytes_s: the most to read per second, on average; 0 for no limit.
            progress: told after each chunk.

        Raises:
            StoreError: the disk failed; what was found bad by then stays so.
        """
        records = await self._lane.run(self._store.artifacts)
        total_bytes = sum(entry.length_bytes for record in records for entry in record.entries)
        state = _State()
        began_s = trio.current_time()
        passed_bytes = 0
        for record in records:
            for entry in record.entries:
                passed_bytes += entry.length_bytes
                if entry.absent or entry.hash in state.good or entry.hash in state.bad:
                    continue
                state.count(entry.hash, entry.length_bytes, await self._lane.run(self._check, entry.hash))
                if bytes_s:
                    await trio.sleep_until(began_s + state.size_bytes / bytes_s)
                if progress is not None:
                    await progress(passed_bytes, total_bytes)
        damaged = [record for record in records if any(entry.hash in state.bad for entry in record.entries)]
        repaired = [record.hash for record in damaged if await self._repaired(record, state.bad)]
        return Scrubbed(
            artifacts=len(records),
            chunks=len(state.good),
            size_bytes=state.size_bytes,
            bad=len(state.bad),
            damaged=tuple(record.hash for record in damaged),
            repaired=tuple(repaired),
        )

    def _check(self, chunk: ChunkHash) -> bool | None:
        """Whether a chunk matches; ``None`` when it is not held, which is no damage."""
        try:
            self._store.read_chunk(chunk)
        except IntegrityError:
            return False
        except NotInStoreError:
            return None
        return True

    async def _repaired(self, record: ArtifactRecord, bad: set[ChunkHash]) -> bool:
        if self._repair is None:
            return False
        try:
            whole = await self._repair(
                record.hash, [index for index, entry in enumerate(record.entries) if entry.hash in bad]
            )
        except KvnetError as error:
            _log.warning("scrub: %s cannot be repaired: %s", short_text(record.hash), error)
            return False
        _log.info("scrub: %s is %s", short_text(record.hash), "whole again" if whole else "still not whole")
        return whole

    async def run(self, pace: ScrubPace, *, next_in_s: float, done: Callable[[Scrubbed], None]) -> None:
        """Scrub again and again until cancelled.

        Args:
            pace: how often and how fast.
            next_in_s: seconds until the first time.
            done: told of each.
        """
        while True:
            await trio.sleep(max(0.0, next_in_s))
            try:
                done(await self.scrub(bytes_s=pace.bytes_s))
                next_in_s = pace.interval_s
            except KvnetError as error:
                _log.warning("scrub: ended by %s", error)
                next_in_s = FAILED_AGAIN_S


class _State:
    """What was found so far."""

    def __init__(self) -> None:
        self.good: set[ChunkHash] = set()
        self.bad: set[ChunkHash] = set()
        self.size_bytes = 0

    def count(self, chunk: ChunkHash, length_bytes: int, matches: bool | None) -> None:
        if matches is None:
            return
        (self.good if matches else self.bad).add(chunk)
        self.size_bytes += length_bytes if matches else 0
