"""Where bytes rest: packs, their index, pins, quota, named contexts, and the lock of a data directory."""
