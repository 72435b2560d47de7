"""What a scenario asks of the world: requests, and who is there when."""

from dataclasses import dataclass

import numpy as np

from simulations.scenario import Scenario
from simulations.workload.churn import PresenceChange, schedule
from simulations.workload.kinds import stream_of
from simulations.workload.requests import RequestStream


@dataclass(frozen=True, slots=True)
class Work:
    """What happens to a world from outside.

    Attributes:
        stream: requests, each at a node that is there then.
        changes: who comes and goes, in order; a node that is there from the beginning joins at 0.
    """

    stream: RequestStream
    changes: tuple[PresenceChange, ...]


def prepare(scenario: Scenario, seed: int) -> Work:
    """The requests of a scenario and who is there: the same for the same seed.

    Raises:
        UsageError, MalformedError: a trace that is not there, or does not fit.
    """
    asked, coming = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
    stream = stream_of(scenario, asked)
    presence = schedule(scenario, stream.duration_s, coming)
    return Work(presence.fit(stream, coming), presence.changes)
