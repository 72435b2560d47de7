"""The simulated world: nodes with engines and stores, links between them, and what happens in virtual time."""

from simulations.world.running import run, run_world

__all__ = ["run", "run_world"]
