"""The simulated world: nodes with engines and stores, links between them, and what happens in virtual time."""
