"""Run all benchmarks, or those named: ``python -m benchmarks hashing transfer``."""

import importlib
import sys

from benchmarks.report import machine
from kvnet.engine.mlx.leaving import leave

BENCHMARKS = ("hashing", "restore", "transfer", "ttft", "replay", "collecting")


def main(names: list[str]) -> int:
    """Run the benchmarks named, or all."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"expected any of {', '.join(BENCHMARKS)}; found {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    print(machine())
    for name in names or BENCHMARKS:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
