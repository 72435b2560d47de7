"""The policies that a scenario is run under: what is shared, kept, let go and announced, and how."""

from collections.abc import Mapping
from typing import Final

from kvnet.errors import ConfigError
from simulations.policies.policy import Policy, Reach
from simulations.policies.shipped import CENTRAL, NONE, OWN, SWARM
from simulations.policies.variants import VARIANTS

__all__ = ["POLICIES", "Policy", "Reach", "named"]

POLICIES: Final[Mapping[str, Policy]] = {policy.name: policy for policy in (NONE, OWN, SWARM, *VARIANTS, CENTRAL)}
"""By name, in the order in which they are shown."""


def named(name: str) -> Policy:
    """A policy by its name.

    Raises:
        ConfigError: nobody knows it.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}", hint=f"known are {', '.join(POLICIES)}")
    return POLICIES[name]
