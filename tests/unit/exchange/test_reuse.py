"""Which stored artifact a prompt continues from, and why others are not used."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvnet.engine.interface import ModelInfo
from kvnet.exchange.identity import FixedIdentity
from kvnet.exchange.provenance import derived_spans
from kvnet.exchange.reuse import Found, PrefixHit, Rejected, find_local, held_tokens, judge, restore_plan
from kvnet.format.fingerprint import Comparison, Producer, Verdict
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.manifest import DerivedSpan
from kvnet.format.prefix import block_keys
from kvnet.store.disk import DiskStore
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.keys import PublisherKey
from kvnet.trust.policy import TrustPolicy
from tests.unit.store.samples import FINGERPRINT, FRIEND, MINE, OTHER_FINGERPRINT, OWN, publish, sample

STRANGER = PublisherKey(b"\3" * 32)
TOKENS = list(range(700))
IDENTITY = FixedIdentity(
    OWN, TrustPolicy("trusted", own=frozenset({OWN.public}), trusted=frozenset({FRIEND.public})), (MINE,)
)
INFO = ModelInfo(
    name="m",
    path=Path("m"),
    fingerprint=FINGERPRINT,
    producer=Producer("toy", "1", "cpu", "any", 256),
    tokenizer_digest=bytes(32),
    template_digest=bytes(32),
    window_tokens=4096,
    kv_bytes_per_token=FINGERPRINT.layers.bytes_per_token,
    weights_size_bytes=0,
    memory_budget_bytes=1 << 40,
    shareable=True,
    refusal="",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)
    yield opened
    opened.close()


def find(store: DiskStore, tokens: Sequence[int], *, info: ModelInfo = INFO, exact_only: bool = False) -> Found:
    return find_local(store, info, IDENTITY, tokens, limit_tokens=len(tokens) - 1, exact_only=exact_only)


def keys_of(tokens: Sequence[int]) -> list[PrefixKey]:
    return block_keys(MINE.prefix_root(FINGERPRINT.hash), tokens)


@pytest.mark.parametrize("shared", [1, 2, 255, 256, 257, 511, 512, 513, 699])
def test_reuse_is_as_long_as_the_common_tokens_wherever_they_end(store: DiskStore, shared: int) -> None:
    record = publish(store, sample(TOKENS))
    found = find(store, [*TOKENS[:shared], 9999, *TOKENS[:50]])
    assert found.hit is not None
    assert (found.hit.artifact, found.hit.n_tokens) == (record.hash, shared)


def test_one_token_is_always_left_to_feed(store: DiskStore) -> None:
    publish(store, sample(TOKENS))
    for n_tokens, reused in ((700, 699), (699, 698), (2, 1)):
        hit = find(store, TOKENS[:n_tokens]).hit
        assert hit is not None
        assert hit.n_tokens == reused
    assert find(store, TOKENS[:1]).hit is None


def test_an_equal_key_of_other_tokens_is_a_miss(store: DiskStore) -> None:
    other = [token + 1000 for token in TOKENS]
    publish(store, sample(other, keys=keys_of(TOKENS)))
    assert store.find_prefix(MINE.id, keys_of(TOKENS)) != []
    assert find(store, TOKENS) == Found(None)
    record = publish(store, sample(TOKENS))
    hit = find(store, [*TOKENS, 1]).hit
    assert hit is not None
    assert (hit.artifact, hit.n_tokens) == (record.hash, 700)


def test_another_models_state_is_never_a_candidate(store: DiskStore) -> None:
    publish(store, sample(TOKENS, fingerprint=OTHER_FINGERPRINT))
    assert find(store, TOKENS) == Found(None)


def test_what_an_unknown_publisher_signed_is_turned_down_with_the_reason(store: DiskStore) -> None:
    record = publish(store, sample(TOKENS, key=STRANGER))
    found = find(store, TOKENS)
    assert found.hit is None
    (rejected,) = found.rejected
    assert (rejected.artifact, rejected.code) == (record.hash, "untrusted_publisher")
    assert "not among the trusted publishers" in rejected.text


def test_the_longest_that_may_be_used_is_taken_over_a_longer_one_that_may_not(store: DiskStore) -> None:
    publish(store, sample(TOKENS, key=STRANGER))
    short = publish(store, sample(TOKENS[:300], key=FRIEND))
    found = find(store, TOKENS)
    assert found.hit is not None
    assert (found.hit.artifact, found.hit.n_tokens, len(found.rejected)) == (short.hash, 300, 1)


def test_state_of_another_machine_is_used_unless_only_exact_reuse_is_asked_for(store: DiskStore) -> None:
    publish(store, sample(TOKENS))
    elsewhere = replace(INFO, producer=Producer("toy", "2", "another chip", "any", 256))
    loose = find(store, TOKENS, info=elsewhere)
    assert loose.hit is not None
    assert loose.hit.comparison.verdict is Verdict.TOLERANT
    strict = find(store, TOKENS, info=elsewhere, exact_only=True)
    assert strict.hit is None
    assert [rejected.code for rejected in strict.rejected] == ["not_exact"]
    exact = find(store, TOKENS, exact_only=True)
    assert exact.hit is not None
    assert exact.hit.comparison.verdict is Verdict.EXACT


def test_a_model_that_cannot_be_shared_reuses_nothing_and_says_why(store: DiskStore) -> None:
    artifact = sample(TOKENS)
    publish(store, artifact)
    private = replace(INFO, fingerprint=None, shareable=False, refusal="layer 3 is a RotatingKVCache")
    assert find(store, TOKENS, info=private) == Found(None)
    verdict = judge(artifact.manifest, artifact.hash, private, IDENTITY, exact_only=False)
    assert isinstance(verdict, Rejected)
    assert verdict.text == "layer 3 is a RotatingKVCache"


def test_a_partly_fetched_artifact_counts_as_far_as_its_tiles_reach_without_a_gap(store: DiskStore) -> None:
    artifact = sample(TOKENS)
    plan = artifact.manifest.plan()
    first, second, third = (list(plan.tiles_of_block(block)) for block in range(3))
    record = publish(store, artifact, [*plan.token_chunks, *first, *third])
    assert not record.complete
    assert [held_tokens(store, record, n) for n in (1, 256, 257, 700)] == [1, 256, 256, 256]
    hit = find(store, TOKENS).hit
    assert hit is not None
    assert hit.n_tokens == 256
    assert restore_plan(store, record, 256) is not None
    assert restore_plan(store, record, 257) is None
    publish(store, artifact, second)
    whole = store.get(record.hash)
    assert whole is not None
    assert held_tokens(store, whole, 700) == 700


# --- what was made from what ------------------------------------------------------------------------------------------


def hit_on(publisher: PublisherKey, n_tokens: int, derived_from: tuple[DerivedSpan, ...] = ()) -> PrefixHit:
    artifact = sample(TOKENS, key=publisher, derived_from=derived_from)
    record = ArtifactRecord(
        hash=artifact.hash,
        envelope=artifact.envelope,
        manifest=artifact.manifest,
        entries=artifact.entries,
        pages=artifact.pages,
        complete=True,
        pinned=False,
        size_bytes=artifact.size_bytes,
        created_s=0,
        last_used_s=0,
    )
    return PrefixHit(record, n_tokens, Comparison(Verdict.EXACT, ()))


def test_what_was_computed_here_derives_from_nobody() -> None:
    assert derived_spans(None, OWN.public) == ()
    assert derived_spans(hit_on(OWN, 700), OWN.public) == ()


@pytest.mark.parametrize(("n_tokens", "last_block"), [(1, 0), (256, 0), (257, 1), (512, 1), (513, 2), (700, 2)])
def test_every_block_that_rests_on_another_publishers_state_is_named(n_tokens: int, last_block: int) -> None:
    source = hit_on(FRIEND, n_tokens)
    assert derived_spans(source, OWN.public) == (DerivedSpan(source.artifact, FRIEND.public, 0, last_block),)


def test_sources_of_a_source_are_passed_on_as_far_as_they_are_used() -> None:
    deep = DerivedSpan(ArtifactHash(b"d" * 32), STRANGER.public, 0, 1)
    late = DerivedSpan(ArtifactHash(b"e" * 32), STRANGER.public, 2, 2)
    mine = DerivedSpan(ArtifactHash(b"f" * 32), OWN.public, 0, 0)
    source = hit_on(FRIEND, 256, (deep, late, mine))
    assert derived_spans(source, OWN.public) == (
        DerivedSpan(deep.artifact, STRANGER.public, 0, 0),
        DerivedSpan(source.artifact, FRIEND.public, 0, 0),
    )
    # Through an artifact of one's own the stranger's part stays the stranger's.
    own = hit_on(OWN, 700, (deep,))
    assert derived_spans(own, OWN.public) == (deep,)
