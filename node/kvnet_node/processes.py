"""Processes that are started for one thing and must not outlive it."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def ended_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    """Nothing of a process is left afterwards, no pipe to it either, and it hangs no longer than this."""
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
        for pipe in (process.stdin, process.stdout, process.stderr):
            # What was not written yet goes nowhere any more.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
