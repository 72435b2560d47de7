"""Whom an artifact names as those it comes from."""

import pytest

from kvnet.engine.kv_state import Origin
from kvnet.errors import TrustError
from kvnet.exchange.provenance import all_spans
from kvnet.format.limits import MAX_DERIVED_SPANS
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, encode_manifest
from kvnet.trust.keys import PublisherKey
from tests.unit.store.samples import sample

TOKENS = [3 + n % 200 for n in range(600)]


def key(n: int) -> PublisherKey:
    return PublisherKey(bytes([n]) * 32)


def manifest_of(n: int) -> Manifest:
    return sample(TOKENS, key=key(n)).manifest


def test_what_a_live_cache_was_restored_from_is_named_up_to_the_block_in_use() -> None:
    theirs = manifest_of(7)
    spans = all_spans(None, [Origin(encode_manifest(theirs), 300)], key(1).public)
    assert spans == (DerivedSpan(artifact_of(theirs), theirs.publisher, 0, 1),)


def test_a_live_cache_of_ones_own_artifact_names_nobody() -> None:
    assert all_spans(None, [Origin(encode_manifest(manifest_of(1)), 300)], key(1).public) == ()


def test_an_origin_is_named_once() -> None:
    origin = Origin(encode_manifest(manifest_of(7)), 300)
    assert len(all_spans(None, [origin, origin], key(1).public)) == 1


def test_state_from_more_others_than_can_be_named_is_not_published() -> None:
    origins = [Origin(encode_manifest(manifest_of(n)), 600) for n in range(2, MAX_DERIVED_SPANS + 3)]
    assert len(all_spans(None, origins[:-1], key(1).public)) == MAX_DERIVED_SPANS
    with pytest.raises(TrustError, match=f"at most {MAX_DERIVED_SPANS}"):
        all_spans(None, origins, key(1).public)
