"""Where the ``kvnet`` command begins: Ctrl-C counts from the first import on.

This module imports nothing but ``sys``, so that hardly a moment is left in which Ctrl-C could end in a traceback.
"""

import sys

INTERRUPTED = 130
"""Exit code of ``kvnet.errors.InterruptedByUserError``, which is not imported yet when it is needed here."""


def main() -> int:
    """Run the command of this process and return its exit code."""
    try:
        from kvnet_node.app import main as run

        return run()
    except KeyboardInterrupt:
        record = '{"type":"error","code":"interrupted","exit_code":130,"message":"interrupted","hint":""}'
        sys.stderr.write((record if "--json" in sys.argv else "error: interrupted") + "\n")
        return INTERRUPTED
