"""Run a world and hand back what it found."""

import gc
import time

from simulations.policies import Policy, named
from simulations.results import Recorder, RunResult
from simulations.scenario import Scenario
from simulations.world.building import build
from simulations.world.clock import Clock, HeapClock
from simulations.world.setup import WorldSetup
from simulations.world.state import WorldState
from simulations.world.world import Report, World

MOST_EXACT_REQUESTS = 10_000
"""Scenarios with more have fluid transfers unless they ask for others."""


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""


def run(scenario: Scenario, policy: str | Policy, seed: int, *, report: Report = _silent) -> RunResult:
    """One scenario under one policy.

    Args:
        scenario: what is given.
        policy: how nodes behave, or its name.
        seed: of what is drawn.
        report: told now and then how many requests of how many have arrived.

    Raises:
        ConfigError: a chip, model, link or policy that nobody knows.
        UsageError, MalformedError: a trace that is not there, or does not fit.
        CheckFailedError: something happened that must not.
    """
    chosen = named(policy) if isinstance(policy, str) else policy
    setup = build(scenario, seed)
    exact = scenario.exact_transfers
    if exact is None:
        exact = len(setup.stream) <= MOST_EXACT_REQUESTS
    return run_world(setup, chosen, seed, exact_transfers=exact, report=report)


def run_world(
    setup: WorldSetup,
    policy: Policy,
    seed: int,
    *,
    clock: Clock | None = None,
    exact_transfers: bool = False,
    report: Report = _silent,
) -> RunResult:
    """The same with a world that was built by hand.

    Args:
        setup: what is given.
        policy: how nodes behave.
        seed: of what is drawn.
        clock: of virtual time; by default a heap.
        exact_transfers: every chunk goes through the node's fetch machine; otherwise bytes flow.
        report: told now and then how many requests of how many have arrived.
    """
    began_s = time.perf_counter()
    clock = clock or HeapClock()
    stream = setup.stream
    recorder = Recorder(stream.n_input, stream.node, len(setup.nodes))
    state = WorldState(setup, policy, seed, clock, recorder, exact_transfers=exact_transfers)
    # Nothing that a run drops is part of a cycle; looking for some takes a third of a long run.
    collecting = gc.isenabled()
    gc.disable()
    try:
        World(state).run(report)
    finally:
        if collecting:
            gc.enable()
    return recorder.finish(
        setup.name,
        policy.name,
        seed,
        duration_s=clock.now,
        checks=state.checks.looked,
        counts={name: count for name, count in state.counts.items() if count},
        seconds=time.perf_counter() - began_s,
    )
