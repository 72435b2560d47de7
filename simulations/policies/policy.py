"""What a policy is: the choices of a node, each with the value that the node ships with."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvnet.exchange.admission import AdmissionPolicy
from kvnet.exchange.finder import DHT_WORTH_S, LOOKUP_SHARE, MAX_LOOKUP_S
from kvnet.format.codecs import Codec
from kvnet.format.prefix import checkpoints
from kvnet.protocol.scoring import DOUBT_S

DAY_S: Final = 24 * 3600.0
_SHIPPED_ADMISSION: Final = AdmissionPolicy()


class Reach(Enum):
    """How far a node looks for state it can continue from."""

    NOTHING = "nothing"
    """Every prompt is computed."""
    OWN = "own"
    """What the node has in RAM and on disk."""
    SWARM = "swarm"
    """That, and what peers have."""
    CENTRAL = "central"
    """Whatever anybody computed before, at once, as often as wanted, for nothing: more than any cache can do."""


class Order(Enum):
    """Who has to go first when room is needed."""

    LEAST_RECENT = "least recently used"
    LEAST_OFTEN = "least often used"
    OLDEST = "kept longest"
    LONGEST = "longest"


@dataclass(frozen=True, slots=True)
class Replication:
    """Copies of what several nodes begin with, made before they ask.

    Attributes:
        after_fetches: how often a beginning was fetched before it counts as hot.
        copies: how many more nodes get it then.
    """

    after_fetches: int = 2
    copies: int = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """All choices. The defaults are those that the node ships with, taken from its code.

    Attributes:
        name: in results.
        title: one line for people.
        reach: how far a node looks.
        admission: what of a conversation is kept.
        order: who goes first when room is needed.
        keep_s: seconds without use after which an artifact goes.
        codec: how state is stored and travels.
        checkpoints: at which block counts an artifact of so many tokens is announced in the DHT.
        dht: whether the DHT is used at all.
        dht_worth_s: seconds of prefill from which on it is asked.
        reprovide_s: seconds after which it is announced again.
        replication: of hot beginnings; none by default.
        lookup_share: of the estimated prefill, what a lookup may take at most.
        max_lookup_s: the longest that it may take.
        patience_s: once somebody offers something, how much longer others are waited for; none: until the deadline.
        doubt_s: seconds after which a peer's measured rate may be twice what it was.
        write_budget_bytes_day: instead of the node's own; none for that.
        quota_bytes: instead of the node's own; none for that.
    """

    name: str
    title: str
    reach: Reach = Reach.SWARM
    admission: AdmissionPolicy = _SHIPPED_ADMISSION
    order: Order = Order.LEAST_RECENT
    keep_s: float = 7 * DAY_S
    codec: Codec = Codec.RAW
    checkpoints: Callable[[int], list[int]] = checkpoints
    dht: bool = True
    dht_worth_s: float = DHT_WORTH_S
    reprovide_s: float = 900.0
    replication: Replication | None = None
    lookup_share: float = LOOKUP_SHARE
    max_lookup_s: float = MAX_LOOKUP_S
    patience_s: float | None = None
    doubt_s: float = DOUBT_S
    write_budget_bytes_day: int | None = None
    quota_bytes: int | None = None

    @property
    def peers(self) -> bool:
        """Whether peers are asked."""
        return self.reach is Reach.SWARM

    @property
    def stores(self) -> bool:
        """Whether anything is kept on disk."""
        return self.reach in {Reach.OWN, Reach.SWARM}
