"""Tidying and removing while others add, read, pin and evict: at any point in between, nothing that counts is lost.

A thread that is in the middle of tidying holds the store's lock only now and then. At one of the places where it does
not, another thread's whole operation is run: whatever that is, the store must agree with its model.
"""

import itertools
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvnet.errors import NotInStoreError, StoreFullError
from kvnet.format.hashes import ArtifactHash, BytesLike
from kvnet.store.disk import DiskStore
from kvnet.store.interface import PackWriter
from kvnet.store.osfile import OsFiles
from kvnet.store.presence import Gate
from tests.unit.store.samples import Sample, check_whole, publish, sample

STEPS = 25
"""Long operations of each seed; in most of them several others come in between."""

N_INTERLEAVINGS = 100_000
"""How many of these the nightly run is to make."""

# They share the first one to four blocks with each other, or nothing.
ARTIFACTS = [
    sample([*range(shared), *range(start, start + 300)])
    for shared in (0, 256, 512, 1024)
    for start in range(10_000, 50_000, 10_000)
]
LARGEST_BYTES = max(artifact.size_bytes for artifact in ARTIFACTS)


class NoWaiting(OsFiles):
    """The real operations, but for the waits for the medium; what reads or writes without the lock says so."""

    def __init__(self) -> None:
        self.unlocked: Callable[[], None] = lambda: None

    def create(self, path: Path) -> int:
        self.unlocked()
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        self.unlocked()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.unlocked()
        super().unlink(path)

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        self.unlocked()
        super().write(handle, data, offset)

    def read(self, handle: int, length_bytes: int, offset: int) -> bytes:
        self.unlocked()
        return super().read(handle, length_bytes, offset)

    def sync(self, handle: int) -> None:
        self.unlocked()

    def sync_directory(self, path: Path) -> None:
        self.unlocked()


class Watched(Gate):
    """A lock that says when it was let go of altogether."""

    waiting = 0

    def __init__(self, released: Callable[[], None]) -> None:
        self.depth = 0
        self._released = released

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._released()

    def while_away(self, function: Callable[[], None]) -> None:
        with self:
            function()

    settle = while_away

    def wait_for(self, true: Callable[[], bool]) -> None:
        """The one in between would wait for the one that has stopped for it."""
        if not true():
            raise StoreFullError("its files are being changed")

    def give_way(self) -> None:
        self._released()


class Turn:
    """A lock that the long operation has for as long as it is inside: whoever comes in between does not get it."""

    def __init__(self) -> None:
        self.between = False
        self._depth = 0

    def __enter__(self) -> None:
        if self.between and self._depth:
            raise StoreFullError("it is another one's turn")
        self._depth += not self.between

    def __exit__(self, *_: object) -> None:
        self._depth -= not self.between


class Interleaved:
    """A store, what it must hold, and what two threads may do with it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.files = NoWaiting()
        self.now_s = 1_800_000_000.0
        # Some stores have room for everything, some are always nearly full.
        self.quota_bytes = self.random.choice([1 << 30, LARGEST_BYTES * 8 + 200_000])
        self.store = DiskStore.open(
            folder / "store",
            quota_bytes=self.quota_bytes,
            min_free_bytes=0,
            files=self.files,
            now=lambda: self.now_s,
        )
        self.lock, self.turns = Watched(self.unlocked), (Turn(), Turn())
        collector = self.store._collector
        self.store._lock = collector._gate = collector.removing._gate = collector.compacting._gate = self.lock
        collector.compacting.turn, collector.removing.turn = self.turns  # type: ignore[assignment]
        self.files.unlocked = self.unlocked
        self.left = -1
        self.tidying = False
        self.going: ArtifactHash | None = None
        self.pinned: set[ArtifactHash] = set()
        self.fresh: set[ArtifactHash] = set()
        self.open: list[tuple[PackWriter, Sample, list[int]]] = []
        self.ran = 0

    def one(self) -> Sample:
        return self.random.choice(ARTIFACTS)

    def add(self) -> None:
        artifact = self.one()
        if self.to_be_removed(artifact.hash):
            return
        pinned = self.random.random() < 0.2 and len(self.pinned) < 3
        self.note_evicted(for_room=not self.tidying)
        try:
            publish(self.store, artifact, pinned=pinned)
        except StoreFullError:
            return
        finally:
            self.note_evicted(for_room=True)
        if pinned:
            self.pinned.add(artifact.hash)
        self.is_new(artifact)

    def is_new(self, artifact: Sample) -> None:
        """It came just now."""
        self.fresh.add(artifact.hash)
        check_whole(self.store, artifact)

    def note_evicted(self, *, for_room: bool) -> None:
        """What the store says it has evicted is nothing pinned, and nothing new unless somebody needed the room."""
        left, self.left = self.left, -1  # nobody comes in between asking and noting
        evicted = set(self.store.take_evicted())
        self.left = left
        assert evicted.isdisjoint(self.pinned)
        assert for_room or evicted.isdisjoint(self.fresh)
        self.fresh -= evicted

    def to_be_removed(self, artifact: ArtifactHash) -> bool:
        """Whether the long operation is about to remove an artifact, whatever somebody does with it now."""
        return artifact == self.going and self.store.get(artifact) is not None

    def begin(self) -> None:
        """Refer to chunks that are held, and finish later."""
        artifact = self.one()
        held = [index for index, entry in enumerate(artifact.entries) if self.store.has_chunk(entry.hash)]
        self.note_evicted(for_room=not self.tidying)
        try:
            writer = self.store.begin_pack(len(artifact.chunks))
        except StoreFullError:
            return
        finally:
            self.note_evicted(for_room=True)
        for index in held:
            writer.reference(index, artifact.entries[index])
        self.open.append((writer, artifact, held))

    def finish(self) -> None:
        if not self.open:
            return
        writer, artifact, held = self.open.pop()
        if self.to_be_removed(artifact.hash):
            writer.abort()
            return
        self.note_evicted(for_room=not self.tidying)
        try:
            for index in set(range(len(artifact.chunks))) - set(held):
                writer.put(index, artifact.chunks[index])
            writer.publish(artifact.envelope, keys=artifact.keys, pinned=False)
        except StoreFullError:
            writer.abort()
            return
        finally:
            self.note_evicted(for_room=True)
        self.is_new(artifact)

    def pin(self) -> None:
        for record in self.store.artifacts():
            if len(self.pinned) < 3 and not self.to_be_removed(record.hash):
                self.store.pin(record.hash)
                self.pinned.add(record.hash)
                return

    def unpin(self) -> None:
        if self.pinned:
            one = self.random.choice(sorted(self.pinned))
            self.pinned.discard(one)
            self.store.unpin(one)

    def use(self) -> None:
        for record in self.store.artifacts()[:1]:
            self.store.touch(record.hash)
            if not self.to_be_removed(record.hash):
                self.fresh.add(record.hash)
            assert len(self.store.tokens_of(record.hash)) == record.manifest.n_tokens

    def let_go(self) -> None:
        records = [record for record in self.store.artifacts() if not record.pinned]
        if records:
            gone = self.random.choice(records).hash
            with suppress(StoreFullError):  # it would have to wait for its turn
                self.store.release(gone)
                self.fresh.discard(gone)

    def unlocked(self) -> None:
        """The thread of the long operation has no lock now: it may be another one's turn."""
        if self.lock.depth or self.left < 0:
            return
        self.left -= 1
        if self.left < 0:
            self.ran += 1
            for turn in self.turns:
                turn.between = True
            self.random.choice([self.add, self.begin, self.finish, self.pin, self.unpin, self.use, self.let_go])()
            for turn in self.turns:
                turn.between = False
            # Others may come as well before the long operation has ended.
            self.left = self.random.randint(0, 6)

    def step(self) -> None:
        """One long operation, and at some places in the middle of it another thread's."""
        for _ in range(self.random.randint(1, 3)):
            self.random.choice([self.add, self.add, self.let_go, self.finish])()
        self.now_s += 1
        self.left = self.random.randint(0, 8)
        self.random.choice([self.tidy, self.tidy, self.collect, self.remove])()
        self.left = -1
        self.tidying = False
        self.check()

    def tidy(self) -> None:
        self.now_s += 61
        self.fresh = set()
        self.tidying = True
        self.store.tidy(unused_s=self.random.choice([200.0, 1e9]))
        self.note_evicted(for_room=False)

    def collect(self) -> None:
        self.store.collect_garbage()
        # Others may have filled the store meanwhile.
        self.note_evicted(for_room=True)

    def remove(self) -> None:
        records = [record for record in self.store.artifacts() if not record.pinned]
        if records:
            gone = self.random.choice(records).hash
            # Whoever pinned or used it a moment ago does not keep its owner from removing it.
            self.fresh.discard(gone)
            self.pinned.discard(gone)
            self.going = gone
            with suppress(NotInStoreError):
                self.store.remove(gone)
            self.going = None

    def check(self) -> None:
        by_hash = {artifact.hash: artifact for artifact in ARTIFACTS}
        for wanted in self.pinned | self.fresh:
            check_whole(self.store, by_hash[wanted])
        for _, artifact, held in self.open:
            for index in held:
                assert self.store.read_chunk(artifact.entries[index].hash) == artifact.chunks[index]
        for record in self.store.artifacts():
            assert record.complete
        # Notes of uses and pins lie in the index's log until somebody needs the room.
        self.store._parts.index.checkpoint()
        assert self.store.usage().held_bytes <= self.quota_bytes + LARGEST_BYTES


def run(folder: Path, seed: int) -> int:
    """How many operations came in between."""
    world = Interleaved(folder, seed)
    for _ in range(STEPS):
        world.step()
    while world.open:
        world.finish()
    world.store.tidy(unused_s=1e9)
    world.check()
    assert not list((folder / "store" / "tmp").iterdir())
    world.store.close()
    # The files alone say the same.
    again = DiskStore.open(folder / "store", quota_bytes=1 << 30, min_free_bytes=0)
    assert again.problems == ()
    for artifact in ARTIFACTS:
        if artifact.hash in world.pinned:
            check_whole(again, artifact)
    again.close()
    return world.ran


def test_whatever_happens_while_the_store_is_tidied_nothing_pinned_leased_or_new_is_lost(tmp_path: Path) -> None:
    seeds = range(20)
    ran = sum(run(tmp_path / str(seed), seed) for seed in seeds)
    # Otherwise this would show nothing.
    assert ran > len(seeds) * STEPS


@pytest.mark.nightly
def test_nothing_is_lost_over_a_hundred_thousand_interleavings() -> None:
    ran = 0
    # In memory, where there is such a folder: nothing here waits for a medium, and a disk would be worn for nothing.
    memory = Path("/dev/shm")
    for seed in itertools.count(20):
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            ran += run(Path(folder), seed)
        if ran >= N_INTERLEAVINGS:
            return
