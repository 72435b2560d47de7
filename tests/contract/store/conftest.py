"""Every store that fulfils the contract."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvnet.store.disk import DiskStore
from kvnet.store.interface import Store
from kvnet.store.memory import MemoryStore

OpenStore = Callable[..., Store]


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["disk", "memory"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[OpenStore]:
    """Opens new, empty stores; closes them after the test."""
    opened: list[Store] = []

    def open_one(*, quota_bytes: int = 1 << 30) -> Store:
        store: Store
        if request.param == "memory":
            store = MemoryStore(quota_bytes=quota_bytes, now=clock)
        else:
            store = DiskStore.open(
                tmp_path / f"store{len(opened)}", quota_bytes=quota_bytes, min_free_bytes=0, now=clock
            )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()
