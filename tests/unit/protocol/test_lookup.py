"""Lookup: what is asked, which answers are worth a fetch, and which claims a manifest does not bear out."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvnet.format.codecs import Codec
from kvnet.format.hashes import PrefixKey, blake3_hash
from kvnet.format.prefix import block_keys
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import (
    MAX_ASKED,
    MAX_DHT_QUERIES,
    Candidate,
    LookupMachine,
    LookupQuery,
    PeerClaim,
    Repute,
    build_query,
    check_manifest,
    covered_tokens,
    dht_depths,
    rank,
    whom_to_ask,
)
from kvnet.protocol.messages.artifacts import LookupReply, Match
from kvnet.trust.envelope import open_manifest
from tests.unit.protocol.swarm import peer
from tests.unit.trust.samples import FINGERPRINT, MINE, OTHER, Artifact, make_artifact, resigned

TOKENS = list(range(1000))  # 3 whole blocks and a short one
KEYS = block_keys(MINE.prefix_root(FINGERPRINT.hash), TOKENS)
QUERY = build_query(MINE, KEYS, len(TOKENS))


def match(key_index: int = 0, name: str = "a", **fields: Any) -> Match:
    values: dict[str, Any] = {
        "key_index": key_index,
        "artifact": blake3_hash(name.encode()),
        "n_tokens": 1000,
        "codec": "raw",
        "size_bytes": 1000,
    }
    return Match(**(values | fields))


def reply(*matches: Match) -> LookupReply:
    return LookupReply(request_id=0, matches=matches)


def test_query_asks_for_every_block_the_deepest_first_under_the_lookup_secret() -> None:
    assert QUERY.n_blocks == (4, 3, 2, 1)
    assert QUERY.prefix_keys == tuple(reversed(KEYS))
    assert QUERY.keys == tuple(MINE.lookup_key(key) for key in reversed(KEYS))
    assert not set(QUERY.keys).intersection(KEYS)
    message = QUERY.message(slot=5)
    assert (message.slot, message.keys) == (5, QUERY.keys)
    assert [QUERY.tokens_at(index) for index in range(4)] == [1000, 768, 512, 256]


def test_prompt_longer_than_a_message_asks_for_the_deepest_and_the_powers_of_two() -> None:
    keys = [PrefixKey(number.to_bytes(32, "big")) for number in range(5000)]
    query = build_query(MINE, keys, 5000 * 256)
    assert len(query.keys) <= 4096
    assert query.n_blocks[0] == 5000
    assert sorted(query.n_blocks, reverse=True) == list(query.n_blocks)
    assert len(set(query.n_blocks)) == len(query.n_blocks)
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256, 512} <= set(query.n_blocks)
    assert query.prefix_keys[0] == keys[4999]
    assert query.prefix_keys[-1] == keys[0]


def test_prompt_of_exactly_a_message_asks_for_all() -> None:
    keys = [PrefixKey(number.to_bytes(32, "big")) for number in range(4096)]
    assert build_query(MINE, keys, 4096 * 256).n_blocks == tuple(range(4096, 0, -1))


def test_short_ends_are_asked_for_after_the_blocks_and_only_where_a_block_does_not_end_there() -> None:
    keys = [PrefixKey(bytes([n]) * 32) for n in range(4)]
    short = [(100, keys[2]), (200, keys[3]), (256, keys[1]), (300, keys[1])]
    query = build_query(MINE, keys[:2], 300, short)
    assert query.prefix_keys == (keys[1], keys[0], keys[3], keys[2])
    assert query.n_blocks == (2, 1, 1, 1)
    assert [query.tokens_at(index) for index in range(4)] == [300, 256, 200, 100]
    assert build_query(MINE, keys[:1], 150, short).ends == (150, 100)


def test_deepest_match_is_best_then_the_fewest_bytes_then_the_most_providers() -> None:
    deep_large, deep_small, shared = match(0, "large", size_bytes=9000), match(0, "small"), match(0, "shared")
    shallow = match(1, "shallow", size_bytes=1)
    replies = [(peer("one"), reply(deep_large, deep_small, shared, shallow)), (peer("two"), reply(shared))]
    candidates = rank(QUERY, replies)
    names = [bytes(blake3_hash(name.encode())) for name in ("shared", "small", "large", "shallow")]
    assert [bytes(candidate.artifact) for candidate in candidates] == names
    assert candidates[0].providers == (peer("one"), peer("two"))
    assert [candidate.reusable_tokens for candidate in candidates] == [1000, 1000, 1000, 768]
    assert candidates[3].n_blocks == 3


def test_bytes_are_compared_for_the_part_that_would_be_fetched() -> None:
    long = match(1, "long", n_tokens=100_000, size_bytes=100_000)
    short = match(1, "short", n_tokens=768, size_bytes=1536)
    [first, second] = rank(QUERY, [(peer("one"), reply(short, long))])
    assert (first.n_tokens, second.n_tokens) == (100_000, 768)


def test_peer_that_answers_twice_counts_once() -> None:
    [candidate] = rank(QUERY, [(peer("one"), reply(match())), (peer("one"), reply(match()))])
    assert candidate.providers == (peer("one"),)


@pytest.mark.parametrize("claim", [match(0, n_tokens=999), match(1, n_tokens=767), match(0, codec="q1")])
def test_claims_that_contradict_themselves_or_cannot_be_read_are_passed_over(claim: Match) -> None:
    assert rank(QUERY, [(peer("one"), reply(claim))]) == []


def test_what_the_store_has_already_is_not_fetched() -> None:
    replies = [(peer("one"), reply(match(0, "deep"), match(1, "shallow")))]
    assert [candidate.reusable_tokens for candidate in rank(QUERY, replies, longer_than_tokens=768)] == [1000]
    assert rank(QUERY, replies, longer_than_tokens=1000) == []


# --- claims against manifests ---------------------------------------------------------------------------------


def claim_of(artifact: Artifact, query: LookupQuery = QUERY) -> Candidate:
    """What an honest holder of the artifact says."""
    depth = next(index for index, key in enumerate(query.prefix_keys) if key in artifact.keys)
    named = match(
        depth,
        artifact=bytes(MINE.keyed_artifact(artifact.hash)),
        n_tokens=artifact.manifest.n_tokens,
        size_bytes=artifact.manifest.total_size_bytes,
    )
    [candidate] = rank(query, [(peer("one"), reply(named))])
    return candidate


@pytest.mark.parametrize("n_tokens", [256, 700, 1000, 1024, 2000])
def test_honest_claim_is_borne_out(n_tokens: int) -> None:
    artifact = make_artifact(range(n_tokens))
    assert check_manifest(QUERY, claim_of(artifact), FINGERPRINT.hash, open_manifest(artifact.envelope)) is None


def check(artifact: Artifact, candidate: Candidate) -> str:
    reason = check_manifest(QUERY, candidate, FINGERPRINT.hash, open_manifest(artifact.envelope))
    assert reason is not None
    return reason


def named_like(artifact: Artifact, candidate: Candidate) -> Candidate:
    """The claim with the name of another artifact, so that the next check is reached."""
    fields = {name: getattr(candidate, name) for name in candidate.__slots__}
    return Candidate(**(fields | {"artifact": MINE.keyed_artifact(artifact.hash)}))


def test_manifest_of_another_artifact_is_not_the_one_asked_for() -> None:
    artifact, other = make_artifact(range(1000)), make_artifact(range(1000), created=1)
    assert "another artifact" in check(other, claim_of(artifact))


def test_artifact_of_another_namespace_is_refused() -> None:
    artifact, other = make_artifact(range(1000)), make_artifact(range(1000), namespace=OTHER)
    assert "another namespace" in check(other, named_like(other, claim_of(artifact)))


def test_artifact_of_another_model_is_refused() -> None:
    artifact = make_artifact(range(1000))
    other = make_artifact(range(1000), fingerprint=msgspec.structs.replace(FINGERPRINT, weights=b"x" * 32))
    assert "another model" in check(other, named_like(other, claim_of(artifact)))


def test_artifact_of_another_length_than_claimed_is_refused() -> None:
    artifact, other = make_artifact(range(1000)), make_artifact(range(1001))
    assert "token count" in check(other, named_like(other, claim_of(artifact)))


def test_artifact_of_another_codec_than_claimed_is_refused() -> None:
    artifact = make_artifact(range(1000))
    other = resigned(artifact, codec=Codec.SHUFFLE_ZSTD1)
    assert "codec" in check(other, named_like(other, claim_of(artifact)))


def test_artifact_of_the_claimed_length_with_other_tokens_is_refused_by_its_last_key() -> None:
    artifact, other = make_artifact(range(1000)), make_artifact([*range(999), 5])
    assert "last prefix key" in check(other, named_like(other, claim_of(artifact)))


# --- asking several peers -------------------------------------------------------------------------------------


def machine(*, most: tuple[float, float] = (math.inf, math.inf)) -> LookupMachine:
    lookup = LookupMachine(QUERY, deadline=5.0)
    lookup.expect(peer("one"), most[0])
    lookup.expect(peer("two"), most[1])
    return lookup


def test_lookup_ends_when_all_have_answered_or_failed() -> None:
    lookup = machine()
    assert not lookup.finished(0.0)
    lookup.answered(peer("one"), reply(match()))
    assert not lookup.finished(0.0)
    assert lookup.waiting() == [peer("two")]
    lookup.failed(peer("two"))
    assert lookup.finished(0.0)
    assert [candidate.providers for candidate in lookup.candidates()] == [(peer("one"),)]


def test_lookup_ends_when_nobody_left_can_have_more() -> None:
    lookup = machine(most=(1000, 768))
    lookup.answered(peer("one"), reply(match(1)))
    assert lookup.finished(0.0)
    lookup = machine(most=(768, 1000))
    lookup.answered(peer("one"), reply(match(1)))
    assert not lookup.finished(0.0)


def test_lookup_ends_at_its_deadline_with_what_it_has() -> None:
    lookup = machine()
    lookup.answered(peer("two"), reply(match(1)))
    assert not lookup.finished(4.9)
    assert lookup.finished(5.0)
    assert len(lookup.candidates()) == 1
    assert lookup.candidates(longer_than_tokens=768) == []


def test_answers_nobody_waits_for_do_not_count() -> None:
    lookup = machine()
    lookup.answered(peer("three"), reply(match()))
    lookup.failed(peer("one"))
    lookup.answered(peer("one"), reply(match()))
    assert lookup.candidates() == []


def test_records_of_others_are_handed_on_with_who_sent_them() -> None:
    lookup = machine()
    lookup.answered(peer("two"), msgspec.structs.replace(reply(match()), records=(b"record",)))
    assert lookup.records() == [(peer("two"), b"record")]


# --- whom to ask ----------------------------------------------------------------------------------------------


def claim(name: str, least: int, most: int | None = None, *matches: Match) -> PeerClaim:
    return PeerClaim(peer(name), b"s" * 32, (), least, most or least, matches, b"k" * 32)


def repute(**known: Repute) -> Callable[[PeerId], Repute]:
    return lambda who: {peer(name): each for name, each in known.items()}.get(who, GOOD)


GOOD = Repute(connected=True, liar=False, worth=1.0, rtt_s=0.001)
AWAY = replace(GOOD, connected=False)


def names(claims: list[PeerClaim]) -> list[PeerId]:
    return [each.peer for each in claims]


def test_nobody_is_asked_when_no_table_says_anything() -> None:
    assert whom_to_ask([], repute()) == []


def test_the_deepest_is_asked_alone_when_nobody_can_have_more() -> None:
    claims = [claim("b", 256), claim("a", 1000), claim("c", 512, 768)]
    assert names(whom_to_ask(claims, repute())) == [peer("a")]


@pytest.mark.parametrize(
    "worse",
    [replace(GOOD, liar=True), AWAY, replace(GOOD, worth=0.5), replace(GOOD, rtt_s=0.002)],
    ids=["liar", "away", "less worth", "farther"],
)
def test_of_equals_the_honest_connected_worthiest_and_nearest_is_asked(worse: Repute) -> None:
    claims = [claim("x", 1000), claim("y", 1000)]
    assert names(whom_to_ask(claims, repute(x=worse))) == [peer("y")]
    assert names(whom_to_ask(claims, repute(y=worse))) == [peer("x")]


def test_a_liar_comes_last_however_deep_it_says_it_is() -> None:
    claims = [claim("liar", 1000), claim("honest", 256)]
    known = repute(liar=replace(GOOD, liar=True))
    assert names(whom_to_ask(claims, known))[0] == peer("honest")
    assert names(whom_to_ask(claims[:1], known)) == [peer("liar")]


def test_whoever_could_have_more_than_the_best_is_sure_to_is_asked_too() -> None:
    claims = [claim("a", 768, 1000), claim("b", 512, 900), claim("c", 512, 768)]
    assert names(whom_to_ask(claims, repute())) == [peer("a"), peer("b")]


def test_no_more_are_asked_at_once_than_the_limit() -> None:
    claims = [claim(f"{n}", 512, 1000) for n in range(20)]
    assert len(whom_to_ask(claims, repute())) == MAX_ASKED


def test_who_is_not_connected_may_be_gone_so_its_equals_and_a_connected_one_are_asked_too() -> None:
    claims = [claim("a", 1000), claim("b", 1000), claim("c", 512), claim("d", 512)]
    asked = names(whom_to_ask(claims, repute(a=AWAY, b=AWAY)))
    assert asked[:2] in ([peer("a"), peer("c")], [peer("a"), peer("d")], [peer("b"), peer("c")], [peer("b"), peer("d")])
    assert set(asked[2:]) == {peer("a"), peer("b")} - {asked[0]}
    assert names(whom_to_ask(claims[:1], repute(a=AWAY))) == [peer("a")]


def test_what_connected_tables_say_counts_until_their_peers_say_otherwise() -> None:
    lookup = machine()
    lookup.suppose(claim("one", 768, None, match(1, "a")))
    lookup.suppose(claim("three", 768, None, match(1, "a"), match(1, "b")))
    assert [each.providers for each in lookup.candidates()] == [(peer("one"), peer("three")), (peer("three"),)]
    assert not lookup.finished(0.0)
    lookup.answered(peer("one"), reply(match(0, "a")))
    [best, *_] = lookup.candidates()
    assert (best.providers, best.holders, best.peers) == (
        (peer("one"),),
        (peer("three"),),
        (peer("one"), peer("three")),
    )
    lookup.failed(peer("three"))
    assert [each.peers for each in lookup.candidates()] == [(peer("one"),)]


def test_what_a_reply_covers_is_its_deepest_match() -> None:
    assert covered_tokens(QUERY, reply(match(1), match(2, "b"))) == 768
    assert covered_tokens(QUERY, reply()) == 0


def test_the_dht_is_asked_for_checkpoints_the_deepest_first_and_at_most_fourteen() -> None:
    assert dht_depths(QUERY) == [(4, QUERY.keys[0]), (3, QUERY.keys[1]), (2, QUERY.keys[2]), (1, QUERY.keys[3])]
    keys = [PrefixKey(number.to_bytes(32, "big")) for number in range(16001)]
    long = build_query(MINE, keys, 16001 * 256 - 1)
    depths = [depth for depth, _ in dht_depths(long)]
    assert len(depths) == MAX_DHT_QUERIES
    assert depths[:3] == [16001, 16000, 8192]
