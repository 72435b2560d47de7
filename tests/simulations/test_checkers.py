"""The checkers say no when what must not happen has happened."""

from collections.abc import Callable

import pytest

from simulations.checkers import Checkers, CheckFailedError, Truth
from simulations.policies import named
from simulations.results import Recorder
from simulations.world.clock import HeapClock
from simulations.world.node import Job
from simulations.world.state import WorldState
from simulations.world.transfers import Ledger
from tests.simulations.world.worlds import node, world

PROMPT = 2560


def small() -> WorldState:
    setup = world([node(), node()], [(0.0, 0, 0, PROMPT, 0)])
    recorder = Recorder(setup.stream.n_input, setup.stream.node, 2)
    return WorldState(setup, named("swarm"), 0, HeapClock(), recorder)


def job_in(made: WorldState, reused_tokens: int) -> Job:
    request = made.setup.stream[0]
    job = Job(request, made.tree.path(request.segment, request.n_input), 0)
    job.reused_tokens = reused_tokens
    return job


def test_what_nobody_computed_is_not_continued_from() -> None:
    made, truth = small(), Truth()
    checkers = Checkers(truth)
    checkers.continued(job_in(made, 0))
    with pytest.raises(CheckFailedError, match="at most 0"):
        checkers.continued(job_in(made, 256))
    truth.computed(made.tree.path(0, 1000))
    checkers.continued(job_in(made, 1000))
    with pytest.raises(CheckFailedError, match="at most 1000"):
        checkers.continued(job_in(made, 1001))


def test_a_token_is_left_to_compute() -> None:
    made, truth = small(), Truth()
    truth.computed(made.tree.path(0, PROMPT))
    with pytest.raises(CheckFailedError):
        Checkers(truth).continued(job_in(made, PROMPT))


def test_a_store_over_its_quota_is_found() -> None:
    made = small()
    first = made.nodes[0]
    first.store.keep(made.tree.path(0, PROMPT), 0, 0.0)
    made.checks.stored(first)
    first.store.quota_bytes = first.store.used_bytes - 2 * first.block_bytes
    with pytest.raises(CheckFailedError, match="quota"):
        made.checks.stored(first)


def test_time_does_not_go_back() -> None:
    checkers = Checkers(Truth())
    checkers.time(5.0)
    with pytest.raises(CheckFailedError, match="back"):
        checkers.time(4.0)


def lie(ledger: Ledger) -> None:
    ledger.accepted_lies = 1


def lose(ledger: Ledger) -> None:
    ledger.sent, ledger.received = 10, 9


def hang(ledger: Ledger) -> None:
    ledger.running = 1


@pytest.mark.parametrize(("change", "words"), [(lie, "liar"), (lose, "bytes"), (hang, "never came to an end")])
def test_the_end_finds_lies_and_what_is_missing(change: Callable[[Ledger], None], words: str) -> None:
    made, ledger = small(), Ledger()
    made.checks.finish(made.nodes, ledger, 0.0, asked=1, ended=1)
    change(ledger)
    with pytest.raises(CheckFailedError, match=words):
        made.checks.finish(made.nodes, ledger, 0.0, asked=1, ended=1)


def test_the_end_finds_requests_without_one() -> None:
    made = small()
    with pytest.raises(CheckFailedError, match="2 requests"):
        made.checks.finish(made.nodes, Ledger(), 0.0, asked=2, ended=1)


def test_the_end_finds_writes_beyond_the_budget() -> None:
    made = small()
    made.nodes[1].counted.kept_bytes = 3 * made.nodes[1].budget.day_bytes
    made.checks.finish(made.nodes, Ledger(), 2 * 86400.0, asked=0, ended=0)
    with pytest.raises(CheckFailedError, match="of its own accord"):
        made.checks.finish(made.nodes, Ledger(), 86400.0, asked=0, ended=0)
