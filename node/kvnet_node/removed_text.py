"""What is said to a machine that was removed from a swarm; read by commands that load nothing to do the work with."""

import shlex
from collections.abc import Sequence


def removed_text(swarms: Sequence[str]) -> str:
    """What it means that this machine was removed from some swarms."""
    leave = "".join(f"; kvnet leave {shlex.quote(each)} forgets it" for each in swarms if each != "mine")
    return (
        f"this machine was removed from {', '.join(swarms)}: it finds nothing new there until it joins with a new "
        f"invitation{leave}"
    )
