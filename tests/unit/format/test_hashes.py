import base64
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import UsageError
from kvnet.format import hashes
from kvnet.format.hashes import ArtifactHash, PrefixKey
from tests.unit.format.examples import ROUNDS

VECTORS = Path(__file__).parents[2] / "vectors" / "third_party"
DIGESTS = st.binary(min_size=32, max_size=32)
HASH = ArtifactHash(bytes(range(32)))


def test_every_blake3_vector_holds_in_all_three_modes() -> None:
    document = json.loads((VECTORS / "blake3" / "blake3_test_vectors.json").read_text())
    key, context = document["key"].encode(), document["context_string"]
    assert len(document["cases"]) == 35
    for case in document["cases"]:
        data = bytes(position % 251 for position in range(case["input_len"]))
        assert hashes.blake3_hash(data).hex() == case["hash"][:64]
        assert hashes.blake3_hash_of([data[:3], b"", memoryview(data)[3:]]).hex() == case["hash"][:64]
        assert hashes.keyed_hash(key, data).hex() == case["keyed_hash"][:64]
        assert hashes.derive_key(context, data).hex() == case["derive_key"][:64]
        # The extended output shows that the library itself is whole, not only its first block.
        assert blake3(data).digest(len(case["hash"]) // 2).hex() == case["hash"]


def test_every_dag_cbor_cid_is_recomputed() -> None:
    document = json.loads((VECTORS / "cbor" / "ipld_dag_cbor_fixtures.json").read_text())
    assert len(document["cases"]) == 128
    for case in document["cases"]:
        digest = hashlib.sha256(bytes.fromhex(case["hex"])).digest()
        assert hashes.encode_cid(digest, hashes.SHA2_256) == case["cid"]
        assert hashes.decode_cid(case["cid"]) == (hashes.SHA2_256, digest)


@given(DIGESTS)
def test_artifact_text_round_trips_and_begins_alike(digest: bytes) -> None:
    text = hashes.artifact_text(ArtifactHash(digest))
    assert len(text) == 59
    assert text.startswith("bafyr4i")
    assert hashes.parse_artifact_text(text) == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "a",
        lambda text: text.upper(),
        lambda text: "z" + text[1:],
        lambda text: text[:20] + "1" + text[21:],
        lambda text: text[:20] + "\u0131" + text[21:],
        # The last character has two spare bits: a second spelling of the same hash.
        lambda text: (
            text[:-1] + "abcdefghijklmnopqrstuvwxyz234567"["abcdefghijklmnopqrstuvwxyz234567".index(text[-1]) + 1]
        ),
        lambda text: "bafyq" + text[5:],
        lambda text: text[:0],
    ],
)
def test_a_text_that_is_not_exactly_a_hash_is_refused(change: Callable[[str], str]) -> None:
    with pytest.raises(UsageError) as caught:
        hashes.parse_artifact_text(change(hashes.artifact_text(HASH)))
    assert caught.value.hint


def test_a_cid_of_another_hash_function_is_not_an_artifact_hash() -> None:
    with pytest.raises(UsageError, match="bafyr4i"):
        hashes.parse_artifact_text(hashes.encode_cid(HASH, hashes.SHA2_256))


def test_a_cid_of_another_length_or_codec_is_refused() -> None:
    # 0x55 is raw, 0x1f a digest of 31 bytes.
    for head in (b"\x01\x55\x1e\x20", b"\x01\x71\x1e\x1f", b"\x00\x71\x1e\x20"):
        raw = head + HASH
        text = "b" + base64.b32encode(raw).decode().rstrip("=").lower()
        with pytest.raises(UsageError, match="dag-cbor"):
            hashes.decode_cid(text)


def test_short_forms_match_with_and_without_their_common_beginning() -> None:
    text = hashes.artifact_text(HASH)
    short = hashes.short_text(HASH)
    assert short == text[:15]
    assert hashes.short_text(HASH, 12) == text[:19]
    for form in (text, short, short.removeprefix("bafyr4i"), text[:30]):
        assert hashes.looks_like_hash(form)
        assert hashes.matches_short(form, HASH)
    assert not hashes.matches_short(hashes.short_text(ArtifactHash(bytes(32))), HASH)


@pytest.mark.parametrize("text", ["", "bafyr4i", "bafyr4iabcdefg", "abcdefg", "notes-2026", "ABCDEFGH", "a" * 53])
def test_what_cannot_be_a_hash_does_not_look_like_one(text: str) -> None:
    assert not hashes.looks_like_hash(text)
    assert not hashes.matches_short(text, HASH)


def test_keyed_forms_differ_by_secret_and_by_what_they_name() -> None:
    first, second = bytes(32), bytes(31) + b"\x01"
    key = PrefixKey(bytes(range(32)))
    assert hashes.lookup_key(first, key) != hashes.lookup_key(second, key)
    assert hashes.keyed_artifact(first, HASH) == hashes.keyed_hash(first, HASH)
    assert hashes.dht_key(hashes.lookup_key(first, key))[:2] == b"\x1e\x20"
    assert hashes.namespace_id(first) != hashes.namespace_id(second)


def test_a_truncated_hash_or_secret_is_refused_wherever_one_goes_in() -> None:
    short = bytes(31)
    for call in (
        lambda: hashes.lookup_key(bytes(32), PrefixKey(short)),
        lambda: hashes.lookup_key(short, PrefixKey(bytes(32))),
        lambda: hashes.keyed_artifact(bytes(32), ArtifactHash(short)),
        lambda: hashes.dht_key(short),
        lambda: hashes.namespace_id(short),
        lambda: hashes.encode_cid(short),
        lambda: hashes.keyed_hash(short, b""),
    ):
        with pytest.raises(ValueError, match=r"32|key"):
            call()


@ROUNDS
def test_damaged_hash_texts_are_refused_or_spell_a_hash_in_its_one_way(rounds: int) -> None:
    rng = random.Random(23)
    for _ in range(rounds):
        letters = list(hashes.artifact_text(HASH))
        for _change in range(rng.randrange(1, 4)):
            letters[rng.randrange(len(letters))] = chr(rng.choice((rng.randrange(128), rng.randrange(0x3000))))
        text = "".join(letters)[: rng.choice((59, rng.randrange(60)))]
        try:
            assert hashes.artifact_text(hashes.parse_artifact_text(text)) == text
        except UsageError:
            continue
