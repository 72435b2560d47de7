"""How a benchmark says what it measured."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """One thing measured: bytes per second over several rounds."""

    what: str
    bytes_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round's bytes per second."""
        return statistics.median(self.bytes_per_s)


def time_rounds(what: str, size_bytes: int, run: Callable[[], object], *, rounds: int = 5) -> Rate:
    """Time `run`, which handles `size_bytes`, after one round that does not count."""
    run()
    rates = []
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        rates.append(size_bytes / (time.perf_counter() - begun))
    return Rate(what, tuple(rates))


def print_rates(title: str, rates: list[Rate]) -> None:
    """Print rates below each other; ratios are to the first, and the spread is the lowest and highest round."""
    print(f"\n{title}")
    for rate in rates:
        spread = f"{min(rate.bytes_per_s) / MB:,.0f} to {max(rate.bytes_per_s) / MB:,.0f}"
        print(f"  {rate.what:44} {rate.median / MB:8,.0f} MB/s  ({spread:>16})  {rate.median / rates[0].median:6.2f}x")


def machine() -> str:
    """Return one line that names the machine and the Python."""
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
