"""Whom an artifact names as those it comes from."""

import pytest

from kvnet.engine.kv_state import Origin
from kvnet.errors import TrustError
from kvnet.exchange.provenance import LossyOriginError, all_spans, require_lossless_origins
from kvnet.format.codecs import Codec
from kvnet.format.limits import MAX_DERIVED_SPANS
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, encode_manifest
from kvnet.trust.keys import PublisherKey
from tests.unit.store.samples import sample
from tests.unit.store.test_reading import q8_sample

TOKENS = [3 + n % 200 for n in range(600)]


def key(n: int) -> PublisherKey:
    return PublisherKey(bytes([n]) * 32)


def manifest_of(n: int) -> Manifest:
    return sample(TOKENS, key=key(n)).manifest


def lossy_manifest() -> Manifest:
    return q8_sample().manifest


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


@pytest.mark.parametrize("place", range(3))
def test_one_lossy_origin_among_others_is_enough_to_refuse_a_lossless_codec(place: int) -> None:
    manifests = [manifest_of(n) for n in range(3)]
    exact = [Origin(encode_manifest(manifest), 300) for manifest in manifests]
    require_lossless_origins(Codec.RAW, exact)
    lossy = exact.copy()
    lossy[place] = Origin(encode_manifest(lossy_manifest()), 300)
    for codec in (Codec.RAW, Codec.SHUFFLE_ZSTD1):
        with pytest.raises(LossyOriginError, match="lossy codec q8"):
            require_lossless_origins(codec, lossy)
    require_lossless_origins(Codec.Q8, lossy)
