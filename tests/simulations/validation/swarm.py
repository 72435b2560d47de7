"""Real nodes on loopback that answer the requests of a small scenario, and the same scenario for the simulator."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import trio

from kvnet.engine.toy_model import rendered
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from kvnet_node.asking import Told, ask, decided
from kvnet_node.control_client import call_running_node
from kvnet_node.identity import NodeIdentity
from kvnet_node.operations.requests import PeersRequest, StatusRequest, StatusResult
from kvnet_node.paths import prepare_data_dir
from simulations.chips import LinkKind
from simulations.policies import named
from simulations.results import RunResult
from simulations.workload.requests import StreamBuilder
from simulations.world import run_world
from simulations.world.setup import NodeSetup, WorldSetup
from tests.e2e.conftest import Kvnet
from tests.mlx.tinymodels import write_model

PATIENCE_S = 60.0
POLL_S = 0.05
TOKEN_BYTES = 256
"""K/V of the toy."""
RESTORE_BYTES_S = 1e9
"""What a node assumes until it was calibrated; beside this K/V it is nothing."""
ANSWER_TOKENS = 2
GAP_S = 1000.0
"""Between two simulated requests: each is over, and what it left has been told, before the next."""
LAUNCHER = Path(__file__).parent / "toy_node.py"


@dataclass(frozen=True)
class Plan:
    """What is asked of how many nodes, and how fast these are.

    Attributes:
        asked: node, document and question of each request.
        documents: characters of each, which are tokens.
        prefill_s: seconds a token.
        upload_bytes_s: what a node sends a second at most.
    """

    n_nodes: int
    asked: Sequence[tuple[int, int, int]]
    documents: Sequence[int]
    prefill_s: float
    upload_bytes_s: int

    def messages(self, document: int, question: int) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": _text(f"document {document}", self.documents[document])},
            {"role": "user", "content": _text(f"question {question}", 60)},
        ]

    @staticmethod
    def warm_up(node: int) -> list[dict[str, str]]:
        """Something short, never kept, after which a node knows how fast it is."""
        return [{"role": "user", "content": _text(f"warm {node}", 100)}]


def _text(seed: str, length: int) -> str:
    drawn = Random(seed)
    return "".join(drawn.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(length))


# --- the simulator ----------------------------------------------------------------------------------------------------


def simulated(plan: Plan) -> RunResult:
    """All requests, the warm-ups first."""
    builder = StreamBuilder("validation", plan.n_nodes, block_tokens=1)
    asked = [(node, plan.warm_up(node)) for node in range(plan.n_nodes)]
    asked += [(node, plan.messages(document, question)) for node, document, question in plan.asked]
    for number, (node, messages) in enumerate(asked):
        tokens = rendered(messages, {}, answer=True)
        segment = builder.segment_of(tokens)
        builder.add(GAP_S * number, node, number, segment, len(tokens), ANSWER_TOKENS)
    machine = Machine(PrefillSpeed([SpeedPoint(0, 1 / plan.prefill_s)]), RESTORE_BYTES_S)
    # A question and its answer over loopback, each handled in Python.
    link = LinkKind("loopback", plan.upload_bytes_s, 1e9, 0.005)
    each = NodeSetup(machine, link, "toy", TOKEN_BYTES)
    setup = WorldSetup("validation", [each] * plan.n_nodes, builder.build())
    return run_world(setup, named("swarm"), 0, exact_transfers=True)


# --- the nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """What the nodes did.

    Attributes:
        told: the answers, in order.
        served_bytes: of chunks, by all nodes.
    """

    told: Sequence[Told]
    served_bytes: int


def real(plan: Plan, folder: Path) -> Real:
    model = str(write_model(folder / "model"))
    with nodes(plan, folder, model) as (runners, endpoints):
        told = []
        for node, endpoint in enumerate(endpoints):
            body = {"model": model, "messages": plan.warm_up(node), "max_tokens": ANSWER_TOKENS}
            told.append(ask(endpoint, body))
        for node, document, question in plan.asked:
            before = [status(runner) for runner in runners]
            body = {"model": model, "messages": plan.messages(document, question), "max_tokens": ANSWER_TOKENS}
            told.append(ask(endpoints[node], body))
            _settle(runners, node, before)
        return Real(told, sum(status(runner).counters.get("bytes_served", 0) for runner in runners))


@contextmanager
def nodes(plan: Plan, folder: Path, model: str) -> Iterator[tuple[list[Kvnet], list[str]]]:
    """Nodes of one person, all connected with each other."""
    runners = []
    for number in range(plan.n_nodes):
        (folder / f"n{number}").mkdir()
        runners.append(Kvnet(folder / f"n{number}" / "data"))
    _pair(runners, folder / "pairing.kvns")
    try:
        for runner in runners:
            runner.prefix = (_python(), str(LAUNCHER))
            runner.environment |= {
                "TOY_PREFILL_S": str(plan.prefill_s),
                "KVNET_LIMITS_UPLOAD_BYTES_S": str(plan.upload_bytes_s),
            }
        started = _start(runners, model)
        addresses = [str(each["addresses"][0]) for each in started]
        for number, runner in enumerate(runners):
            _call(runner.data_dir, "peers", PeersRequest(connect=addresses[:number]))
        _until(lambda: all(status(runner).peers >= plan.n_nodes - 1 for runner in runners), "all are connected")
        yield runners, [str(each["endpoint"][0]) for each in started]
    finally:
        for runner in runners:
            runner.end()


def _python() -> str:
    import sys

    return sys.executable


def _start(runners: Sequence[Kvnet], model: str) -> list[dict[str, list[str]]]:
    """All at once: each start takes a while."""
    found: list[dict[str, list[str]]] = [{} for _ in runners]

    async def start_all() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(len(runners)):
                nursery.start_soon(start_one, number)

    async def start_one(number: int) -> None:
        found[number], _ = await trio.to_thread.run_sync(runners[number].start, "--model", model)

    trio.run(start_all)
    return found


def _pair(runners: Sequence[Kvnet], file: Path) -> None:
    """One namespace for all, and each trusts what the others sign."""
    identities = [NodeIdentity(prepare_data_dir(runner.data_dir), "trusted") for runner in runners]
    for identity in identities:
        identity.load()
    identities[0].export_namespace(file)
    for identity in identities[1:]:
        identity.import_namespace(file, keep_old=False, count=lambda _: 0)
    publishers = [identity.publisher() for identity in identities]
    for number, identity in enumerate(identities):
        for other, publisher in enumerate(publishers):
            if other != number:
                identity.trust(publisher, f"node {other}")


def status(runner: Kvnet) -> StatusResult:
    return msgspec.json.decode(_call(runner.data_dir, "status", StatusRequest()), type=StatusResult)


def _call(data_dir: Path, verb: str, request: StatusRequest | PeersRequest) -> bytes:
    said = call_running_node(data_dir, verb, request, lambda _: None)
    assert said is not None
    return said


def _settle(runners: Sequence[Kvnet], node: int, before: Sequence[StatusResult]) -> None:
    """Until the answer's state has been kept or not, and the others know what is held."""
    answered = decided(before[node].counters) + 1
    _until(lambda: decided(status(runners[node]).counters) >= answered, "it is kept or not")
    now = status(runners[node])
    if (now.artifacts, now.held_bytes) != (before[node].artifacts, before[node].held_bytes):

        def told(other: int) -> bool:
            known = status(runners[other]).counters.get("tables_records_new", 0)
            return known > before[other].counters.get("tables_records_new", 0)

        _until(lambda: all(told(other) for other in range(len(runners)) if other != node), "others were told")


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"expected within {PATIENCE_S:.0f} s that {what}"
        time.sleep(POLL_S)
