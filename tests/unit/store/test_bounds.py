"""What keeps within its bounds goes by what is leased, pinned and used at the moment it goes."""

from pathlib import Path

import pytest

from kvnet.store.disk import DiskStore
from tests.unit.store.samples import Sample, check_whole, fill, publish, sample

A, B, C = (sample(range(start, start + 3000)) for start in (0, 10_000, 20_000))


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def opened(directory: Path, quota_bytes: int = 1 << 30) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=quota_bytes, min_free_bytes=0, now=Clock())


def size_with(directory: Path, *artifacts: Sample) -> int:
    store = opened(directory)
    for artifact in artifacts:
        publish(store, artifact)
    held_bytes = store.usage().held_bytes
    store.close()
    return held_bytes


def packs(directory: Path) -> list[Path]:
    return sorted((directory / "packs").rglob("*.kva"))


def test_what_somebody_pinned_after_it_was_chosen_to_go_stays(tmp_path: Path) -> None:
    store = opened(tmp_path)
    publish(store, A, pinned=True)
    publish(store, B)
    assert not store._collector.removing.evict(A.hash)
    assert store._collector.removing.evict(B.hash)
    assert not store._collector.removing.evict(B.hash)
    assert store.take_evicted() == [B.hash]
    check_whole(store, A)
    store.close()


def test_an_artifact_whose_pack_a_writer_needs_does_not_go_for_room_that_this_would_not_make(tmp_path: Path) -> None:
    quota_bytes = size_with(tmp_path / "sizing", A, B) + C.size_bytes // 2
    store = opened(tmp_path / "store", quota_bytes)
    for artifact in (A, B):
        publish(store, artifact)
    longer = sample([*A.tokens, *range(70_000, 70_010)])
    writer = store.begin_pack(len(longer.chunks))
    tile = A.manifest.plan().first_tile
    writer.reference(longer.manifest.plan().first_tile, A.entries[tile])
    # A was used least recently; its pack has to stay all the same.
    publish(store, C)
    assert {record.hash for record in store.artifacts()} == {A.hash, C.hash}
    writer.abort()
    check_whole(store, A)
    store.close()


def test_a_pack_goes_although_a_chunk_in_it_is_leased_when_another_pack_has_that_too(tmp_path: Path) -> None:
    first, second = sample(range(600)), sample([*range(512), *range(90_000, 90_100)])
    store = opened(tmp_path)
    writers = [store.begin_pack(len(artifact.chunks)) for artifact in (first, second)]
    for writer, artifact in zip(writers, (first, second), strict=True):
        fill(writer, artifact)
    for writer, artifact in zip(writers, (first, second), strict=True):
        writer.publish(artifact.envelope, keys=artifact.keys, pinned=False)
    assert len(packs(tmp_path)) == 2
    shared = next(iter(set(first.entries) & set(second.entries)))
    leasing = store.begin_pack(len(first.chunks))
    leasing.reference(first.entries.index(shared), shared)
    store.remove(first.hash)
    assert len(packs(tmp_path)) == 1
    assert store.has_chunk(shared.hash)
    leasing.abort()
    check_whole(store, second)
    store.close()


def pinned(store: DiskStore, artifact: Sample) -> bool:
    record = store.get(artifact.hash)
    assert record is not None
    return record.pinned


@pytest.mark.parametrize("index_lost", [False, True])
def test_pins_outlive_the_process_and_the_index_and_end_with_what_they_pinned(tmp_path: Path, index_lost: bool) -> None:
    def reopened(store: DiskStore) -> DiskStore:
        store.close()
        if index_lost:
            for path in tmp_path.glob("index.sqlite*"):
                path.unlink()
        return opened(tmp_path)

    store = opened(tmp_path)
    for artifact in (A, B, C):
        publish(store, artifact, pinned=artifact is not A)
    store.pin(A.hash)
    store.unpin(B.hash)
    store.remove(C.hash)
    publish(store, C)
    store = reopened(store)
    assert [pinned(store, artifact) for artifact in (A, B, C)] == [True, False, False]
    assert store.collect_garbage(everything=True).removed != ()
    assert {record.hash for record in store.artifacts()} == {A.hash}
    store.close()


def test_what_was_evicted_does_not_come_back_in_part_with_a_pack_that_others_need(tmp_path: Path) -> None:
    longer = sample([*A.tokens[:1024], *range(90_000, 90_300)])
    store = opened(tmp_path)
    publish(store, A)
    publish(store, longer, pinned=True)
    assert store._collector.removing.evict(A.hash)
    store.close()
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    store = opened(tmp_path)
    assert [record.hash for record in store.artifacts()] == [longer.hash]
    check_whole(store, longer)
    store.close()
