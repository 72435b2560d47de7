"""What goes while nobody waits: what was not used for long, and what is too much."""

import pytest

from tests.contract.store.conftest import Clock, OpenStore
from tests.unit.store.samples import Sample, check_whole, publish, sample

WEEK_S = 7 * 24 * 3600.0
SIX = [sample(range(start, start + 2000)) for start in range(0, 60_000, 10_000)]


def held_by(open_store: OpenStore, artifacts: list[Sample]) -> int:
    store = open_store()
    for artifact in artifacts:
        publish(store, artifact)
    return store.usage().held_bytes


def test_what_nobody_used_for_a_week_goes_and_what_was_asked_for_by_name_stays(
    open_store: OpenStore, clock: Clock
) -> None:
    store = open_store()
    old, pinned, used, new = SIX[:4]
    for artifact in (old, pinned, used):
        publish(store, artifact, pinned=artifact is pinned)
    clock.now_s += WEEK_S - 1
    assert store.tidy(unused_s=WEEK_S).removed == ()
    store.touch(used.hash)
    publish(store, new)
    clock.now_s += 2
    collected = store.tidy(unused_s=WEEK_S)
    assert collected.removed == (old.hash,)
    assert collected.freed_bytes > 0
    assert {record.hash for record in store.artifacts()} == {pinned.hash, used.hash, new.hash}
    assert store.take_evicted() == [old.hash]
    for artifact in (pinned, used, new):
        check_whole(store, artifact)


def test_what_a_clock_that_was_years_ahead_saw_used_goes_after_a_week_too(open_store: OpenStore, clock: Clock) -> None:
    store = open_store()
    right_s, clock.now_s = clock.now_s, clock.now_s + 400 * WEEK_S
    publish(store, SIX[0])
    clock.now_s = right_s
    assert store.tidy(unused_s=WEEK_S).removed == ()
    clock.now_s += WEEK_S - 1
    assert store.tidy(unused_s=WEEK_S).removed == ()
    clock.now_s += 2
    assert store.tidy(unused_s=WEEK_S).removed == (SIX[0].hash,)


def test_a_clock_that_was_not_set_yet_makes_nothing_old(open_store: OpenStore, clock: Clock) -> None:
    store = open_store()
    publish(store, SIX[0])
    right_s, clock.now_s = clock.now_s, 3600.0
    assert store.tidy(unused_s=WEEK_S).removed == ()
    clock.now_s = right_s + 3600.0
    assert store.tidy(unused_s=WEEK_S).removed == ()
    check_whole(store, SIX[0])


def test_a_store_that_is_nearly_full_is_emptied_to_the_lower_mark_so_that_the_next_add_evicts_nothing(
    open_store: OpenStore, clock: Clock
) -> None:
    quota_bytes = int(held_by(open_store, SIX) / 0.97)
    store = open_store(quota_bytes=quota_bytes)
    for artifact in SIX:
        publish(store, artifact)
        clock.now_s += 100
    collected = store.tidy(unused_s=WEEK_S)
    # The least recently used first, and no more than needed.
    assert collected.removed == (SIX[0].hash,)
    assert store.usage().held_bytes <= 0.9 * quota_bytes
    store.take_evicted()
    assert store.tidy(unused_s=WEEK_S).removed == ()
    for artifact in SIX[1:]:
        check_whole(store, artifact)


def test_below_the_upper_mark_nothing_goes(open_store: OpenStore, clock: Clock) -> None:
    store = open_store(quota_bytes=int(held_by(open_store, SIX) / 0.92))
    for artifact in SIX:
        publish(store, artifact)
    clock.now_s += 1000
    assert store.tidy(unused_s=WEEK_S).removed == ()


def test_what_came_or_was_used_just_now_does_not_go_for_room_that_nobody_needs_yet(
    open_store: OpenStore, clock: Clock
) -> None:
    store = open_store(quota_bytes=int(held_by(open_store, SIX) / 0.97))
    for artifact in SIX:
        publish(store, artifact)
    clock.now_s += 30
    assert store.tidy(unused_s=WEEK_S).removed == ()


@pytest.mark.parametrize("unused_s", [0.0, WEEK_S])
def test_pinned_artifacts_stay_however_old_and_however_full(
    open_store: OpenStore, clock: Clock, unused_s: float
) -> None:
    store = open_store(quota_bytes=int(held_by(open_store, SIX) / 0.97))
    for artifact in SIX:
        publish(store, artifact, pinned=True)
    clock.now_s += 100 * WEEK_S
    assert store.tidy(unused_s=unused_s).removed == ()
    for artifact in SIX:
        check_whole(store, artifact)


def test_when_what_may_go_would_not_suffice_nothing_goes(open_store: OpenStore, clock: Clock) -> None:
    small = sample(range(90_000, 90_100))
    store = open_store(quota_bytes=int(held_by(open_store, [*SIX, small]) / 0.97))
    publish(store, small)
    for artifact in SIX:
        publish(store, artifact, pinned=True)
    clock.now_s += 1000
    assert store.tidy(unused_s=WEEK_S).removed == ()
    check_whole(store, small)


def test_chunks_that_a_pack_being_written_refers_to_stay(open_store: OpenStore, clock: Clock) -> None:
    store = open_store()
    publish(store, SIX[0])
    longer = sample([*SIX[0].tokens, *range(500)])
    shared = [index for index, entry in enumerate(longer.entries) if store.has_chunk(entry.hash)]
    assert shared
    writer = store.begin_pack(len(longer.chunks))
    for index in shared:
        writer.reference(index, longer.entries[index])
    clock.now_s += 10 * WEEK_S
    assert store.tidy(unused_s=WEEK_S).removed == (SIX[0].hash,)
    for index in set(range(len(longer.chunks))) - set(shared):
        writer.put(index, longer.chunks[index])
    writer.publish(longer.envelope, keys=longer.keys, pinned=False)
    check_whole(store, longer)
