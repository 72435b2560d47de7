"""The book of statements: what outranks what, in any order, and what nobody can fill up."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.format.hashes import NamespaceId, blake3_hash
from kvnet.trust import statement_book, statement_shares
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import Attestation, Revocation, Tag
from kvnet.trust.statement_book import StatementBook, Taken
from kvnet.trust.statement_places import Row, Verdict, scopes_of_body
from kvnet.trust.statements import SignedStatement, sign_statement

NOW_S = 1_800_000_000
HOME, SWARM = NamespaceId(b"h" * 32), NamespaceId(b"s" * 32)
ANN, BOB, EVE = (PublisherKey(bytes([n]) * 32) for n in (1, 2, 3))
MEMBERS = frozenset({ANN.public, BOB.public})
NEW = Verdict.NEW


def revocation(
    target: int = 1,
    *,
    sequence: int = 1,
    key: PublisherKey = ANN,
    reason: str = "",
    kind: Literal["artifact", "publisher"] = "artifact",
) -> SignedStatement:
    where = target.to_bytes(32, "big")
    return sign_statement(
        Revocation(sequence=sequence, issued=NOW_S, expires=0, kind=kind, target=where, reason=reason), key
    )


def attestation(target: int, *, key: PublisherKey = ANN, sequence: int = 1) -> SignedStatement:
    return sign_statement(
        Attestation(
            sequence=sequence,
            issued=NOW_S,
            expires=0,
            namespace=SWARM,
            artifact=target.to_bytes(32, "big"),
            claim="same",
            max_difference="0",
        ),
        key,
    )


def tag(name: str, *, sequence: int, expires: int = 0, namespace: bytes = SWARM) -> SignedStatement:
    return sign_statement(
        Tag(
            sequence=sequence,
            issued=NOW_S,
            expires=expires,
            namespace=namespace,
            name=name,
            number=1,
            artifact=bytes(32),
        ),
        ANN,
    )


def known(_namespace: NamespaceId, signer: bytes) -> bool:
    return signer in MEMBERS


def take(book: StatementBook, statement: SignedStatement, *scopes: NamespaceId) -> Verdict:
    return book.take(statement, scopes or (SWARM,), known).verdict


def rows(book: StatementBook, taken: Taken) -> list[Row]:
    return [row for key in taken.changed if (row := book.row(key)) is not None]


# --- rank -------------------------------------------------------------------------------------------------------------


def test_a_later_statement_takes_the_place_of_an_earlier_one() -> None:
    book = StatementBook()
    first, second = revocation(sequence=1), revocation(sequence=2)
    assert take(book, first) is NEW
    assert take(book, second) is NEW
    assert book.all(StatementType.REVOCATION) == [second]
    assert book.latest(StatementType.REVOCATION, second.body.subject, ANN.public) == second


def test_an_earlier_statement_never_comes_back() -> None:
    book = StatementBook()
    take(book, revocation(sequence=5))
    assert take(book, revocation(sequence=4)) is Verdict.OUTRANKED
    assert take(book, revocation(sequence=5)) is Verdict.KNOWN
    assert book.sequence(StatementType.REVOCATION, revocation().body.subject, ANN.public) == 5


def test_rollback_what_came_before_a_restart_never_comes_back_after_it() -> None:
    book = StatementBook()
    later = revocation(sequence=5)
    [row] = rows(book, book.take(later, [SWARM], known))
    again = StatementBook()
    again.restore(row, later)
    assert take(again, revocation(sequence=4)) is Verdict.OUTRANKED
    assert take(again, later) is Verdict.KNOWN
    assert again.all(StatementType.REVOCATION) == [later]


def test_a_row_whose_statement_was_damaged_takes_it_again_and_nothing_before() -> None:
    book = StatementBook()
    later = revocation(sequence=5)
    [row] = rows(book, book.take(later, [SWARM], known))
    again = StatementBook()
    again.restore(msgspec.structs.replace(row, envelope=b"damaged"), None)
    assert len(again) == 0
    assert take(again, revocation(sequence=4)) is Verdict.OUTRANKED
    assert take(again, later) is NEW


@given(st.permutations(range(6)))
def test_all_nodes_end_with_the_same_statement_whatever_came_first(order: list[int]) -> None:
    said = [revocation(sequence=7, reason=str(n)) for n in range(5)] + [revocation(sequence=6)]
    book = StatementBook()
    for place in order:
        take(book, said[place])
    winner = min(said[:5], key=lambda statement: blake3_hash(statement.envelope))
    assert book.all(StatementType.REVOCATION) == [winner]


def test_two_statements_with_one_sequence_are_evidence() -> None:
    one, other = sorted(
        (revocation(reason="one"), revocation(reason="other")), key=lambda each: blake3_hash(each.envelope)
    )
    for first, second in ((one, other), (other, one)):
        book = StatementBook()
        take(book, first)
        take(book, second)
        assert [(conflict.kept, conflict.other) for conflict in book.evidence] == [(one, other)]


def test_evidence_is_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_book, "MAX_EVIDENCE", 2)
    book = StatementBook()
    for n in range(5):
        take(book, revocation(reason=str(n)))
    assert len(book.evidence) == 2


def test_signers_types_and_subjects_do_not_outrank_each_other() -> None:
    book = StatementBook()
    said = [
        revocation(1, sequence=9),
        revocation(2, sequence=1),
        revocation(1, sequence=1, key=BOB),
        revocation(1, sequence=1, kind="publisher"),
        attestation(1, sequence=1),
    ]
    assert [take(book, each) for each in said] == [NEW] * len(said)
    assert len(book) == len(said)


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_an_expired_statement_leaves_its_sequence_behind() -> None:
    book = StatementBook()
    take(book, tag("project", sequence=5, expires=NOW_S + 10))
    assert book.expire(NOW_S + 9) == []
    [key] = book.expire(NOW_S + 10)
    assert book.expire(NOW_S + 10) == []
    row = book.row(key)
    assert row is not None
    assert (row.sequence, row.envelope) == (5, b"")
    assert book.all(StatementType.TAG) == []
    assert take(book, tag("project", sequence=4)) is Verdict.OUTRANKED
    assert take(book, tag("project", sequence=6)) is NEW


def test_statement_let_go_by_a_clock_that_was_ahead_counts_when_it_comes_again() -> None:
    book, said = StatementBook(), tag("project", sequence=5, expires=NOW_S + 10)
    take(book, said)
    assert book.holds(blake3_hash(said.envelope), SWARM)
    book.expire(NOW_S + 1_000_000)
    assert not book.holds(blake3_hash(said.envelope), SWARM)
    taken = book.take(said, [SWARM], known)
    assert (taken.verdict, len(rows(book, taken))) == (NEW, 1)
    assert book.all(StatementType.TAG) == [said]


def test_statements_that_never_expire_stay() -> None:
    book = StatementBook()
    take(book, tag("project", sequence=5))
    assert book.expire(2**40) == []


def test_a_place_without_a_statement_tells_of_no_conflict() -> None:
    book = StatementBook()
    take(book, tag("project", sequence=5, expires=NOW_S + 10))
    book.expire(NOW_S + 10)
    take(book, tag("project", sequence=5))
    assert book.evidence == []


# --- scopes -----------------------------------------------------------------------------------------------------------


def test_a_statement_is_told_where_it_was_told() -> None:
    book = StatementBook()
    said = revocation()
    take(book, said, SWARM)
    assert book.scopes_of(said) == {SWARM}
    assert [each for _, each in book.held_in(SWARM)] == [said]
    assert list(book.held_in(HOME)) == []
    assert book.holds(blake3_hash(said.envelope), SWARM)
    assert not book.holds(blake3_hash(said.envelope), HOME)
    assert not book.holds(bytes(32), HOME)
    assert book.scopes_of(revocation(2)) == frozenset()


def test_the_same_statement_told_elsewhere_too_counts_there_too() -> None:
    book = StatementBook()
    take(book, revocation(), SWARM)
    assert take(book, revocation(), HOME) is Verdict.WIDENED
    assert take(book, revocation(), HOME, SWARM) is Verdict.KNOWN
    assert book.scopes_of(revocation()) == {HOME, SWARM}
    assert book.all(StatementType.REVOCATION, namespace=HOME) == [revocation()]


def test_what_was_told_in_a_namespace_alone_is_forgotten_with_it() -> None:
    book = StatementBook()
    take(book, revocation(1), SWARM)
    take(book, revocation(2), SWARM, HOME)
    take(book, revocation(3), HOME)
    assert book.namespaces() == {HOME, SWARM}
    changed = book.leave(SWARM)
    assert book.namespaces() == {HOME}
    assert [key[2] for key in changed] == [revocation(1).body.subject, revocation(2).body.subject]
    rows_left = [book.row(key) for key in changed]
    assert rows_left[0] is None
    assert rows_left[1] is not None
    assert rows_left[1].scopes == (HOME,)
    assert {each.body.subject for each in book.all(StatementType.REVOCATION)} == {
        revocation(2).body.subject,
        revocation(3).body.subject,
    }
    assert book.scopes_of(revocation(2)) == {HOME}


def test_the_latest_revocation_of_a_signer_is_that_of_the_namespace_asked_for() -> None:
    book = StatementBook()
    take(book, revocation(1, sequence=5), SWARM)
    take(book, revocation(2, sequence=9), HOME)
    assert book.revocations(ANN.public) == 9
    assert book.revocations(BOB.public) == 0
    assert book.revoked_in(ANN.public, SWARM) == (5, 1)
    assert book.revoked_in(ANN.public, SWARM, until=4) == (0, 0)
    assert book.revoked_in(BOB.public, SWARM) == (0, 0)


def test_a_statement_that_names_a_namespace_is_told_there_and_nowhere_else() -> None:
    assert scopes_of_body(tag("project", sequence=1).body, [SWARM, HOME]) == {SWARM}
    assert scopes_of_body(tag("project", sequence=1).body, [HOME]) == frozenset()
    assert scopes_of_body(revocation().body, [HOME, SWARM]) == {HOME, SWARM}


# --- endless data -----------------------------------------------------------------------------------------------------


def test_one_signer_fills_its_own_share_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_OF_SIGNER", 5)
    book = StatementBook()
    assert [take(book, revocation(n)) for n in range(6)] == [NEW] * 5 + [Verdict.FULL]
    assert take(book, revocation(9, key=BOB)) is NEW
    assert take(book, revocation(0, sequence=2)) is NEW, "what has a place may be replaced"
    assert take(book, revocation(9), HOME) is NEW, "another namespace, another share"


def test_notes_never_take_the_place_of_a_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_NOTES_OF_SIGNER", 3)
    book = StatementBook()
    assert [take(book, attestation(n)) for n in range(4)] == [NEW] * 3 + [Verdict.FULL]
    assert take(book, revocation()) is NEW


def test_strangers_share_a_small_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_OF_STRANGER", 2)
    monkeypatch.setattr(statement_shares, "MAX_OF_STRANGERS", 4)
    book = StatementBook()
    strangers = [PublisherKey(bytes([50 + n]) * 32) for n in range(4)]
    assert [take(book, revocation(n, key=EVE)) for n in range(3)] == [NEW, NEW, Verdict.FULL]
    assert [take(book, revocation(1, key=each)) for each in strangers] == [NEW, NEW, Verdict.FULL, Verdict.FULL]
    assert take(book, revocation(1)) is NEW
    assert take(book, revocation(1, key=EVE), HOME) is Verdict.WIDENED


def test_in_a_full_namespace_whoever_has_most_gives_way_notes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_IN_NAMESPACE", 4)
    book = StatementBook()
    for statement in (revocation(1), attestation(2, sequence=3), attestation(1, sequence=2), revocation(2)):
        take(book, statement)
    taken = book.take(revocation(1, key=BOB), [SWARM], known)
    assert taken.verdict is NEW
    assert [key[2] for key in taken.changed[1:]] == [attestation(1).body.subject]
    assert take(book, revocation(2, key=BOB)) is NEW
    assert book.all(StatementType.ATTESTATION) == []
    assert take(book, revocation(3, key=BOB)) is Verdict.FULL, "nobody has more than it"
    assert take(book, revocation(7)) is Verdict.FULL
    assert len(book) == 4


def test_without_room_elsewhere_a_statement_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_shares, "MAX_OF_SIGNER", 1)
    book = StatementBook()
    take(book, revocation(1), SWARM)
    take(book, revocation(2), HOME)
    assert take(book, revocation(1), HOME) is Verdict.FULL
    assert take(book, revocation(1, sequence=2), HOME) is NEW, "it has its place in the other namespace"
    assert book.scopes_of(revocation(1, sequence=2)) == {SWARM}


def test_a_statement_told_nowhere_is_not_kept() -> None:
    assert StatementBook().take(revocation(), [], known).verdict is Verdict.FULL
