"""How a process that has used MLX ends."""

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process now, with what it has printed out and without tearing the interpreter down.

    A thread of MLX's that wants the interpreter while that ends is unwound through C++ which allows no such thing: the
    process aborts after its work is done (exit code 134), or waits for ever.

    Args:
        status: the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # None where there is none; whoever read it may be gone.
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    os._exit(status)
