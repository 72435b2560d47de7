"""No sharing, a node's own cache, the swarm as it ships, and the ceiling."""

from typing import Final

from simulations.policies.policy import Policy, Reach

NONE: Final = Policy("none", "every prompt is computed", reach=Reach.NOTHING)
OWN: Final = Policy("own", "each node's own RAM and disk", reach=Reach.OWN)
SWARM: Final = Policy("swarm", "the swarm with the node's defaults")
CENTRAL: Final = Policy("central", "a perfect cache for all, at no cost: the ceiling", reach=Reach.CENTRAL)
