"""``python -m simulations``: Ctrl-C counts from the first import on."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command of this process and return its exit code."""
    try:
        from simulations.cli import main as run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        record = '{"type":"error","code":"interrupted","exit_code":130,"message":"interrupted","hint":""}'
        sys.stderr.write((record if "--json" in sys.argv else "error: interrupted") + "\n")
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
