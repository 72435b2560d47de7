"""What joins the nodes of a simulated network: latency, rate, partitions and stopped processes, by peer id."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from kvnet.network.news import News
from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes.

    Attributes:
        latency_s: one-way delay in seconds.
        rate_bytes_per_s: capacity shared by all streams of this direction; None is unlimited.
    """

    latency_s: float = 0.0
    rate_bytes_per_s: float | None = None


UNLIMITED = Link()
"""Neither latency nor limit."""

Watch = Callable[[str, PeerId, PeerId, bytes], None]
"""Told of everything that leaves a node: on which stream (or ``dht``), from whom, to whom, and the bytes."""


class Links:
    """Every link of one simulation, and whether anything passes over it.

    Attributes:
        default: what joins two nodes unless `join` says otherwise.
        watch: sees all that is sent, as somebody would who had broken the transport's encryption.
    """

    def __init__(self, default: Link) -> None:
        self.default = default
        self.watch: Watch = lambda _stream, _source, _target, _data: None
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._groups: list[frozenset[PeerId]] = []
        self._hung: set[PeerId] = set()
        self._changed = News()

    def join(self, a: PeerId, b: PeerId, link: Link) -> None:
        """Say what joins `a` to `b`, in this direction."""
        self._links[a, b] = link

    def of(self, a: PeerId, b: PeerId) -> Link:
        """What joins `a` to `b`."""
        return self._links.get((a, b), self.default)

    def part(self, groups: Iterable[frozenset[PeerId]]) -> None:
        """Let only nodes of the same group reach each other; with no groups everybody reaches everybody."""
        self._groups = list(groups)
        self.wake()

    def hang(self, peer: PeerId) -> None:
        """Let nothing pass from or to this node."""
        self._hung.add(peer)
        self.wake()

    def resume(self, peer: PeerId) -> None:
        """Undo `hang`."""
        self._hung.discard(peer)
        self.wake()

    def passes(self, a: PeerId, b: PeerId) -> bool:
        """Whether bytes move between `a` and `b` now."""
        if a in self._hung or b in self._hung:
            return False
        return not self._groups or any(a in group and b in group for group in self._groups)

    async def wait_until_passes(self, a: PeerId, b: PeerId) -> None:
        """Wait until bytes move between `a` and `b`."""
        while not self.passes(a, b):
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    def wake(self) -> None:
        """Something has changed that somebody may wait for."""
        self._changed.tell()
