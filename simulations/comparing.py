"""Several runs of one scenario: policies beside each other, each with one seed or more, on one core or more."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulations.policies import named
from simulations.results import RunResult, Summary, summary
from simulations.scenario import Scenario
from simulations.world import run

Report = Callable[[str, int], Callable[[int, int], None]]
"""For a policy and a seed, what is told how many requests of how many have arrived."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of several runs that differ in their seed alone."""

    mean: float
    least: float
    most: float

    @property
    def half(self) -> float:
        """Half of the range."""
        return (self.most - self.least) / 2


def spread(values: Sequence[float]) -> Spread:
    """Mean and range of at least one value."""
    return Spread(sum(values) / len(values), min(values), max(values))


def by_policy(runs: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Runs by policy, in the order in which they come."""
    found: dict[str, list[Summary]] = {}
    for each in runs:
        found.setdefault(each.policy, []).append(each)
    return found


def compare(
    scenario: Scenario, policies: Sequence[str], seeds: Sequence[int], report: Report, *, jobs: int = 1
) -> Iterator[tuple[RunResult, Summary]]:
    """Run each policy with each seed; results come in this order, whatever is done at once.

    Args:
        scenario: what is given.
        policies: their names.
        seeds: of each.
        report: told of progress, where one run is done after the other.
        jobs: processes; with more than one, runs are done at once.

    Raises:
        ConfigError: a policy that nobody knows, before anything is run.
    """
    for policy in policies:
        named(policy)
    wanted = [(policy, seed) for policy in policies for seed in seeds]
    if jobs == 1:
        for policy, seed in wanted:
            result = run(scenario, policy, seed, report=report(policy, seed))
            yield result, summary(result)
        return
    # Processes that begin anew: a copy of this one would hold its locks.
    with ProcessPoolExecutor(min(jobs, len(wanted)), multiprocessing.get_context("spawn")) as pool:
        begun = [pool.submit(run, scenario, policy, seed) for policy, seed in wanted]
        try:
            for each in begun:
                result = each.result()
                yield result, summary(result)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
