"""Tables of peers: what they say of a prompt, what outranks what, and how much is remembered."""

import time
from collections.abc import Sequence

import pytest

from kvnet.format.hashes import LookupKey, NamespaceId, blake3_hash
from kvnet.format.prefix import BLOCK_TOKENS, block_keys, checkpoints
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import LookupQuery, build_query
from kvnet.protocol.tables import MAX_SAMPLED, PeerTables, TableLimits, Taken
from kvnet.trust.statement_bodies import PAGE_ARTIFACTS, HeldEntry, ProviderRecord
from tests.unit.protocol.swarm import peer
from tests.unit.trust.samples import FINGERPRINT, MINE, OTHER

NOW_S = 1_800_000_000.0
ROOT = MINE.prefix_root(FINGERPRINT.hash)
PROMPT = list(range(20 * BLOCK_TOKENS + 7))
QUERY = build_query(MINE, block_keys(ROOT, PROMPT), len(PROMPT))


def prompt_and(n_shared: int, n_tokens: int, *, salt: int = 9) -> list[int]:
    """Tokens of an artifact that shares so many with the prompt."""
    return [*PROMPT[:n_shared], *[salt] * (n_tokens - n_shared)]


def entry(tokens: Sequence[int]) -> HeldEntry:
    keys = [MINE.lookup_key(key) for key in block_keys(ROOT, tokens)]
    return HeldEntry(
        artifact=bytes(blake3_hash(bytes(keys[-1]))),
        n_tokens=len(tokens),
        codec="raw",
        size_bytes=len(tokens),
        keys=tuple(bytes(keys[count - 1]) for count in checkpoints(len(tokens))),
    )


def record(who: str, *entries: HeldEntry, page: int = 0, sequence: int = 1, life_s: float = 3600.0) -> ProviderRecord:
    return ProviderRecord(
        sequence=sequence,
        issued=int(NOW_S),
        expires=int(NOW_S + life_s),
        namespace=bytes(MINE.id),
        peer=bytes(peer(who)),
        addresses=(f"/memory/{who}-{sequence}",),
        page=page,
        entries=entries,
        revocations=0,
        n_revocations=0,
    )


def take(
    tables: PeerTables,
    said: ProviderRecord,
    *,
    signer: bytes = b"s" * 32,
    own_words: bool = False,
    now_s: float = NOW_S,
    size_bytes: int = 300,
) -> Taken:
    envelope = repr((said.page, said.sequence, said.peer)).encode().ljust(size_bytes, b".")
    return tables.take(said, signer, envelope, now_s, own_words=own_words)


def claims_of(tables: PeerTables, query: LookupQuery = QUERY, **options: object) -> list[tuple[PeerId, int, int]]:
    found = tables.claims(query, NOW_S, **options)  # type: ignore[arg-type]
    return [(claim.peer, claim.least_tokens, claim.most_tokens) for claim in found]


# --- what they say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_shared", "n_tokens", "least", "most"),
    [
        (5 * 256, 5 * 256, 5, 5),  # ends where it stops to agree: exact
        (5 * 256, 12 * 256, 4, 7),  # the checkpoint of 4 agrees, that of 8 does not
        (9 * 256, 12 * 256, 8, 11),
        (11 * 256, 12 * 256, 8, 11),
        (12 * 256, 12 * 256, 12, 12),
        (16 * 256, 40 * 256, 16, 20.03),  # more than the prompt has there is not
        (300, 700, 1, 1),
    ],
)
def test_a_claim_has_the_checkpoint_that_agrees_and_what_lies_below_the_next(
    n_shared: int, n_tokens: int, least: float, most: float
) -> None:
    tables = PeerTables()
    take(tables, record("a", entry(prompt_and(n_shared, n_tokens))))
    [(who, at_least, at_most)] = claims_of(tables)
    assert who == peer("a")
    assert at_least == least * BLOCK_TOKENS
    assert at_most == int(most * BLOCK_TOKENS) or at_most == len(PROMPT)
    assert at_least <= n_shared // BLOCK_TOKENS * BLOCK_TOKENS <= at_most


def test_an_artifact_of_the_whole_prompt_is_known_to_its_last_token() -> None:
    tables = PeerTables()
    take(tables, record("a", entry(PROMPT)))
    assert claims_of(tables) == [(peer("a"), len(PROMPT), len(PROMPT))]
    [claim] = tables.claims(QUERY, NOW_S)
    [match] = claim.matches
    assert (match.key_index, match.n_tokens, match.codec, match.size_bytes) == (0, len(PROMPT), "raw", len(PROMPT))
    assert claim.key == QUERY.keys[0]
    assert (claim.signer, claim.addresses) == (b"s" * 32, ("/memory/a-1",))
    assert claim.as_reply().matches == (match,)


def test_each_peer_is_named_once_at_its_deepest_the_deepest_peer_first() -> None:
    tables = PeerTables()
    take(tables, record("a", entry(prompt_and(512, 512)), entry(prompt_and(1024, 1024))))
    take(tables, record("b", entry(prompt_and(2048, 2048))))
    take(tables, record("c", entry(prompt_and(0, 2048))))
    assert claims_of(tables) == [(peer("b"), 2048, 2048), (peer("a"), 1024, 1024)]
    assert claims_of(tables, but=[peer("b")]) == [(peer("a"), 1024, 1024)]
    assert claims_of(tables, longer_than_tokens=1024) == [(peer("b"), 2048, 2048)]
    assert claims_of(tables, longer_than_tokens=4000) == []
    assert claims_of(tables, build_query(OTHER, [], 0)) == []


def test_a_peer_whose_deepest_is_exact_may_have_more_in_another_artifact() -> None:
    tables = PeerTables()
    take(tables, record("a", entry(prompt_and(9 * 256, 9 * 256)), entry(prompt_and(11 * 256, 15 * 256))))
    assert claims_of(tables) == [(peer("a"), 9 * 256, 14 * 256)]


def test_claims_that_contradict_themselves_say_nothing() -> None:
    tables = PeerTables()
    deep = entry(PROMPT[: 8 * 256])
    short = HeldEntry(artifact=b"x" * 32, n_tokens=300, codec="raw", size_bytes=1, keys=deep.keys)
    take(tables, record("a", short))
    # Only what an artifact of 300 tokens can share counts, and no more is thought to be in it.
    assert claims_of(tables) == [(peer("a"), 256, 256)]


def test_thousands_that_begin_alike_are_not_each_looked_at() -> None:
    tables = PeerTables()
    same = PROMPT[: 4 * 256]
    for page in range(4):
        entries = [entry([*same, *[1000 + 16 * page + n] * 600]) for n in range(PAGE_ARTIFACTS)]
        take(tables, record("a", *entries, page=page))
    assert 4 * PAGE_ARTIFACTS > MAX_SAMPLED
    assert claims_of(tables) == [(peer("a"), 4 * 256, 7 * 256)]
    [claim] = tables.claims(QUERY, NOW_S)
    assert len(claim.matches) == 8


# --- what outranks what -------------------------------------------------------------------------------------------


def test_a_later_page_takes_the_place_of_an_earlier_one_and_never_the_other_way_round() -> None:
    tables = PeerTables()
    first, second = record("a", entry(PROMPT[:256])), record("a", entry(PROMPT[:512]), sequence=2)
    assert take(tables, first) is Taken.NEW
    assert take(tables, first) is Taken.KNOWN
    assert take(tables, second) is Taken.NEW
    assert take(tables, first) is Taken.OUTRANKED
    assert claims_of(tables) == [(peer("a"), 512, 512)]
    assert [member.addresses for member in tables.members(MINE.id, NOW_S)] == [("/memory/a-2",)]
    assert take(tables, record("a", page=1, sequence=1)) is Taken.NEW
    assert [member.addresses for member in tables.members(MINE.id, NOW_S)] == [("/memory/a-2",)]


def test_what_has_expired_counts_no_more_and_nothing_before_it_comes_back() -> None:
    tables = PeerTables()
    long, short = record("a", entry(PROMPT), life_s=7000.0), record("a", entry(PROMPT[:512]), sequence=2, life_s=60.0)
    take(tables, long)
    take(tables, short)
    later_s = NOW_S + 100
    assert tables.claims(QUERY, later_s) == []
    assert tables.envelopes(MINE.id, later_s) == []
    assert tables.records(MINE.id, QUERY.keys, later_s, but=peer("x"), at_most=4) == ()
    before = tables.cost_bytes
    tables.expire(later_s)
    tables.expire(later_s)
    assert tables.cost_bytes < before
    assert take(tables, long, now_s=later_s) is Taken.OUTRANKED
    assert tables.claims(QUERY, later_s) == []
    tables.expire(NOW_S + 7001)
    assert tables.cost_bytes == 0
    assert tables.members(MINE.id, NOW_S) == []


def test_who_speaks_for_itself_is_spoken_for_by_nobody_else() -> None:
    tables = PeerTables()
    honest, liar = b"h" * 32, b"l" * 32
    assert take(tables, record("a", entry(PROMPT)), signer=liar) is Taken.NEW
    assert tables.still_claims(MINE.id, peer("a"), QUERY.keys[0], NOW_S)
    assert take(tables, record("a"), signer=honest) is Taken.NEW
    # Two say different things: neither is believed to say all, and nobody is blamed for what the other says.
    assert not tables.complete(MINE.id, peer("a"), NOW_S)
    assert not tables.still_claims(MINE.id, peer("a"), QUERY.keys[0], NOW_S)
    assert take(tables, record("a"), signer=b"m" * 32) is Taken.NOT_ITS_SIGNER
    assert take(tables, record("a", sequence=2), signer=honest, own_words=True) is Taken.NEW
    assert claims_of(tables) == []
    assert tables.complete(MINE.id, peer("a"), NOW_S)
    assert take(tables, record("a", entry(PROMPT), sequence=9), signer=liar) is Taken.NOT_ITS_SIGNER
    # Should it change its key, its own words count.
    assert take(tables, record("a", entry(PROMPT)), signer=b"n" * 32, own_words=True) is Taken.NEW
    assert len(claims_of(tables)) == 1


def test_records_of_a_signer_that_is_accepted_no_more_are_dropped() -> None:
    tables = PeerTables()
    take(tables, record("a", entry(PROMPT)), signer=b"a" * 32)
    take(tables, record("b", entry(PROMPT)), signer=b"b" * 32)
    tables.keep_signers(lambda namespace, signer: namespace == MINE.id and signer == b"b" * 32)
    assert [who for who, _, _ in claims_of(tables)] == [peer("b")]
    assert [member.peer for member in tables.members(MINE.id, NOW_S)] == [peer("b")]


def test_a_table_is_complete_when_its_page_0_is_there_and_nothing_was_cut() -> None:
    tables = PeerTables(TableLimits(peer_bytes=2000))
    assert not tables.complete(MINE.id, peer("a"), NOW_S)
    take(tables, record("a", page=1))
    assert not tables.complete(MINE.id, peer("a"), NOW_S)
    take(tables, record("a", life_s=60.0))
    assert tables.complete(MINE.id, peer("a"), NOW_S)
    assert not tables.complete(MINE.id, peer("a"), NOW_S + 61)
    assert take(tables, record("a", entry(PROMPT), page=2), size_bytes=5000) is Taken.FULL
    assert not tables.complete(MINE.id, peer("a"), NOW_S)
    assert not tables.still_claims(NamespaceId(b"x" * 32), peer("a"), QUERY.keys[0], NOW_S)


# --- what is told to others ---------------------------------------------------------------------------------------


def test_records_of_whoever_holds_the_deepest_key_are_named_to_others_but_not_to_themselves() -> None:
    tables = PeerTables()
    for who, n_tokens in (("a", 1024), ("b", 2048), ("c", 2048), ("d", 2048)):
        take(tables, record(who, entry(PROMPT[:n_tokens])))

    def named(but: str, at_most: int = 4, keys: Sequence[LookupKey] = QUERY.keys) -> int:
        return len(tables.records(MINE.id, keys, NOW_S, but=peer(but), at_most=at_most))

    assert named("x") == 3
    assert named("b") == 2
    assert named("x", at_most=2) == 2
    assert named("x", keys=QUERY.keys[:3]) == 0
    assert tables.records(OTHER.id, QUERY.keys, NOW_S, but=peer("x"), at_most=4) == ()
    assert len(tables.envelopes(MINE.id, NOW_S)) == 4
    assert tables.envelopes(OTHER.id, NOW_S) == []


def test_page_0_of_a_peer_is_told_after_its_others() -> None:
    tables = PeerTables()
    for page in (1, 0, 2):
        take(tables, record("a", page=page))
    assert [envelope[1:2] for envelope in tables.envelopes(MINE.id, NOW_S)] == [b"2", b"1", b"0"]


# --- how much is remembered ---------------------------------------------------------------------------------------


def test_the_largest_table_gives_way_to_smaller_ones_and_never_the_other_way_round() -> None:
    tables = PeerTables(TableLimits(peer_bytes=100_000, total_bytes=20_000))
    for page in range(8):
        take(tables, record("large", page=page), size_bytes=2000)
    assert take(tables, record("large", page=9), size_bytes=2000) is Taken.FULL
    for page in range(3):
        assert take(tables, record("small", page=page), size_bytes=2000) is Taken.NEW
    assert tables.cost_bytes <= 20_000
    assert not tables.complete(MINE.id, peer("large"), NOW_S)
    assert tables.complete(MINE.id, peer("small"), NOW_S)


def test_the_peer_heard_of_longest_ago_is_forgotten_first() -> None:
    tables = PeerTables(TableLimits(peers=3))
    for number in range(5):
        take(tables, record(f"{number}", entry(PROMPT)), now_s=NOW_S + number, own_words=number % 2 == 0)
    assert {member.peer for member in tables.members(MINE.id, NOW_S)} == {peer("2"), peer("3"), peer("4")}


def test_a_publisher_that_makes_peers_up_hides_nobody_but_them_and_no_machine_that_speaks_for_itself() -> None:
    tables = PeerTables(TableLimits(peers=8, peers_of_signer=3))
    take(tables, record("honest", entry(PROMPT)), signer=b"h" * 32)
    take(tables, record("its own", entry(PROMPT)), own_words=True)
    for number in range(20):
        take(tables, record(f"made up {number}"), now_s=NOW_S + number)
    found = {member.peer for member in tables.members(MINE.id, NOW_S)}
    assert found == {peer("honest"), peer("its own"), peer("made up 18"), peer("made up 19")}


def test_keys_that_many_hold_are_forgotten_when_the_last_of_them_goes() -> None:
    tables = PeerTables()
    twice = HeldEntry(artifact=b"t" * 32, n_tokens=256, codec="raw", size_bytes=1, keys=(b"k" * 32, b"k" * 32))
    take(tables, record("a", twice, entry(PROMPT[:256]), entry(PROMPT[:512])))
    take(tables, record("b", twice, entry(PROMPT[:512])))
    # Listed on two pages while it moves from one to the other.
    take(tables, record("a", entry(PROMPT[:512]), page=1))
    take(tables, record("a", entry(PROMPT[:512]), page=1, sequence=2))
    assert len(claims_of(tables)) == 2
    take(tables, record("b", sequence=2))
    take(tables, record("a", entry(PROMPT[:256]), sequence=2))
    assert claims_of(tables) == [(peer("a"), 512, 512)]
    take(tables, record("a", page=1, sequence=3))
    assert claims_of(tables) == [(peer("a"), 256, 256)]
    take(tables, record("a", sequence=3))
    assert claims_of(tables) == []
    assert len(tables._indices[bytes(MINE.id)]) == 0


def test_an_artifact_that_moved_to_another_page_is_known_by_the_later_one() -> None:
    tables = PeerTables()
    take(tables, record("a", entry(PROMPT[:512])))
    take(tables, record("a", entry(PROMPT[:512]), page=1))
    take(tables, record("a", sequence=2))
    assert claims_of(tables) == [(peer("a"), 512, 512)]


def test_ten_thousand_artifacts_of_one_peer_cost_bounded_bytes_and_time() -> None:
    tables = PeerTables()
    shared = [bytes(key) for key in QUERY.keys[-4:]]
    n_pages = 10_000 // PAGE_ARTIFACTS
    began_s = time.process_time()
    for page in range(n_pages):
        entries = [
            HeldEntry(
                artifact=bytes(blake3_hash(b"%d %d" % (page, n))),
                n_tokens=4096,
                codec="raw",
                size_bytes=1,
                # A system prompt that all begin with, then their own.
                keys=(
                    shared[3],
                    shared[2],
                    shared[0],
                    *(bytes(blake3_hash(b"%d %d %d" % (page, n, k))) for k in (1, 2)),
                ),
            )
            for n in range(PAGE_ARTIFACTS)
        ]
        assert take(tables, record("a", *entries, page=page), size_bytes=5000) is Taken.NEW
    took_s = time.process_time() - began_s
    assert tables.cost_bytes < TableLimits().peer_bytes
    began_s = time.process_time()
    for _ in range(20):
        assert len(claims_of(tables)) == 1
    # Far above what it takes: what is guarded against is time that grows with the square.
    assert took_s < 10
    assert (time.process_time() - began_s) / 20 < 0.05


def test_everything_that_peers_hold_in_a_namespace_is_listed_until_it_expires() -> None:
    tables = PeerTables()
    one, two = entry(PROMPT[:256]), entry(PROMPT)
    take(tables, record("a", one, two))
    take(tables, record("b", one, life_s=100.0))
    listed = [(peer("a"), b"s" * 32, one), (peer("a"), b"s" * 32, two), (peer("b"), b"s" * 32, one)]
    assert sorted(tables.held(MINE.id, NOW_S), key=repr) == sorted(listed, key=repr)
    assert [each for each, _, _ in tables.held(MINE.id, NOW_S + 200)] == [peer("a"), peer("a")]
    assert tables.held(OTHER.id, NOW_S) == []
