"""Enrolment: who is let in, and what a guest believes."""

from dataclasses import replace

import msgspec
import pytest

from kvnet.errors import IntegrityError, MalformedError, TrustError
from kvnet.protocol.enrolment import OpenInvitation, check_enrolled, make_enrol, may_enrol
from kvnet.protocol.membership import Occasion, Role
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace, encode_namespace_file
from kvnet.trust.statement_bodies import Invitation
from kvnet.trust.statements import SignedStatement
from tests.unit.protocol.handshakes import ALICE, BOB, MALLORY, random_bytes
from tests.unit.trust.members import key, lets_in, rekeys
from tests.unit.trust.samples import MINE, OTHER
from tests.unit.trust.test_invitation import BODY

NONCES = random_bytes("a", 32), random_bytes("b", 32)
OCCASION = Occasion(Role.INITIATOR, ALICE, BOB, *NONCES)
"""Alice is the guest."""
OPEN = OpenInvitation(BODY.secret, 1000.0, 1)
GUEST = key("g")
NOW_S = 500.0


def enrol(invitation: Invitation = BODY, occasion: Occasion = OCCASION, guest: PublisherKey = GUEST) -> Enrol:
    return make_enrol(invitation, occasion, guest, "laptop")


def may(
    request: Enrol,
    known: OpenInvitation | None = OPEN,
    *,
    occasion: Occasion = OCCASION,
    removed: tuple[bytes, ...] = (),
    now_s: float = NOW_S,
) -> bool:
    return may_enrol(request, occasion, known, removed=removed, now_s=now_s)


def test_guest_with_the_secret_is_let_in() -> None:
    assert may(enrol())


def test_guest_that_never_got_the_answer_may_come_again() -> None:
    assert may(enrol(), replace(OPEN, used_by=(GUEST.public,)))


@pytest.mark.parametrize(
    ("request_", "known", "now_s"),
    [
        (enrol(msgspec.structs.replace(BODY, secret=b"w" * 32)), OPEN, NOW_S),
        (enrol(), None, NOW_S),
        (enrol(), OPEN, 1000.0),
        (enrol(), replace(OPEN, used_by=(key("x").public,)), NOW_S),
        (msgspec.structs.replace(enrol(), label="other"), OPEN, NOW_S),
        (msgspec.structs.replace(enrol(), publisher=key("x").public), OPEN, NOW_S),
        (msgspec.structs.replace(enrol(), signature=bytes(64)), OPEN, NOW_S),
        (msgspec.structs.replace(enrol(), proof=bytes(32)), OPEN, NOW_S),
    ],
    ids=["secret", "unknown", "expired", "used up", "label", "publisher", "signature", "proof"],
)
def test_whatever_is_wrong_keeps_the_guest_out(request_: Enrol, known: OpenInvitation | None, now_s: float) -> None:
    assert not may(request_, known, now_s=now_s)


def test_the_stand_in_for_an_unknown_invitation_lets_nobody_in() -> None:
    from kvnet.protocol.enrolment import _NOBODYS_SECRET

    assert not may(enrol(msgspec.structs.replace(BODY, secret=_NOBODYS_SECRET)), None)


def test_removed_publisher_is_not_let_in_again() -> None:
    assert not may(enrol(), replace(OPEN, used_by=(GUEST.public,)), removed=(GUEST.public,))


@pytest.mark.parametrize(
    "other",
    [
        Occasion(Role.INITIATOR, MALLORY, BOB, *NONCES),
        Occasion(Role.INITIATOR, ALICE, MALLORY, *NONCES),
        Occasion(Role.RESPONDER, ALICE, BOB, *NONCES),
        Occasion(Role.INITIATOR, ALICE, BOB, NONCES[1], NONCES[0]),
        OCCASION.reversed(),
    ],
    ids=["other guest", "other inviter", "other role", "other nonces", "reflected"],
)
def test_relayed_replayed_and_reflected_proofs_fail(other: Occasion) -> None:
    assert not may(enrol(), occasion=other)
    assert not may(enrol(occasion=other))


def answered(*statements: SignedStatement, namespace: Namespace = MINE) -> Enrolled:
    return Enrolled(
        request_id=0,
        namespace=encode_namespace_file(namespace),
        statements=tuple(each.envelope for each in statements),
    )


def check(answer: Enrolled, *, invitation: Invitation = BODY) -> Namespace:
    admission = check_enrolled(answer, invitation, key("b").public, GUEST.public, now_s=NOW_S)
    assert GUEST.public in admission.roster.members
    assert len(admission.statements) == len(answer.statements)
    return admission.namespace


def test_chain_from_the_founder_over_the_inviter_is_believed() -> None:
    namespace = check(answered(lets_in("a", "b", 1), lets_in("b", "g", 2)))
    assert namespace == Namespace("team", MINE.prefix_secret, MINE.lookup_secret)


def test_chain_after_a_removal_is_believed() -> None:
    check(answered(rekeys("a", 5, out="c", stay="ab"), lets_in("b", "g", 6)))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (answered(lets_in("a", "b", 1), lets_in("b", "g", 2), namespace=OTHER), "another one"),
        (answered(lets_in("b", "g", 2)), "no chain"),
        (answered(lets_in("x", "b", 1), lets_in("b", "g", 2)), "no chain"),
        (answered(lets_in("a", "b", 1)), "none that counts"),
        (answered(lets_in("a", "b", 1), lets_in("a", "g", 2)), "none that counts"),
        (answered(lets_in("a", "b", 1), lets_in("b", "g", 2), rekeys("a", 5, out="g", stay="ab")), "none that counts"),
        (answered(lets_in("a", "b", 1), lets_in("b", "g", 10_000)), "future"),
    ],
    ids=["namespace", "inviter", "stranger", "guest", "by another", "removed", "future"],
)
def test_guest_believes_nothing_less(answer: Enrolled, expected: str) -> None:
    with pytest.raises(TrustError, match=expected):
        check(answer)


def test_bytes_that_are_nothing_are_refused() -> None:
    broken = encode_namespace_file(MINE)
    with pytest.raises(IntegrityError):
        check(msgspec.structs.replace(answered(), namespace=broken[:-1] + bytes([broken[-1] ^ 1])))
    with pytest.raises(MalformedError):
        check(msgspec.structs.replace(answered(), statements=(b"nothing",)))
