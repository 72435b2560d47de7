"""What an add waits for garbage collection: time at the store's lock, apart from the add's own work and its own disk.

On a busy machine whoever holds the lock is stopped with it. So the processor time of each hold is shown too: that is
what an add would wait at most on a machine that has a core for both.
"""

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.synthetic import make_artifact
from kvnet.store import disk
from kvnet.store.presence import Gate, Presence

N_HELD = 400
"""Artifacts in the store when the collection begins."""
N_ADDED = 60
TOKENS = 256


@dataclass
class Times:
    """Of one thread, in seconds: each add, its waits at the lock, and the processor time of each hold."""

    adds_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    holds_s: list[float] = field(default_factory=list)
    depth: int = 0
    held_from_s: float = 0.0


TIMES: defaultdict[int, Times] = defaultdict(Times)


class TimedGate(Gate):
    """A store's lock that notes who waited for it how long, and who held it how long."""

    def __init__(self, presence: Presence) -> None:
        super().__init__(presence)

    def __enter__(self) -> None:
        times = TIMES[threading.get_ident()]
        began_s = time.perf_counter()
        super().__enter__()
        if not times.depth:
            times.waited_s += time.perf_counter() - began_s
            times.held_from_s = time.thread_time()
        times.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        times = TIMES[threading.get_ident()]
        times.depth -= 1
        if not times.depth:
            times.holds_s.append(time.thread_time() - times.held_from_s)
        super().__exit__(kind, error, trace)


def main() -> None:
    """Run and print."""
    disk.Gate = TimedGate  # type: ignore[attr-defined]
    print(f"\nadds while garbage is collected: {N_HELD} artifacts held, {N_ADDED} added")
    for what, collect in (
        ("nothing else going on", None),
        ("tidy lets all of them go", lambda store: store.tidy(unused_s=0.0)),
        ("gc --all removes all of them", lambda store: store.collect_garbage(everything=True)),
    ):
        adding, collecting = _measured(collect)
        print(f"  {what}")
        print(_row("each add, its own work and disk included", adding.adds_s))
        print(_row("of that at the lock", adding.waits_s))
        if collecting is not None:
            print(_row("processor time of a hold by the collector", collecting.holds_s))


def _row(what: str, seconds: list[float]) -> str:
    ordered = sorted(1000 * each for each in seconds)
    return (
        f"    {what:<44} median {statistics.median(ordered):7.2f} ms   "
        f"p95 {ordered[int(0.95 * len(ordered))]:7.2f} ms   longest {ordered[-1]:7.2f} ms"
    )


def _measured(collect: Callable[[disk.DiskStore], object] | None) -> tuple[Times, Times | None]:
    """What the adding thread and the collecting one have noted."""
    with tempfile.TemporaryDirectory() as directory:
        clock = [1_800_000_000.0]
        store = disk.DiskStore.open(
            Path(directory) / "store", quota_bytes=1 << 40, min_free_bytes=0, now=lambda: clock[0]
        )
        for number in range(N_HELD):
            _add(store, number)
        clock[0] += 24 * 3600.0
        TIMES.clear()
        collecting = threading.Thread(target=(lambda: collect(store)) if collect is not None else (lambda: None))
        collecting.start()
        adding = TIMES[threading.get_ident()]
        for number in range(N_HELD, N_HELD + N_ADDED):
            adding.waited_s = 0.0
            began_s = time.perf_counter()
            _add(store, number)
            adding.adds_s.append(time.perf_counter() - began_s)
            adding.waits_s.append(adding.waited_s)
        collecting.join()
        other = TIMES.get(collecting.ident or 0)
        store.close()
        return adding, other


def _add(store: disk.DiskStore, number: int) -> None:
    make_artifact(store, 1 << 20, layers=1, first_token=number * TOKENS, pinned=False)


if __name__ == "__main__":
    main()
