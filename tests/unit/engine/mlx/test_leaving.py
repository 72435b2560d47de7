"""A process that has used MLX ends without waiting for threads and without tearing anything down."""

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading
from kvnet.engine.mlx.leaving import leave
atexit.register(print, "torn down")
threading.Thread(target=threading.Event().wait).start()
sys.stdout.write("said")
sys.stderr.write("told")
leave(7)
"""


def test_what_was_printed_is_out_and_nothing_else_happens() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (7, "said", "told")
