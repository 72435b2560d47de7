from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.format.hashes import ArtifactHash
from kvnet.store.eviction import FRESH_S, Candidate, choose_victims, is_fresh, surplus_bytes


def artifact(number: int) -> ArtifactHash:
    return ArtifactHash(bytes([number]) * 32)


A, B, C, PINNED = (artifact(number) for number in range(4))
CANDIDATES = [Candidate(A, 1.0), Candidate(B, 2.0), Candidate(C, 3.0)]


@pytest.mark.parametrize(("held", "surplus"), [(0, 0), (900, 0), (950, 0), (951, 52), (1000, 101), (2000, 1101)])
def test_above_the_upper_mark_enough_goes_to_come_below_the_lower_one(held: int, surplus: int) -> None:
    assert surplus_bytes(held, 1000) == surplus


@pytest.mark.parametrize(
    ("used_s", "fresh"),
    [(0.0, True), (-FRESH_S, True), (-FRESH_S - 1, False), (FRESH_S, True), (FRESH_S + 1, False), (3600.0, False)],
)
def test_a_use_is_fresh_for_a_minute_and_one_long_ahead_is_a_clock_that_was_set(used_s: float, fresh: bool) -> None:
    now_s = 1_800_000_000.0
    assert is_fresh(now_s + used_s, now_s) is fresh


def users(*names: ArtifactHash) -> frozenset[ArtifactHash]:
    return frozenset(names)


@pytest.mark.parametrize(
    ("need", "victims"), [(0, []), (-5, []), (1, [A]), (10, [A]), (11, [A, B]), (30, [A, B, C]), (31, None)]
)
def test_the_least_recently_used_goes_first(need: int, victims: list[ArtifactHash] | None) -> None:
    packs = {1: users(A), 2: users(B), 3: users(C)}
    assert choose_victims(CANDIDATES, packs, dict.fromkeys(packs, 10), need) == victims


def test_an_artifact_whose_packs_others_keep_is_spared() -> None:
    packs = {1: users(A, PINNED), 2: users(B)}
    assert choose_victims(CANDIDATES, packs, {1: 100, 2: 10}, 10) == [B]
    assert choose_victims(CANDIDATES, packs, {1: 100, 2: 10}, 11) is None


def test_artifacts_that_share_a_pack_go_together() -> None:
    packs = {1: users(A, C), 2: users(B)}
    assert choose_victims(CANDIDATES, packs, {1: 100, 2: 10}, 100) == [A, C]


def test_one_large_artifact_saves_several_small_ones() -> None:
    packs = {1: users(A), 2: users(B), 3: users(C)}
    assert choose_victims(CANDIDATES, packs, {1: 5, 2: 5, 3: 100}, 50) == [C]


def test_without_candidates_nothing_can_be_freed() -> None:
    assert choose_victims([], {1: users(PINNED)}, {1: 100}, 1) is None


@given(
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 4)), max_size=6),
    st.lists(st.integers(0, 20), min_size=6, max_size=6),
    st.sets(st.integers(0, 4)),
    st.integers(0, 60),
)
def test_a_choice_frees_enough_and_nobody_goes_in_vain(
    packs: dict[int, set[int]], sizes: list[int], evictable: set[int], need: int
) -> None:
    pack_users = {pack: frozenset(map(artifact, names)) for pack, names in packs.items()}
    pack_bytes = dict(enumerate(sizes))

    def freed(gone: frozenset[ArtifactHash]) -> int:
        return sum(pack_bytes[pack] for pack, names in pack_users.items() if names <= gone)

    candidates = [Candidate(artifact(number), float(number)) for number in evictable]
    victims = choose_victims(candidates, pack_users, pack_bytes, need)
    everybody = frozenset(candidate.artifact for candidate in candidates)
    if victims is None:
        assert freed(everybody) < need
        return
    assert set(victims) <= everybody
    assert freed(frozenset(victims)) >= need
    for fewer in combinations(victims, max(0, len(victims) - 1)):
        assert not victims or freed(frozenset(fewer)) < need
