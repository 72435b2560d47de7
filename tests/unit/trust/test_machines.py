"""Which keys go when a machine is removed, whatever it says of itself and of others."""

import msgspec

from kvnet.trust.machines import keys_of_machine
from kvnet.trust.roster import build_roster
from kvnet.trust.statement_bodies import Membership
from kvnet.trust.statements import SignedStatement, sign_statement
from tests.unit.trust.members import key, lets_in, rekeys, rotates
from tests.unit.trust.samples import MINE, OTHER


def with_peers_of(signer: str, member: str, machine: str, at: int) -> SignedStatement:
    """A membership that gives a member the peer ids of a machine."""
    body = lets_in(signer, member, at).body
    assert isinstance(body, Membership)
    return sign_statement(msgspec.structs.replace(body, peers=(b"peer of " + machine.encode(),)), key(signer))


def gone(member: str, *statements: SignedStatement) -> str:
    """Who goes with a member of the founder a."""
    roster = build_roster(MINE.id, key("a").public, statements, devices_remove=True)
    found = keys_of_machine(roster, key(member).public, statements)
    return "".join(name for name in "abcdexy" if key(name).public in found)


FOUNDED = (with_peers_of("a", "a", "a", 1), lets_in("a", "b", 2), lets_in("a", "c", 3))


def test_members_that_have_nothing_to_do_with_it_stay() -> None:
    assert gone("b", *FOUNDED, lets_in("b", "d", 4)) == "b"


def test_keys_that_it_rotated_to_or_let_in_as_its_own_go_whichever_is_named() -> None:
    said = (*FOUNDED, rotates("b", "x", 4), with_peers_of("x", "y", "b", 5))
    for named in "bxy":
        assert gone(named, *said) == "bxy"


def test_a_key_goes_that_calls_itself_another_machine_after_it_was_rotated_to() -> None:
    assert gone("b", *FOUNDED, rotates("b", "x", 4), with_peers_of("x", "x", "elsewhere", 5)) == "bx"


def test_keys_of_a_machine_go_after_a_rekeying_has_vouched_for_all() -> None:
    assert gone("b", *FOUNDED, rotates("b", "x", 4), rekeys("a", 5, stay="abcx")) == "bx"


def test_who_claims_the_machines_of_others_takes_nobody_along() -> None:
    for victim in "ac":
        assert gone("b", *FOUNDED, with_peers_of("b", "b", victim, 4)) == "b"
        assert gone("b", *FOUNDED, with_peers_of("b", victim, "b", 4)) == "b"


def test_words_of_strangers_and_of_other_namespaces_tie_nobody_together() -> None:
    elsewhere = lets_in("b", "x", 4, namespace=OTHER.id)
    assert gone("b", *FOUNDED, with_peers_of("b", "x", "b", 4), with_peers_of("e", "x", "e", 5), elsewhere) == "bx"
