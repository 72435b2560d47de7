"""What a run of the simulator found: one row a request, one a node, and what follows from them.

One seed gives one digest: everything that a decision could change is in it, the time that the computer took is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Array = NDArray[Any]

PERCENTILES = (50, 90, 95, 99)
"""Those of times to first token that are told."""
DIGEST_CHARACTERS = 32
"""Of the hash over a result: 128 bits are plenty to see that two runs differ."""
LATER_SHARE = 0.02
LATER_S = 0.02
_NS = 1_000_000_000
_TOGETHER = 16_384
"""Rows of requests that are written into the columns at once: one at a time takes five times as long."""


class RequestResult(NamedTuple):
    """What became of one request. Tokens of a prompt are reused from one place, or computed.

    Attributes:
        own_ram_tokens: continued from live state or RAM of the node itself.
        own_disk_tokens: restored from the node's own store.
        peer_tokens: restored after peers sent what was missing; what the node held of that prefix is above.
        ttft_s: seconds from the request's arrival to its first token.
        fetched_bytes: bytes that peers sent for it, those that were then not used included.
        prefill_s: seconds of prefill computed for it.
        cold_prefill_s: seconds of prefill without any reuse, on the same machine.
        waited_s: seconds of `ttft_s` in which the engine did another request's work.
    """

    own_ram_tokens: int = 0
    own_disk_tokens: int = 0
    peer_tokens: int = 0
    ttft_s: float = 0.0
    fetched_bytes: int = 0
    prefill_s: float = 0.0
    cold_prefill_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hit_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.own_ram_tokens + self.own_disk_tokens + self.peer_tokens


class NodeResult(NamedTuple):
    """What one node did over the whole run.

    Attributes:
        requests: that it answered.
        served_bytes: chunks sent to peers.
        ssd_written_bytes: what went to its disk.
        announce_messages: sent to announce, withdraw or announce again: to members, and to servers of the DHT.
        lookup_messages: questions sent to members and servers of the DHT.
        busy_s: seconds in which its engine computed.
        stored_bytes: what its store holds in the end.
    """

    requests: int = 0
    served_bytes: int = 0
    ssd_written_bytes: int = 0
    announce_messages: int = 0
    lookup_messages: int = 0
    busy_s: float = 0.0
    stored_bytes: int = 0


@dataclass(frozen=True, eq=False)
class RunResult:
    """One scenario under one policy with one seed.

    Attributes:
        scenario, policy, seed: which.
        asked: how many requests there were; those whose node went away before it answered have no row.
        number: of each request that was answered, its place in the stream: the same for every policy.
        n_input: tokens of each prompt.
        node: which node each request was sent to.
        requests: a column for each field of `RequestResult`.
        nodes: a column for each field of `NodeResult`.
        duration_s: simulated seconds.
        checks: how often each checker looked; a run in which one says no raises instead.
        counts: more that a policy or the world counts, by name.
        seconds: real time of the run; not in the digest.
    """

    scenario: str
    policy: str
    seed: int
    asked: int
    number: Array
    n_input: Array
    node: Array
    requests: Mapping[str, Array]
    nodes: Mapping[str, Array]
    duration_s: float
    checks: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def n_requests(self) -> int:
        """How many requests were answered."""
        return len(self.n_input)

    @property
    def hit_tokens(self) -> Array:
        """Tokens of each request that were not computed."""
        return self.requests["own_ram_tokens"] + self.requests["own_disk_tokens"] + self.requests["peer_tokens"]

    def total(self, column: str) -> float:
        """The sum of a column of `requests`, or else of `nodes`."""
        return float((self.requests if column in self.requests else self.nodes)[column].sum())

    def percentile(self, percent: float, column: str = "ttft_s") -> float:
        """A percentile of a column of `requests`; 0 without requests."""
        return float(np.percentile(self.requests[column], percent)) if self.n_requests else 0.0

    @property
    def digest(self) -> str:
        """Names all of the result but the time it took; times count to the nanosecond."""
        hasher = blake3(
            msgspec.json.encode([self.scenario, self.policy, self.seed, self.asked, round(self.duration_s * _NS)])
        )
        hasher.update(msgspec.json.encode([sorted(self.checks.items()), sorted(self.counts.items())]))
        for name, column in _columns(self):
            whole = np.rint(column * _NS) if column.dtype.kind == "f" else column
            hasher.update(f"{name}:{len(column)}:".encode())
            hasher.update(np.ascontiguousarray(whole, dtype="<i8").tobytes())
        return hasher.hexdigest()[:DIGEST_CHARACTERS]


def _columns(result: RunResult) -> list[tuple[str, Array]]:
    named = [("number", result.number), ("n_input", result.n_input), ("node", result.node)]
    named += [(f"requests.{name}", result.requests[name]) for name in RequestResult._fields]
    return named + [(f"nodes.{name}", result.nodes[name]) for name in NodeResult._fields]


class Recorder:
    """Collects a run's results row by row.

    Args:
        n_input: tokens of each prompt of the stream.
        node: which node each request is sent to.
        n_nodes: how many nodes there are.
    """

    def __init__(self, n_input: Array, node: Array, n_nodes: int) -> None:
        self._n_input, self._node = n_input, node
        self._requests = _empty(RequestResult, len(n_input))
        self._nodes = _empty(NodeResult, n_nodes)
        self._answered = bytearray(len(n_input))
        self._numbers: list[int] = []
        self._rows: list[RequestResult] = []

    def request(self, number: int, result: RequestResult) -> None:
        """What became of a request.

        Raises:
            ValueError: it was told before.
        """
        if self._answered[number]:
            raise ValueError(f"expected one result of request {number}, found a second")
        self._answered[number] = True
        self._numbers.append(number)
        self._rows.append(result)
        if len(self._rows) == _TOGETHER:
            self._write()

    def _write(self) -> None:
        """Into the columns what was told since the last time."""
        if self._rows:
            numbers = np.array(self._numbers)
            for column, values in zip(self._requests.values(), zip(*self._rows, strict=True), strict=True):
                column[numbers] = values
            self._numbers.clear()
            self._rows.clear()

    def node(self, number: int, result: NodeResult) -> None:
        """What a node did."""
        for column, value in zip(self._nodes.values(), result, strict=True):
            column[number] = value

    def finish(
        self,
        scenario: str,
        policy: str,
        seed: int,
        *,
        duration_s: float,
        checks: Mapping[str, int],
        counts: Mapping[str, int],
        seconds: float,
    ) -> RunResult:
        """The result. Requests that nobody answered, because their node was away, are left out."""
        self._write()
        kept = np.frombuffer(self._answered, dtype=bool)
        return RunResult(
            scenario,
            policy,
            seed,
            len(kept),
            np.flatnonzero(kept),
            self._n_input[kept],
            self._node[kept],
            {name: column[kept] for name, column in self._requests.items()},
            self._nodes,
            duration_s,
            dict(checks),
            dict(counts),
            seconds,
        )


def _empty(row: type[NamedTuple], length: int) -> dict[str, Array]:
    kinds = row._field_defaults.items()
    return {name: np.zeros(length, np.float64 if isinstance(zero, float) else np.int64) for name, zero in kinds}


class Summary(msgspec.Struct, frozen=True, tag="run", tag_field="type"):
    """A run on one line, for a person, a table or a plot.

    Attributes:
        scenario, policy, seed: which.
        requests: how many were answered.
        unanswered: those whose node went away before it answered.
        hit_token_fraction: of all prompts' tokens, those not computed.
        own_ram_fraction, own_disk_fraction, peer_fraction: the same by where they came from.
        ttft_s: percentiles by name, `p50` and so on, and `mean`.
        prefill_saved_fraction: of the prefill seconds without any reuse, those not spent.
        prefill_saved_s: the same in seconds.
        slower_fraction: of all requests, those whose first token came later than if everything had been computed.
        fetched_bytes, served_bytes, ssd_written_bytes, announce_messages, lookup_messages: totals.
        busiest_share: of all bytes served, the part of the node that served most.
        load_fairness: Jain's index of bytes served; 1 is even, 1/n all from one of n.
        duration_s: simulated seconds.
        checks, counts: as in `RunResult`.
        seconds: real time of the run.
        digest: names the result.
    """

    scenario: str
    policy: str
    seed: int
    requests: int
    unanswered: int
    hit_token_fraction: float
    own_ram_fraction: float
    own_disk_fraction: float
    peer_fraction: float
    ttft_s: dict[str, float]
    prefill_saved_fraction: float
    prefill_saved_s: float
    slower_fraction: float
    fetched_bytes: int
    served_bytes: int
    ssd_written_bytes: int
    announce_messages: int
    lookup_messages: int
    busiest_share: float
    load_fairness: float
    duration_s: float
    checks: dict[str, int]
    counts: dict[str, int]
    seconds: float
    digest: str


def summary(result: RunResult) -> Summary:
    """All that is told of a run."""
    tokens = float(result.n_input.sum())
    cold_s, spent_s = result.total("cold_prefill_s"), result.total("prefill_s")
    ttft_s = result.requests["ttft_s"]
    served = result.nodes["served_bytes"]
    times = {f"p{percent}": result.percentile(percent) for percent in PERCENTILES}
    times["mean"] = float(ttft_s.mean()) if len(ttft_s) else 0.0
    slower = later(ttft_s, result.requests["cold_prefill_s"] + result.requests["waited_s"])
    return Summary(
        result.scenario,
        result.policy,
        result.seed,
        result.n_requests,
        result.asked - result.n_requests,
        _share(float(result.hit_tokens.sum()), tokens),
        _share(result.total("own_ram_tokens"), tokens),
        _share(result.total("own_disk_tokens"), tokens),
        _share(result.total("peer_tokens"), tokens),
        times,
        _share(cold_s - spent_s, cold_s),
        cold_s - spent_s,
        _share(float(slower.sum()), result.n_requests),
        int(result.total("fetched_bytes")),
        int(served.sum()),
        int(result.total("ssd_written_bytes")),
        int(result.total("announce_messages")),
        int(result.total("lookup_messages")),
        _share(float(served.max(initial=0)), float(served.sum())),
        fairness(served),
        result.duration_s,
        dict(result.checks),
        dict(result.counts),
        result.seconds,
        result.digest,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def later(ttft_s: Array, than_s: Array) -> Array:
    """Which first tokens came later than others: by more than 2 %, and more than 20 ms.

    The same as the goal for a network that has nothing: less is not felt, and not that exactly known.
    """
    compared: Array = ttft_s > than_s + np.maximum(LATER_S, LATER_SHARE * than_s)
    return compared


def fairness(loads: Array) -> float:
    """Jain's index of loads: (sum x)^2 / (n sum x^2); 1 where nobody has any (Jain, Chiu, Hawe 1984)."""
    squares = float((loads.astype(np.float64) ** 2).sum())
    return float(loads.sum()) ** 2 / (len(loads) * squares) if squares else 1.0
