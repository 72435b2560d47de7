"""Fetches that were interrupted are gone on with: what was written and still matches is not fetched again."""

import time

import pytest

from kvnet.errors import IntegrityError, NotInStoreError, StoreError, StoreFullError
from kvnet.store.interface import Store
from tests.contract.store.conftest import Clock, OpenStore
from tests.unit.store.samples import FRIEND, OTHER, Sample, check_whole, fill, publish, sample

ARTIFACT = sample(range(2600))
HALF = range(len(ARTIFACT.chunks) // 2)
REST = range(len(ARTIFACT.chunks) // 2, len(ARTIFACT.chunks))


def interrupt(store: Store, artifact: Sample = ARTIFACT, indices: range = HALF) -> None:
    writer = store.resume_pack(artifact.hash, artifact.entries)
    fill(writer, artifact, [index for index in indices if index not in writer.held])
    writer.abort()


def test_interrupted_fetch_is_gone_on_with(store: Store) -> None:
    interrupt(store)
    assert store.has_partial(ARTIFACT.hash)
    assert store.get(ARTIFACT.hash) is None
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert writer.held == frozenset(HALF)
    assert [writer.read(index) for index in HALF] == list(ARTIFACT.chunks[: len(HALF)])
    with pytest.raises(NotInStoreError):
        writer.read(REST[0])
    fill(writer, ARTIFACT, REST)
    record = writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    assert record.complete
    check_whole(store, ARTIFACT)
    assert not store.has_partial(ARTIFACT.hash)


def test_fetch_may_be_interrupted_again_and_again(store: Store) -> None:
    for index in range(len(ARTIFACT.chunks)):
        interrupt(store, indices=range(index, index + 1))
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert writer.held == frozenset(range(len(ARTIFACT.chunks)))
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=True)
    check_whole(store, ARTIFACT)


def test_new_fetch_holds_nothing_and_leaves_nothing_when_nothing_came(store: Store) -> None:
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=ARTIFACT.size_bytes)
    assert writer.held == frozenset()
    writer.abort()
    assert not store.has_partial(ARTIFACT.hash)
    assert store.begin_pack(3).held == frozenset()


def test_two_fetches_of_one_artifact_at_once_both_succeed(store: Store) -> None:
    first = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    fill(first, ARTIFACT, HALF)
    second = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    assert second.held == frozenset()
    fill(second, ARTIFACT)
    second.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    fill(first, ARTIFACT, REST)
    first.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)


def test_partial_chunks_are_not_served_and_not_found(store: Store) -> None:
    interrupt(store)
    assert not any(store.has_chunk(entry.hash) for entry in ARTIFACT.entries)
    assert store.artifacts() == []


def test_what_no_manifest_describes_is_not_gone_on_with(store: Store) -> None:
    other = sample(range(2601), key=FRIEND, namespace=OTHER)
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    fill(writer, ARTIFACT)
    with pytest.raises(IntegrityError):
        writer.publish(other.envelope, keys=(), pinned=False)
    assert not store.has_partial(ARTIFACT.hash)


def test_partial_pack_counts_and_goes_before_anything_of_use(open_store: OpenStore) -> None:
    store = open_store(quota_bytes=10 * ARTIFACT.size_bytes)
    before = store.usage().held_bytes
    interrupt(store, indices=range(len(ARTIFACT.chunks)))
    assert store.usage().held_bytes - before >= ARTIFACT.size_bytes
    kept = publish(store, sample(range(100, 900)))
    with pytest.raises(StoreFullError):
        store.begin_pack(3, expected_bytes=20 * ARTIFACT.size_bytes)
    assert store.has_partial(ARTIFACT.hash)
    store.begin_pack(3, expected_bytes=10 * ARTIFACT.size_bytes - store.usage().held_bytes + 1000).abort()
    assert not store.has_partial(ARTIFACT.hash)
    assert store.get(kept.hash) is not None


def test_room_that_is_lacking_loses_nothing_of_what_came_before(open_store: OpenStore) -> None:
    store = open_store(quota_bytes=10 * ARTIFACT.size_bytes)
    interrupt(store)
    with pytest.raises(StoreFullError):
        store.resume_pack(ARTIFACT.hash, ARTIFACT.entries, expected_bytes=20 * ARTIFACT.size_bytes)
    assert store.has_partial(ARTIFACT.hash)
    assert store.resume_pack(ARTIFACT.hash, ARTIFACT.entries).held == frozenset(HALF)


def test_garbage_collection_of_everything_gives_up_interrupted_fetches(store: Store, clock: Clock) -> None:
    clock.now_s = time.time()  # files have the time of the system
    interrupt(store)
    store.collect_garbage()
    assert store.has_partial(ARTIFACT.hash)
    store.collect_garbage(everything=True)
    assert not store.has_partial(ARTIFACT.hash)
    assert store.usage().held_bytes < ARTIFACT.size_bytes


def test_closed_store_goes_on_with_nothing(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="open store"):
        store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
