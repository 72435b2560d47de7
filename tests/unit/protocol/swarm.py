"""A fetch among scripted peers, in virtual time: drives the real machine the way its driver does."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import blake3_hash
from kvnet.protocol.fetch import (
    ChunkVerified,
    Completed,
    DropPeer,
    DropReason,
    Failed,
    FetchLimits,
    FetchMachine,
    Instruction,
    RequestChunks,
)
from kvnet.protocol.ids import PeerId

Kind = Literal["header", "bytes", "chunk", "refused", "failed"]


@dataclass(frozen=True)
class Event:
    """What a peer lets us see, `after_s` seconds after the event before it."""

    after_s: float
    kind: Kind
    index: int = 0
    length: int = 0
    data: bytes = b""
    reason: str = ""


Script = Callable[[int, Sequence[bytes], random.Random], Iterable[Event]]
"""What a peer does when it is asked for a chunk: (index, all chunks, randomness) -> events."""


def sent(index: int, data: bytes, seconds: float = 0.01) -> list[Event]:
    return [Event(seconds / 2, "header", index, len(data)), Event(seconds / 2, "chunk", index, len(data), data)]


def honest(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return sent(index, chunks[index])


def at_rate(bytes_s: float, *, delay_s: float = 0.002, pieces: int = 8) -> Script:
    """Sends at a steady rate, in pieces."""

    def script(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
        data = chunks[index]
        yield Event(delay_s, "header", index, len(data))
        for _ in range(pieces - 1):
            yield Event(len(data) / pieces / bytes_s, "bytes", index, len(data) // pieces)
        yield Event(len(data) / pieces / bytes_s, "chunk", index, len(data), data)

    return script


def dies(script: Script, after_chunks: int) -> Script:
    """Gives some chunks, then half of one, and then its stream breaks, now and whenever it is opened again."""
    given = 0

    def dying(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
        nonlocal given
        given += 1
        events = list(script(index, chunks, rng))
        return events if given <= after_chunks else [*events[: len(events) // 2], Event(0.01, "failed")]

    return dying


def flips(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    data = bytearray(chunks[index])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return sent(index, bytes(data))


def truncates(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    length = len(chunks[index])
    return [Event(0.005, "header", index, length), Event(0.005, "chunk", index, length, chunks[index][:-1])]


def swaps(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return sent(index, chunks[(index + 1) % len(chunks)])


def replays(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    """Sends what it has sent already: the first chunk it was asked for, under the index now asked for."""
    return sent(index, chunks[0] if index else chunks[1])


def doubles(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    """Sends every chunk twice."""
    return [*sent(index, chunks[index]), *sent(index, chunks[index])]


def declares_another_length(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    data = chunks[index] + b"!"
    return sent(index, data)


def sends_what_nobody_asked_for(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return sent(len(chunks) + index, chunks[index])


def refuses_what_nobody_asked_for(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return [Event(0.01, "refused", len(chunks) + index, reason="not_held")]


def silent(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return []


def stops_half_way(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    data = chunks[index]
    return [Event(0.005, "header", index, len(data)), Event(0.005, "bytes", index, len(data) // 2)]


def one_byte_a_second(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    data = chunks[index]
    return itertools.chain(
        [Event(0.005, "header", index, len(data))],
        (Event(1.0, "bytes", index, 1) for _ in range(min(len(data), 10_000))),
    )


def disconnects(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
    return [Event(0.01, "failed")]


def refuses(reason: str, indices: Iterable[int] | None = None) -> Script:
    chosen = None if indices is None else frozenset(indices)

    def script(index: int, chunks: Sequence[bytes], rng: random.Random) -> Iterable[Event]:
        if chosen is None or index in chosen:
            return [Event(0.01, "refused", index, reason=reason)]
        return sent(index, chunks[index])

    return script


LIARS: dict[str, Script] = {
    "flip": flips,
    "truncate": truncates,
    "swap": swaps,
    "replay": replays,
    "wrong-length": declares_another_length,
    "double": doubles,
    "unasked": sends_what_nobody_asked_for,
    "refuses-unasked": refuses_what_nobody_asked_for,
}


def peer(name: str) -> PeerId:
    return PeerId(name.encode())


def make_chunks(count: int, size: int = 200, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size + rng.randrange(20)) for _ in range(count)]


def entries_of(chunks: Sequence[bytes]) -> list[ChunkEntry]:
    return [ChunkEntry(len(chunk), blake3_hash(chunk)) for chunk in chunks]


@dataclass(order=True)
class _Scheduled:
    time: float
    order: int
    peer: PeerId = field(compare=False)
    stream: int = field(compare=False)
    event: Event = field(compare=False)


@dataclass
class Swarm:
    """The virtual network and what happened on it."""

    chunks: Sequence[bytes]
    scripts: dict[str, Script]
    limits: FetchLimits = field(default_factory=FetchLimits)
    needed: Sequence[int] | None = None
    have: frozenset[int] = frozenset()
    seed: int = 0
    late_events: bool = False  # also deliver what was under way when a stream was closed

    verified: dict[int, bytes] = field(default_factory=dict)
    senders: dict[int, PeerId] = field(default_factory=dict)
    requests: list[tuple[float, PeerId, tuple[int, ...]]] = field(default_factory=list)
    drops: list[tuple[float, PeerId, DropReason]] = field(default_factory=list)
    arrived: dict[PeerId, int] = field(default_factory=dict)
    received_bytes: int = 0
    holds: dict[str, frozenset[int]] = field(default_factory=dict)
    first: frozenset[int] = frozenset()
    outcome: Completed | Failed | None = None
    now: float = 0.0

    def __post_init__(self) -> None:
        needed = range(len(self.chunks)) if self.needed is None else self.needed
        providers = [peer(name) for name in self.scripts]
        self.machine = FetchMachine(
            entries_of(self.chunks),
            needed,
            providers,
            have=self.have,
            limits=self.limits,
            holds={peer(name): held for name, held in self.holds.items()},
            first=self.first,
        )
        self._parts: dict[PeerId, int] = {}
        self._rng = random.Random(self.seed)
        self._queue: list[_Scheduled] = []
        self._order = itertools.count()
        self._streams: dict[PeerId, int] = {}
        self._free: dict[PeerId, float] = {}

    def run(self, until: float = 10_000.0) -> "Swarm":
        self._obey(self.machine.start(self.now))
        while self.outcome is None:
            deadline = self.machine.next_deadline()
            assert deadline is not None
            if self._queue and self._queue[0].time <= deadline:
                scheduled = heapq.heappop(self._queue)
                self.now = scheduled.time
                self._deliver(scheduled)
            else:
                self.now = max(self.now, deadline)
                self._obey(self.machine.on_time(self.now))
                later = self.machine.next_deadline()
                assert later is None or later > self.now, "a deadline that stays in the past is a busy loop"
            assert self.now < until, "an endless fetch"
        assert self.machine.ended
        assert self.machine.next_deadline() is None
        return self

    def _obey(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            assert self.outcome is None, "nothing follows the outcome"
            match instruction:
                case RequestChunks(who, indices):
                    self.requests.append((self.now, who, indices))
                    self._serve(who, indices)
                case DropPeer(who, reason):
                    self.drops.append((self.now, who, reason))
                    self._streams[who] = self._streams.get(who, 0) + 1
                    self._free.pop(who, None)
                    self._parts.pop(who, None)
                case ChunkVerified(index, data, who):
                    assert index not in self.verified
                    self.verified[index] = bytes(data)
                    self.senders[index] = who
                case Completed() | Failed():
                    self.outcome = instruction

    def _serve(self, who: PeerId, indices: Sequence[int]) -> None:
        script = self.scripts[who.decode()]
        time = max(self.now, self._free.get(who, 0.0))
        for index in indices:
            for event in script(index, self.chunks, self._rng):
                time += event.after_s
                stream = self._streams.setdefault(who, 0)
                heapq.heappush(self._queue, _Scheduled(time, next(self._order), who, stream, event))
        self._free[who] = time

    def _deliver(self, scheduled: _Scheduled) -> None:
        who, event = scheduled.peer, scheduled.event
        if scheduled.stream != self._streams[who] and not self.late_events:
            return
        match event.kind:
            case "header":
                self._obey(self.machine.header_arrived(who, event.index, event.length, self.now))
            case "bytes":
                self.received_bytes += event.length
                self._parts[who] = self._parts.get(who, 0) + event.length
                self.machine.bytes_arrived(who, event.length, self.now)
            case "chunk":
                self.received_bytes += len(event.data) - self._parts.pop(who, 0)
                self.arrived[who] = self.arrived.get(who, 0) + 1
                self._obey(self.machine.chunk_arrived(who, event.index, event.data, self.now))
            case "refused":
                self._obey(self.machine.chunk_refused(who, event.index, event.reason, self.now))
            case "failed":
                self._obey(self.machine.peer_failed(who, self.now))

    # --- what a test asks ---

    def reasons(self, name: str) -> list[DropReason]:
        return [reason for _, who, reason in self.drops if who == peer(name)]

    def asked(self, name: str) -> int:
        return sum(1 for _, who, _ in self.requests if who == peer(name))

    def assert_complete(self) -> None:
        needed = set(range(len(self.chunks)) if self.needed is None else self.needed) - self.have
        assert isinstance(self.outcome, Completed)
        assert self.verified == {index: self.chunks[index] for index in needed}
        assert self.machine.missing == 0
