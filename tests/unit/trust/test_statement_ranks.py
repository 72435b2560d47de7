"""What is not kept has a rank all the same."""

from kvnet.format.hashes import blake3_hash
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import Revocation
from kvnet.trust.statement_places import Verdict
from kvnet.trust.statement_ranks import Ranks
from kvnet.trust.statements import SignedStatement, sign_statement

ANN = PublisherKey(bytes([1]) * 32)
NEW = Verdict.NEW


def revocation(target: int = 1, *, sequence: int = 1, reason: str = "") -> SignedStatement:
    where = target.to_bytes(32, "big")
    body = Revocation(sequence=sequence, issued=1_800_000_000, expires=0, kind="artifact", target=where, reason=reason)
    return sign_statement(body, ANN)


def test_places_of_what_is_not_kept_go_up_too() -> None:
    ranks = Ranks()
    later = revocation(sequence=2)
    assert ranks.take(later) is NEW
    assert ranks.take(later) is Verdict.KNOWN
    assert ranks.take(revocation(sequence=1)) is Verdict.OUTRANKED
    assert ranks.holds(blake3_hash(later.envelope))
    assert ranks.take(revocation(sequence=3)) is NEW
    assert not ranks.holds(blake3_hash(later.envelope))
    assert ranks.sequence(StatementType.REVOCATION, later.body.subject, ANN.public) == 3
    assert ranks.sequence(StatementType.REVOCATION, b"", ANN.public) == 0


def test_of_two_with_one_sequence_the_lower_hash_has_the_place_whatever_came_first() -> None:
    one, other = sorted(
        (revocation(reason="one"), revocation(reason="other")), key=lambda each: blake3_hash(each.envelope)
    )
    ranks = Ranks()
    assert [ranks.take(one), ranks.take(other)] == [NEW, Verdict.OUTRANKED]
    ranks = Ranks()
    assert [ranks.take(other), ranks.take(one)] == [NEW, NEW]


def test_places_longest_unused_are_forgotten() -> None:
    ranks = Ranks(limit=2)
    for n in (1, 2):
        ranks.take(revocation(n))
    ranks.take(revocation(1))
    ranks.take(revocation(3))
    assert len(ranks) == 2
    assert ranks.take(revocation(1)) is Verdict.KNOWN
    assert not ranks.holds(blake3_hash(revocation(2).envelope))
