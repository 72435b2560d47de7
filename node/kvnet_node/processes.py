"""Processes that are started for one thing and must not outlive it."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    """Nothing of a process is left afterwards, and it hangs no longer than this."""
    late = threading.Timer(seconds, process.kill)
    late.daemon = True
    late.start()
    try:
        yield
        process.wait()
    finally:
        late.cancel()
        process.kill()
        process.wait()
