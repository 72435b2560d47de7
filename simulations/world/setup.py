"""What a world begins with: machines, their links and stores, and what will happen to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvnet.protocol.speeds import Machine
from simulations.chips import LinkKind
from simulations.workload.churn import PresenceChange
from simulations.workload.requests import RequestStream

GB: Final = 1_000_000_000

DEFAULT_QUOTA_BYTES: Final = 50 * GB
DEFAULT_WRITE_BUDGET_BYTES_DAY: Final = 20 * GB
"""The node's own defaults: `store.quota_bytes`, `store.write_budget_bytes_day`."""


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """One machine.

    Attributes:
        machine: what it does with its model; from `simulations.chips.machine`, or its own calibration.
        link: how it is connected.
        model: its model's name: only nodes with the same one can use each other's state.
        kv_bytes_per_token: raw bytes of that model.
        answer_tokens_s: of its model, after the first.
        live_bytes: RAM for live caches.
        site: which site it stands at.
        quota_bytes: the most its store holds.
        write_budget_bytes_day: as the setting of that name.
        liar: it claims whatever it is asked for and sends wrong bytes.
    """

    machine: Machine
    link: LinkKind
    model: str
    kv_bytes_per_token: int
    answer_tokens_s: float = 50.0
    live_bytes: int = 4 * GB
    site: int = 0
    quota_bytes: int = DEFAULT_QUOTA_BYTES
    write_budget_bytes_day: int = DEFAULT_WRITE_BUDGET_BYTES_DAY
    liar: bool = False


@dataclass(frozen=True, slots=True)
class SiteSetup:
    """A place whose nodes share a line to all other places.

    Attributes:
        up_bytes_s, down_bytes_s: of that line; 0 for one that never limits.
        rtt_s: what it adds to a round trip to another site.
    """

    up_bytes_s: float = 0.0
    down_bytes_s: float = 0.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Partition:
    """From `begin_s` until `end_s` the nodes of these sites reach only each other."""

    begin_s: float
    end_s: float
    sites: frozenset[int]


@dataclass(frozen=True, eq=False)
class WorldSetup:
    """Everything that is given; what follows from it and a seed is the run.

    Attributes:
        name: of the scenario.
        nodes: by number, as the requests name them.
        stream: the requests.
        sites: by number; a site that is not listed has a line that never limits.
        changes: who comes and goes, ordered by time; a node that is not named is there from the beginning.
        partitions: when sites are cut off.
        members: how many peers a node keeps a session with; the others it finds through the DHT.
        dht_rtt_s: seconds of one round of the DHT.
    """

    name: str
    nodes: Sequence[NodeSetup]
    stream: RequestStream
    sites: Sequence[SiteSetup] = ()
    changes: Sequence[PresenceChange] = ()
    partitions: Sequence[Partition] = ()
    members: int = 64
    dht_rtt_s: float = 0.05
