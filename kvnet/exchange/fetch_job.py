"""One fetch under way: what it gets, for whom, and what each peer has delivered of it so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.chunk_fetch import ChunkFetch
from kvnet.exchange.events import PeerPart
from kvnet.exchange.fetch_pack import FetchPack
from kvnet.exchange.locating import Located
from kvnet.exchange.provider import Delivered
from kvnet.protocol.ids import PeerId
from kvnet.protocol.pace import Purpose


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An artifact's token ids, verified.

    Attributes:
        tokens: all of them.
        chunks: those of its token chunks that were fetched for it and are in no store yet, by index.
        delivered: what each peer delivered of them.
    """

    tokens: tuple[int, ...]
    chunks: Mapping[int, bytes]
    delivered: Mapping[PeerId, Delivered]


class FetchJob:
    """One fetch under way, and what each peer has delivered for it."""

    def __init__(
        self,
        located: Located,
        work: FetchPack,
        token_ids: TokenIds,
        started_s: float,
        purpose: Purpose,
        *,
        pinned: bool,
    ) -> None:
        self.purpose = purpose
        self.located = located
        self.work = work
        self.token_ids = token_ids
        self.started_s = started_s
        self.pinned = pinned
        self.delivered: dict[PeerId, Delivered] = {}
        self.allowed = trio.CancelScope()
        self.add(token_ids.delivered)

    def parts(self, now: Sequence[PeerPart]) -> tuple[PeerPart, ...]:
        """What each peer has brought in this round and those before."""
        return tuple(
            replace(part, n_bytes=part.n_bytes + each.n_bytes, n_chunks=part.n_chunks + each.n_chunks)
            for part in now
            for each in [self.delivered.get(part.peer, Delivered())]
        )

    def add(self, delivered: Mapping[PeerId, Delivered]) -> None:
        """Count what peers delivered in one more round; why one was left is said by the last."""
        for peer, more in delivered.items():
            before = self.delivered.get(peer, Delivered())
            self.delivered[peer] = Delivered(
                before.n_bytes + more.n_bytes,
                before.n_chunks + more.n_chunks,
                more.dropped or before.dropped,
                before.seconds + more.seconds,
                more.path or before.path,
                before.surplus_bytes + more.surplus_bytes,
            )


async def run_telling(fetch: ChunkFetch, job: FetchJob, tick_s: float | None) -> None:
    """Run a fetch, and with ``tick_s`` say how it goes whenever so much time has passed."""
    if tick_s is None:
        await fetch.run()
        return
    job.work.parts = lambda: job.parts(fetch.parts())
    job.work.waiting = lambda: fetch.waiting
    job.work.silent_s = lambda: fetch.silent_s

    async def tick() -> None:
        while True:
            await job.work.tell()
            await trio.sleep(tick_s)

    failure: KvnetError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        try:
            await fetch.run()
        except KvnetError as error:
            # Out of the nursery it goes as itself, not in a group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
