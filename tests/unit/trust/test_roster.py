"""Who is a member: what statements give, whatever order they come in."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.trust.roster import RekeyNeeded, Roster, build_roster
from kvnet.trust.statement_bodies import MAX_MEMBERS, Removal
from kvnet.trust.statements import SignedStatement, sign_statement
from tests.unit.trust.members import key, lets_in, rekeys, rotates
from tests.unit.trust.samples import MINE, OTHER

CHAIN = [lets_in("a", "b", 1), lets_in("b", "c", 2), lets_in("c", "d", 3)]


def roster(statements: Iterable[SignedStatement], *, founder: str = "a", devices: bool = False) -> Roster:
    return build_roster(MINE.id, key(founder).public, statements, devices_remove=devices)


def names(found: Roster) -> str:
    known = {key(name).public: name for name in "abcdefxy"}
    return "".join(sorted(known[each] for each in found.members))


def test_a_namespace_begins_with_its_founder() -> None:
    alone = roster([])
    assert names(alone) == "a"
    assert alone.members[key("a").public].role == "founder"
    assert (alone.rekey, alone.rekey_needed, alone.unsealed) == (None, RekeyNeeded.NOTHING, ())
    assert alone.sealed_for(key("a").public) is None


@given(st.permutations(CHAIN))
def test_members_let_others_in_whatever_order_their_words_come_in(order: list[SignedStatement]) -> None:
    found = roster(order)
    assert names(found) == "abcd"
    assert found.members[key("d").public].invited_by == key("c").public


def test_nobody_comes_in_by_the_word_of_a_stranger() -> None:
    assert names(roster([lets_in("x", "y", 1), lets_in("y", "x", 2), lets_in("x", "x", 3)])) == "a"


def test_words_about_other_namespaces_and_other_things_are_passed_over() -> None:
    removal = Removal(sequence=1, issued=1, expires=0, namespace=MINE.id, artifact=bytes(32))
    elsewhere = [
        lets_in("a", "b", 1, namespace=OTHER.id),
        rekeys("a", 2, out="b", namespace=OTHER.id),
        sign_statement(removal, key("a")),
    ]
    assert names(roster(elsewhere)) == "a"


def test_the_founder_is_nobodys_guest() -> None:
    found = roster([*CHAIN, lets_in("b", "a", 5, label="fool")])
    assert found.members[key("a").public].by is None
    assert found.members[key("a").public].label == ""


def test_a_member_says_what_it_is_called_and_its_inviter_says_so_anew() -> None:
    first, second = lets_in("a", "b", 1, label="old"), lets_in("a", "b", 4, label="new")
    assert roster([second, first]).members[key("b").public].label == "new"
    assert roster([first, lets_in("c", "b", 9, label="lie")]).members[key("b").public].label == "old"
    own = [first, lets_in("b", "b", 5, label="mine", role="device")]
    assert roster(own).members[key("b").public].label == "mine"
    assert roster(own).members[key("b").public].role == "colleague"
    assert roster([lets_in("a", "a", 1, label="ann")]).members[key("a").public].label == "ann"


def test_a_second_invitation_by_another_member_changes_nothing() -> None:
    found = roster([*CHAIN, lets_in("d", "b", 9, label="other")])
    assert found.members[key("b").public].invited_by == key("a").public


def test_removal_takes_the_member_and_keeps_whoever_the_secret_is_sealed_for() -> None:
    found = roster([*CHAIN, rekeys("a", 10, out="b", stay="ac")])
    assert names(found) == "acd"
    assert found.removed == {key("b").public: 10_000}
    assert found.rekey_needed is RekeyNeeded.MORE
    assert found.unsealed == (key("d").public,)
    # Its name comes from whoever let it in, who is out.
    assert found.members[key("c").public].label == "c"
    assert found.members[key("c").public].invited_by == key("a").public
    assert roster([*CHAIN, rekeys("a", 10, out="b", stay="acd")]).rekey_needed is RekeyNeeded.NOTHING


def test_whom_a_removed_member_let_in_goes_along_unless_vouched_for() -> None:
    assert names(roster([*CHAIN, rekeys("a", 10, out="b", stay="a")])) == "a"
    assert names(roster([*CHAIN, rekeys("a", 10, out="b", stay="a"), lets_in("b", "e", 9)])) == "a"


def test_removed_member_comes_back_by_a_later_word_alone() -> None:
    out = rekeys("a", 10, out="b", stay="a")
    assert names(roster([out, lets_in("a", "b", 9)])) == "a"
    assert names(roster([out, lets_in("a", "b", 11)])) == "ab"
    assert roster([out, lets_in("a", "b", 11)]).removed == {}


def test_only_the_founder_rekeys_a_swarm() -> None:
    found = roster([*CHAIN, rekeys("b", 10, out="a c", stay="b")])
    assert names(found) == "abcd"
    assert found.rekey is None


def test_every_device_removes_others_but_not_the_founder() -> None:
    found = roster([*CHAIN, rekeys("b", 10, out="ac", stay="abd")], devices=True)
    assert names(found) == "abd"
    assert found.rekey is not None
    assert found.rekey.signer == key("b").public
    stranger = roster([*CHAIN, rekeys("x", 10, out="b", stay="x")], devices=True)
    assert names(stranger) == "abcd"


def test_device_that_the_founder_removed_cannot_outrun_that_with_an_early_date() -> None:
    first = rekeys("a", 10, out="b", stay="acd")
    stolen = rekeys("b", 5, out="cd", stay="b")
    found = roster([*CHAIN, stolen, first], devices=True)
    assert names(found) == "acd"
    assert found.rekey == first
    assert found.grounds == (first,)


def test_the_latest_rekeying_counts_and_earlier_removals_stay() -> None:
    by_b, by_c = rekeys("b", 10, out="d", stay="abc"), rekeys("c", 12, out="", stay="abcd")
    found = roster([*CHAIN, by_c, by_b], devices=True)
    assert names(found) == "abc"
    assert found.rekey == by_c
    # The later one sealed its secret for somebody who was out already.
    assert found.rekey_needed is RekeyNeeded.FRESH


def test_rekeying_of_a_device_that_was_removed_later_does_not_count() -> None:
    by_b, by_c = rekeys("b", 10, out="", stay="abcd"), rekeys("c", 12, out="b", stay="acd")
    found = roster([*CHAIN, by_b, by_c], devices=True)
    assert found.rekey == by_c
    assert names(found) == "acd"


def test_secret_is_found_by_who_it_is_sealed_for() -> None:
    found = roster([*CHAIN, rekeys("a", 10, out="b", stay="ac", secret=b"n" * 32)])
    box = found.sealed_for(key("c").public)
    assert box is not None
    assert key("c").open_sealed(box) == b"n" * 32
    assert found.sealed_for(key("b").public) is None


def test_key_that_a_member_rotated_to_is_a_member_with_its_name() -> None:
    found = roster([*CHAIN, rotates("b", "x", 4), rotates("y", "e", 4)])
    assert names(found) == "abcdx"
    member = found.members[key("x").public]
    assert (member.label, member.role, member.invited_by) == ("b", "colleague", key("b").public)
    removed = rekeys("a", 10, out="bx", stay="acd")
    assert names(roster([*CHAIN, rotates("b", "x", 4), removed])) == "acd"


def test_key_that_a_member_rotated_to_keeps_its_name_when_a_rekeying_vouches_for_it() -> None:
    found = roster([*CHAIN, rotates("b", "x", 4), rekeys("a", 10, out="d", stay="abcx")])
    member = found.members[key("x").public]
    assert (member.label, member.role, member.invited_by) == ("b", "colleague", key("a").public)
    # Nobody is renamed by the word of somebody else whose key it is not.
    also = roster([*CHAIN, rotates("b", "c", 4), rekeys("a", 10, out="d", stay="abc")])
    assert also.members[key("c").public].label == "c"


def test_rotation_to_a_key_that_is_a_member_changes_nothing() -> None:
    found = roster([*CHAIN, rotates("c", "b", 9)])
    assert found.members[key("b").public].invited_by == key("a").public
    assert roster([*CHAIN, rotates("b", "a", 9)]).members == roster(CHAIN).members


@pytest.mark.parametrize("devices", [False, True])
def test_what_proves_a_membership_is_enough_for_whoever_knows_the_founder_alone(devices: bool) -> None:
    said = [*CHAIN, lets_in("a", "e", 2), rekeys("a", 10, out="b", stay="ac"), lets_in("c", "d", 12)]
    whole = roster(said, devices=devices)
    proof = whole.proof_of(key("d").public)
    assert len(proof) == 2
    shown = roster(proof, devices=devices)
    assert key("d").public in shown.members
    assert key("b").public not in shown.members
    assert whole.proof_of(key("x").public) == [said[4]]
    assert roster(CHAIN).proof_of(key("d").public) == CHAIN
    assert roster(CHAIN).proof_of(key("a").public) == []


def test_member_that_is_vouched_for_is_proved_without_a_circle() -> None:
    said = [*CHAIN, rekeys("a", 10, out="", stay="abcd"), lets_in("c", "b", 11), lets_in("b", "c", 11)]
    proof = roster(said).proof_of(key("b").public)
    assert proof == [said[3]]


def test_device_that_removes_its_inviter_stays_and_can_still_prove_it() -> None:
    rekey = rekeys("c", 10, out="b", stay="acd")
    whole = roster([*CHAIN, rekey], devices=True)
    assert names(whole) == "acd"
    for member in "cd":
        proof = whole.proof_of(key(member).public)
        assert key(member).public in roster(proof, devices=True).members
    # The word of the one who is out is part of why the rekeying was allowed.
    assert whole.grounds == (CHAIN[0], CHAIN[1], rekey)


def test_two_devices_that_vouch_for_each_other_prove_it_without_end() -> None:
    by_b, by_c = rekeys("b", 10, out="d", stay="abc"), rekeys("c", 11, out="d", stay="abc")
    whole = roster([*CHAIN, by_b, by_c], devices=True)
    assert whole.rekey == by_c
    assert names(roster(whole.proof_of(key("b").public), devices=True)) == "abc"


def test_what_is_said_twice_counts_once() -> None:
    said = [*CHAIN, rekeys("a", 10, out="b", stay="acd"), rotates("c", "f", 6)]
    assert roster([*said, *said, *said]) == roster(said)


def test_endless_chain_written_backwards_takes_no_endless_time() -> None:
    many = [lets_in(f"guest {n}", f"guest {n + 1}", 5000 - n) for n in range(MAX_MEMBERS * 8)]
    found = roster([lets_in("a", "guest 0", 6000), *many])
    assert len(found.members) == MAX_MEMBERS
    assert key(f"guest {MAX_MEMBERS - 2}").public in found.members


def test_members_are_limited_and_the_earliest_stay() -> None:
    many = [lets_in("a", f"guest {number}", number + 1) for number in range(MAX_MEMBERS + 5)]
    found = roster(reversed(many))
    assert len(found.members) == MAX_MEMBERS
    assert key("guest 0").public in found.members
    assert key(f"guest {MAX_MEMBERS}").public not in found.members


@given(st.permutations([*CHAIN, rekeys("a", 10, out="b", stay="acd"), rekeys("c", 11, out="d", stay="ac"),
                        rekeys("b", 9, out="c", stay="bd"), lets_in("d", "e", 5), rotates("c", "f", 6)]))  # fmt: skip
def test_all_nodes_that_know_the_same_have_the_same_roster(order: list[SignedStatement]) -> None:
    expected = roster(sorted(order, key=lambda each: each.envelope), devices=True)
    found = roster(order, devices=True)
    assert (found.members, found.removed, found.rekey) == (expected.members, expected.removed, expected.rekey)


def test_member_that_lets_in_as_many_as_there_is_room_for_keeps_no_others_out() -> None:
    honest = [lets_in("a", f"honest {n}", 1000 + n) for n in range(40)]
    theirs = [lets_in("honest 1", f"guest {n}", 2000 + n) for n in range(20)]
    # Dated before everybody else's, in a row and one behind the other.
    wide = [lets_in("honest 0", f"wide {n}", 1 + n) for n in range(MAX_MEMBERS)]
    deep = [lets_in(f"deep {n}" if n else "honest 0", f"deep {n + 1}", 1 + n) for n in range(MAX_MEMBERS)]
    said = [*honest, *theirs, *wide, *deep]
    Random(1).shuffle(said)
    found = roster(said)
    assert found.members == roster(sorted(said, key=lambda each: each.envelope)).members
    assert len(found.members) == MAX_MEMBERS
    for name in [*(f"honest {n}" for n in range(40)), *(f"guest {n}" for n in range(20))]:
        assert key(name).public in found.members


def test_guests_of_a_member_are_all_that_its_word_leads_to() -> None:
    said = [lets_in("a", "b", 1), lets_in("b", "c", 2), lets_in("c", "d", 3), lets_in("a", "e", 4)]
    b, c, d = (key(name).public for name in "bcd")
    plain = build_roster(MINE.id, key("a").public, said, devices_remove=True)
    assert plain.guests_of({b}) == {c, d}
    assert plain.guests_of({d}) == plain.guests_of(()) == frozenset()
    # Whom a member's rekeying vouches for are its guests as well, and so are those whom they vouch for.
    vouching = [*said, rekeys("b", 5, stay="abcef"), rekeys("f", 6, stay="g")]
    vouched = build_roster(MINE.id, key("a").public, vouching, devices_remove=True)
    assert vouched.guests_of({b}) == vouched.members.keys() - {key("a").public, b}


def test_rekeying_that_vouches_for_very_many_makes_no_more_members_than_there_is_room_for() -> None:
    many = [chr(0x4E00 + number) for number in range(MAX_MEMBERS)]
    said = [lets_in("a", "b", 1), rekeys("b", 2, stay="b" + "".join(many[: MAX_MEMBERS - 1])), lets_in("a", "c", 3)]
    full = build_roster(MINE.id, key("a").public, said, devices_remove=True)
    assert len(full.members) == MAX_MEMBERS
    # Its removal without its guests leaves room for whom it kept out.
    removal = rekeys("a", 4, out="b", stay="a")
    after = build_roster(MINE.id, key("a").public, [*said, removal], devices_remove=True)
    assert after.members.keys() == {key("a").public, key("c").public}
