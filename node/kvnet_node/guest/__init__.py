"""How this node behaves as a guest on somebody's machine: on battery, on a metered link, asleep, told to pause."""
