"""How long an add waits for the store while garbage is collected, beside the same adds on a quiet store."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.synthetic import make_artifact
from kvnet.store.disk import DiskStore

N_HELD = 400
"""Artifacts in the store when the collection begins."""
N_ADDED = 60
TOKENS = 256


def main() -> None:
    """Run and print."""
    print(f"\nadds while garbage is collected: {N_HELD} artifacts held, {N_ADDED} added")
    quiet = _waits(lambda _store: None)
    print(_row("nothing else going on", quiet))
    for what, collect in (
        ("tidy lets all of them go", lambda store: store.tidy(unused_s=0.0)),
        ("gc --all removes all of them", lambda store: store.collect_garbage(everything=True)),
    ):
        waits = _waits(collect)
        print(_row(what, waits, f"{max(waits) / max(quiet):.1f}x"))


def _row(what: str, waits: list[float], ratio: str = "1.0x") -> str:
    ordered = sorted(1000 * wait for wait in waits)
    return (
        f"  {what:<34} median {statistics.median(ordered):6.1f} ms   "
        f"p95 {ordered[int(0.95 * len(ordered))]:6.1f} ms   longest {ordered[-1]:6.1f} ms   {ratio}"
    )


def _waits(collect: Callable[[DiskStore], object]) -> list[float]:
    """Seconds of each add, from asking for room to being listed; what it writes itself included."""
    with tempfile.TemporaryDirectory() as directory:
        clock = [1_800_000_000.0]
        store = DiskStore.open(Path(directory) / "store", quota_bytes=1 << 40, min_free_bytes=0, now=lambda: clock[0])
        for number in range(N_HELD):
            _add(store, number)
        clock[0] += 24 * 3600.0
        collecting = threading.Thread(target=lambda: collect(store))
        collecting.start()
        waits = []
        for number in range(N_HELD, N_HELD + N_ADDED):
            began_s = time.perf_counter()
            _add(store, number)
            waits.append(time.perf_counter() - began_s)
        collecting.join()
        store.close()
        return waits


def _add(store: DiskStore, number: int) -> None:
    make_artifact(store, 1 << 20, layers=1, first_token=number * TOKENS, pinned=False)


if __name__ == "__main__":
    main()
