"""Who can reach whom, over what, and how far away that is."""

from collections.abc import Iterable, Sequence
from random import Random

from simulations.world.node import Node
from simulations.world.setup import Partition, SiteSetup, WorldSetup
from simulations.world.spans import Span


class Places:
    """Sites, their lines, and what cuts them off.

    Args:
        setup: of the world.
        nodes: of the world.
    """

    def __init__(self, setup: WorldSetup, nodes: Sequence[Node]) -> None:
        n_sites = 1 + max((node.setup.site for node in nodes), default=0)
        sites = [*setup.sites, *(SiteSetup() for _ in range(n_sites - len(setup.sites)))]
        self._rtt_s = [site.rtt_s for site in sites]
        self._up = [Span(site.up_bytes_s) if site.up_bytes_s else None for site in sites]
        self._down = [Span(site.down_bytes_s) if site.down_bytes_s else None for site in sites]
        self._cut: list[Partition] = []

    @property
    def is_cut(self) -> bool:
        """Whether any site is cut off."""
        return bool(self._cut)

    def cut(self, partition: Partition) -> None:
        """Some sites are cut off from the others."""
        self._cut.append(partition)

    def join(self, partition: Partition) -> None:
        """They are not any more."""
        self._cut.remove(partition)

    def reachable(self, one: Node, other: Node) -> bool:
        """Whether messages from one node arrive at another."""
        if not (one.present and other.present) or one.setup.model != other.setup.model:
            return False
        return not self._cut or not self.apart(one, other)

    def apart(self, one: Node, other: Node) -> bool:
        """Whether a cut runs between two nodes."""
        return any((one.setup.site in cut.sites) != (other.setup.site in cut.sites) for cut in self._cut)

    def rtt_s(self, one: Node, other: Node) -> float:
        """Seconds of a round trip."""
        rtt_s = (one.setup.link.rtt_s + other.setup.link.rtt_s) / 2
        if one.setup.site != other.setup.site:
            rtt_s += self._rtt_s[one.setup.site] + self._rtt_s[other.setup.site]
        return rtt_s

    def spans(self, sender: Node, receiver: Node) -> tuple[Span, ...]:
        """What bytes from one to the other run over."""
        if sender.setup.site == receiver.setup.site:
            return sender.up, receiver.down
        lines = (self._up[sender.setup.site], self._down[receiver.setup.site])
        return sender.up, *(line for line in lines if line is not None), receiver.down


def choose_members(nodes: Sequence[Node], most: int, seed: int) -> None:
    """Give every node its peers: those of its site first, then any. Sessions have two ends."""
    if len(nodes) <= most + 1:
        everybody = frozenset(range(len(nodes)))
        for node in nodes:
            node.members = everybody - {node.number}
        return
    drawn = Random(seed)  # noqa: S311 - which one gives the same graph matters, not whether it can be guessed
    found: list[set[int]] = [set() for _ in nodes]
    by_site: dict[int, list[int]] = {}
    for node in nodes:
        by_site.setdefault(node.setup.site, []).append(node.number)
    for node in nodes:
        _connect(node.number, _some(drawn, by_site[node.setup.site], most), found, most)
    for node in nodes:
        _connect(node.number, (drawn.randrange(len(nodes)) for _ in range(2 * most)), found, most)
    for node in nodes:
        node.members = frozenset(found[node.number])


def _some(drawn: Random, numbers: Sequence[int], most: int) -> list[int]:
    return list(numbers) if len(numbers) <= most else drawn.sample(numbers, most)


def _connect(one: int, others: Iterable[int], found: list[set[int]], most: int) -> None:
    for other in others:
        if len(found[one]) >= most:
            return
        if other != one and len(found[other]) < most:
            found[one].add(other)
            found[other].add(one)
