"""What the DHT costs: requests, and rounds of them one after the other, of one walk to the servers closest to a key.

Every node is a server of the DHT. A lookup of a key asks the closest servers, a few at a time, until all of the closest
have answered; so does an announcement, which then sends each of them its record. Counted among real nodes on loopback
(`kvnet.network.libp2p` over py-libp2p 0.8.1, everybody there, nobody busy):

=======  ==================  ======  ============
servers  requests of a walk  rounds  records sent
=======  ==================  ======  ============
3        3                   1       3
7        7                   2       7
13       13                  3       13
19       19                  4       19
=======  ==================  ======  ============

`tests/simulations/validation/test_against_dht.py` counts again. More nodes do not fit into one machine: above `CLOSEST`
servers, `_FOLLOWED` has the means over 60 keys of the same walk, followed through random ids and routing tables with up
to 20 peers of each distance, each server naming the 20 closest it knows.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

CLOSEST: Final = 20
"""Servers that keep a record; `kvnet.network.libp2p.providers.REPLICATION`."""
PARALLEL: Final = 6
"""Servers that a walk asks at a time; `kvnet.network.libp2p.providers.PARALLEL`."""
RECORDS_OF_A_KEY: Final = 20
"""Provider records that a server keeps of a key, the first that came: py-libp2p's `BUCKET_SIZE`."""
RECORDS_OF_A_SENDER: Final = 10
"""Records that a server takes from one sender in `SENDER_WINDOW_S`; it drops the others."""
SENDER_WINDOW_S: Final = 10.0

_FOLLOWED: Final = (
    (128, 20.2, 4.0, 1.0),
    (256, 21.6, 4.08, 1.02),
    (1000, 24.2, 4.6, 1.28),
    (4000, 25.0, 4.8, 1.52),
    (10_000, 26.1, 4.95, 1.78),
)
"""Servers; requests of a walk; rounds; the round in which the first of the closest is asked."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a walk to the servers closest to a key takes.

    Attributes:
        requests: sent, each answered.
        rounds: one after the other.
        named_rounds: after so many one of the closest has answered, who names those that provide the key.
        records: servers that a record goes to in the end, when one is announced.
    """

    requests: float
    rounds: float
    named_rounds: float
    records: int

    @property
    def announcement(self) -> float:
        """Messages of one announcement: the walk, and the record to each of the closest."""
        return self.requests + self.records


@cache
def walk(servers: int) -> Walk:
    """A walk among so many servers, its own node not among them."""
    closest = min(servers, CLOSEST)
    if servers <= _FOLLOWED[0][0]:
        return Walk(closest, -(-closest // PARALLEL), 1, closest)
    sizes, *means = zip(*_FOLLOWED, strict=True)
    requests, rounds, named = (float(np.interp(np.log(servers), np.log(sizes), column)) for column in means)
    return Walk(requests, rounds, named, closest)
