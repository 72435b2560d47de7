"""How many files and sockets a running node may have open."""

import resource
from contextlib import suppress

WANTED_OPEN_FILES = 8192
"""Connections, packs and streams of a busy node stay far below; macOS starts programs with 256, and allows 10,240."""


def raise_open_files_limit(wanted: int = WANTED_OPEN_FILES) -> int:
    """Raise this process's soft limit as far as its hard limit lets it; never lower it.

    Returns:
        The soft limit now in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # Some systems refuse what their own hard limit seems to allow; the old limit then stays.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
