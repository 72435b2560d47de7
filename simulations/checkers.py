"""What must be true in every run; a run in which it is not raises.

The checkers look at the world from outside: what somebody computed, what went over the wires, what lies on disks. They
decide nothing.
"""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulations.world.node import Job, Node
    from simulations.world.transfers import Ledger
    from simulations.world.tree import Path

DAY_S = 24 * 3600.0


class CheckFailedError(Exception):
    """The simulated world did what must not happen: a fault of the simulator, or of the code that it drives."""


class Truth:
    """What anybody ever computed, honestly and to the end: all that may ever be reused."""

    def __init__(self) -> None:
        self._extent: dict[int, int] = {}

    def computed(self, path: "Path") -> None:
        """Somebody has computed a prefix, or continued from a verified one to it."""
        extent = self._extent
        for segment, end in path:
            if extent.get(segment, 0) >= end:
                return
            extent[segment] = end

    def longest(self, path: "Path") -> int:
        """How many tokens of a prompt anybody computed."""
        for segment, end in path:
            found = self._extent.get(segment)
            if found is not None:
                return min(found, end)
        return 0


class Checkers:
    """Counts how often it looked; `finish` looks a last time.

    Args:
        truth: what anybody computed.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.looked: Counter[str] = Counter()
        self._last_s = 0.0

    def continued(self, job: "Job") -> None:
        """A request continues from state: somebody computed it, and a token is left to feed."""
        self.looked["verified"] += 1
        most = min(self.truth.longest(job.path), job.request.n_input - 1)
        if not 0 <= job.reused_tokens <= most:
            raise CheckFailedError(
                f"request {job.request.number} continued from {job.reused_tokens} tokens; expected at most {most} that "
                f"anybody computed"
            )

    def stored(self, node: "Node") -> None:
        """A node wrote to its disk."""
        self.looked["budgets"] += 1
        if node.store.used_bytes > node.store.quota_bytes + node.block_bytes:
            raise CheckFailedError(
                f"node {node.number} holds {node.store.used_bytes} bytes of a quota of {node.store.quota_bytes}"
            )
        if node.live.used_bytes > node.live.cap_bytes:
            raise CheckFailedError(
                f"node {node.number} has {node.live.used_bytes} bytes of live caches of {node.live.cap_bytes}"
            )

    def time(self, now_s: float) -> None:
        """Time goes on."""
        self.looked["progress"] += 1
        if now_s < self._last_s:
            raise CheckFailedError(f"time went back from {self._last_s} to {now_s}")
        self._last_s = now_s

    def finish(self, nodes: "list[Node]", ledger: "Ledger", duration_s: float, *, asked: int, ended: int) -> None:
        """The run is over: nothing is left undone, and every byte is accounted for."""
        self.looked["conserved"] += 1
        served = sum(node.counted.served_bytes for node in nodes)
        if ledger.sent != ledger.received + ledger.lost or served != ledger.sent:
            raise CheckFailedError(
                f"{ledger.sent} bytes were sent, {served} of them counted by nodes; {ledger.received} were received "
                f"and {ledger.lost} lost"
            )
        if ledger.accepted_lies:
            raise CheckFailedError(f"{ledger.accepted_lies} times the bytes of a liar were taken")
        if ledger.running or any(node.busy or node.waiting for node in nodes if node.present):
            raise CheckFailedError(f"{ledger.running} fetches, or requests in front of an engine, never came to an end")
        if asked != ended:
            raise CheckFailedError(f"{asked} requests were made and {ended} came to an end")
        for node in nodes:
            day_bytes = node.budget.day_bytes
            if node.counted.kept_bytes > day_bytes * (1 + duration_s / DAY_S) + 1:
                raise CheckFailedError(
                    f"node {node.number} kept {node.counted.kept_bytes} bytes of its own accord in "
                    f"{duration_s / DAY_S:.1f} days, with {day_bytes} a day"
                )
