"""Keeps the machine from sleeping while something is uploaded, with the system's own tool as a child process.

Both tools end by themselves when this process does, however it ends: ``caffeinate`` watches it, and what
``systemd-inhibit`` runs reads a pipe that closes with it. The macOS part has not run on a Mac.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

Find = Callable[[str], str | None]
"""Where a tool is; None when it is not here."""

END_S = 2.0
"""Seconds a child gets to end before it is killed."""


def command(process_id: int, *, platform: str = sys.platform, which: Find = shutil.which) -> list[str]:
    """What keeps this machine awake as long as a process lives; empty where nothing does."""
    if platform == "darwin":
        tool = which("caffeinate")
        return [tool, "-i", "-w", str(process_id)] if tool else []
    tool, reader = which("systemd-inhibit"), which("cat")
    if not tool or not reader:
        return []
    return [tool, "--what=idle:sleep", "--who=kvnet", "--why=sends to another machine", "--mode=block", reader]


class AwakeHolder:
    """Holds the machine awake, or does not. Its calls start and end processes: not for the loop.

    Args:
        arguments: the child's command line; empty where there is none.
    """

    def __init__(self, arguments: list[str] | None = None) -> None:
        self._arguments = command(os.getpid()) if arguments is None else arguments
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether the machine is held awake now."""
        return self._child is not None and self._child.poll() is None

    def hold(self, *, wanted: bool) -> None:
        """Hold it awake from now on, or no longer. A child that ended by itself is not started again and again."""
        if not wanted:
            self._end()
        elif self._child is None and self._arguments:
            try:
                self._child = subprocess.Popen(
                    self._arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                self._arguments = []

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
