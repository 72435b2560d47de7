"""How statements travel among members: what to ask for, what to send, whom to tell, and how much of it to take in.

Whoever opens a session asks for what it lacks, namespace by namespace and page by page; what is new is told on at once
to every other member; and every few minutes members picked at random are asked again, so that what was lost, or came
while a network was split, arrives all the same. Nothing here reads a clock or draws a random number.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvnet.protocol.messages.statements import (
    KNOWN_SIZE_BYTES,
    MAX_KNOWN,
    MAX_TOLD,
    MAX_TOLD_BYTES,
    GetStatements,
    Statements,
    Tell,
)

RECONCILE_S: Final = 180.0
"""Seconds from one look for statements that did not arrive to the next, on average."""
RECONCILE_SPREAD: Final = 0.25
"""Share by which that is longer or shorter, so that nodes started together do not ask together."""

ASK_AGAIN_S: Final = 5.0
"""Seconds after which all members are asked once more for a revocation that is missing; then twice that, and so on."""

MAX_PAGES_ASKED: Final = 512
"""Pages of one answer: 32,768 statements; a peer that says there is more is not asked on."""

MAX_IDLE_PAGES: Final = 8
"""Pages in a row of which nothing counted, after which a peer is not asked on."""

FIRST: Final = bytes(KNOWN_SIZE_BYTES)
"""Before every short hash."""
LAST: Final = b"\xff" * KNOWN_SIZE_BYTES
"""Behind every one."""


def short(digest: bytes) -> bytes:
    """What a statement is called in `GetStatements`.

    Args:
        digest: BLAKE3 of its envelope.
    """
    return digest[:KNOWN_SIZE_BYTES]


# --- asking -----------------------------------------------------------------------------------------------------------


def windows(known: Iterable[bytes]) -> Iterator[tuple[bytes, ...]]:
    """The lists of known statements to ask with, one after the other.

    One list holds everything if that fits. Otherwise each is full, and a full list speaks only of what lies from its
    first entry to its last; the very first and the very last entry are bounds that no statement has.

    Args:
        known: short names, in any order.
    """
    names = sorted(set(known) - {FIRST, LAST})
    if len(names) < MAX_KNOWN:
        yield tuple(names)
        return
    bounded = [FIRST, *names, LAST]
    step = MAX_KNOWN - 1
    for start in range(0, len(bounded) - 1, step):
        window = bounded[start : start + MAX_KNOWN]
        if len(window) < MAX_KNOWN:
            # The last one is made full from the left: what is named twice is asked for once.
            window = bounded[-MAX_KNOWN:]
        yield tuple(window)


@dataclass(slots=True)
class Asking:
    """One exchange with one peer about one namespace: which page to ask for next, and when to stop.

    Args:
        known: short names of what is known, and of what was found to be no good.
    """

    known: set[bytes]
    pages: int = 0
    idle_pages: int = 0

    def learned(self, names: Sequence[bytes], *, more: bool, counted: bool = True) -> bool:
        """A page has come and was checked.

        Args:
            names: short names of what was on it.
            more: whether the peer says that there is more.
            counted: whether any of it counts.

        Returns:
            Whether to ask again: not when nothing on the page was new, nothing counted for long, or too many came.
        """
        self.pages += 1
        self.idle_pages = 0 if counted else self.idle_pages + 1
        fresh = set(names) - self.known
        self.known |= fresh
        patient = self.idle_pages < MAX_IDLE_PAGES and self.pages < MAX_PAGES_ASKED
        return more and bool(fresh) and patient


# --- answering --------------------------------------------------------------------------------------------------------


def answer(request: GetStatements, held: Mapping[bytes, bytes]) -> Statements:
    """One page of what the peer does not know.

    Args:
        request: what it asks.
        held: short name -> envelope of everything that may be told there, the most important first.
    """
    known = frozenset(request.known)
    missing = [(name, envelope) for name, envelope in held.items() if name not in known and _covers(request, name)]
    page = next(pages(envelope for _, envelope in missing), ())
    return Statements(request_id=request.request_id, statements=page, more=len(page) < len(missing))


def is_ordered(request: GetStatements) -> bool:
    """Whether the known statements are ascending, each once, as the protocol has it."""
    return all(first < second for first, second in zip(request.known, request.known[1:], strict=False))


def _covers(request: GetStatements, name: bytes) -> bool:
    if len(request.known) < MAX_KNOWN:
        return True
    return bisect_right(request.known, name) > 0 and bisect_left(request.known, name) < MAX_KNOWN


# --- telling ----------------------------------------------------------------------------------------------------------


def pages(envelopes: Iterable[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Envelopes in messages, each within the limits of one."""
    page: list[bytes] = []
    size_bytes = 0
    for envelope in envelopes:
        if page and (len(page) >= MAX_TOLD or size_bytes + len(envelope) > MAX_TOLD_BYTES):
            yield tuple(page)
            page, size_bytes = [], 0
        page.append(envelope)
        size_bytes += len(envelope)
    if page:
        yield tuple(page)


def size_bytes(message: Tell | Statements) -> int:
    """Bytes of the statements in a message."""
    return sum(map(len, message.statements))


class Exchanged:
    """What one peer is known to know, because it told or was told; as much as memory is given for.

    Args:
        limit: names remembered; the oldest are forgotten, and may then be told once more.
    """

    def __init__(self, limit: int = MAX_KNOWN) -> None:
        self._limit = limit
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._names))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: bytes) -> bool:
        """Remember a short name; whether it was new."""
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > self._limit:
            self._names.popitem(last=False)
        return True


# --- limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """What one peer may cost.

    Attributes:
        statements_per_s: statements it may tell of, on average; each costs about 0.2 ms of checking.
        statements_burst: statements at once.
        asks_per_s: `GetStatements` it may send, on average.
        asks_burst: of them at once: the pages of a first exchange.
        peer_queued_bytes: bytes of one peer's statements that may wait to be checked.
        queued_bytes: the same of all peers.
    """

    statements_per_s: float = 50.0
    statements_burst: float = 2048.0
    asks_per_s: float = 2.0
    asks_burst: float = 256.0
    peer_queued_bytes: int = 1024 * 1024
    queued_bytes: int = 8 * 1024 * 1024


class Allowance:
    """How much of something a peer may still do.

    Args:
        per_s: regained a second.
        burst: at most, and at first.
        now: the time in seconds of any steady clock, the same in every call.
    """

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, n: int, now: float) -> int:
        """How many of ``n`` are allowed now; they count as done."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)
        granted = min(n, int(self._left))
        self._left -= granted
        return granted

    def give_back(self, n: int) -> None:
        """What was taken and not done after all."""
        self._left = min(self._burst, self._left + n)


def next_reconcile_s(fraction: float) -> float:
    """Seconds until the next look for statements that did not arrive.

    Args:
        fraction: random, from 0 to 1.
    """
    return RECONCILE_S * (1 + RECONCILE_SPREAD * (2 * fraction - 1))
