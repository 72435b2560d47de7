"""Whose word counts: on artifacts, on keys, and on keys that gave way to others."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from kvnet.trust.authority import MAX_ROTATIONS, Keys, Standing, standing
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import KeyRotation, Revocation, Tag
from kvnet.trust.statements import SignedStatement, rotation_message, sign_statement

NOW_S = 1_800_000_000
SWARM, ELSEWHERE = b"s" * 32, b"e" * 32
ARTIFACT = b"a" * 32

ME, FOUNDER, STUDIO, LAPTOP, FRIEND, STRANGER, NEW, NEWER = (PublisherKey(bytes([n]) * 32) for n in range(1, 9))
MAC_KEYS = Keys(
    own=frozenset({ME.public}),
    devices=frozenset({ME.public, FOUNDER.public, STUDIO.public, LAPTOP.public}),
    founder=FOUNDER.public,
    founders={SWARM: FRIEND.public},
)


def revokes(signer: PublisherKey, target: bytes, kind: str = "publisher", sequence: int = 1) -> SignedStatement:
    return sign_statement(
        Revocation(sequence=sequence, issued=NOW_S, expires=0, kind=kind, target=target, reason=""),  # type: ignore[arg-type]
        signer,
    )


def rotates(old: PublisherKey, new: PublisherKey, sequence: int = 1, issued: int = NOW_S) -> SignedStatement:
    return sign_statement(
        KeyRotation(
            sequence=sequence,
            issued=issued,
            expires=0,
            new=new.public,
            new_signature=new.sign(rotation_message(old.public, new.public, sequence)),
        ),
        old,
    )


def said(
    *statements: SignedStatement,
    keys: Keys = MAC_KEYS,
    told_in: Iterable[bytes] = (SWARM,),
    withheld: Mapping[bytes, frozenset[bytes]] | None = None,
) -> Standing:
    scopes = {statement.envelope: frozenset(told_in) for statement in statements}
    return standing(statements, keys, scopes=scopes, withheld=withheld)


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_a_publisher_revokes_its_own_artifacts_and_no_others() -> None:
    it = said(revokes(FRIEND, ARTIFACT, "artifact"))
    assert it.is_revoked_artifact(ARTIFACT, FRIEND.public)
    assert not it.is_revoked_artifact(ARTIFACT, STRANGER.public)
    assert not it.is_revoked_artifact(b"b" * 32, FRIEND.public)


def test_own_keys_and_devices_revoke_anybodys_artifacts() -> None:
    assert said(revokes(ME, ARTIFACT, "artifact")).is_revoked_artifact(ARTIFACT, STRANGER.public)
    assert said(revokes(STUDIO, ARTIFACT, "artifact")).is_revoked_artifact(ARTIFACT, STRANGER.public)


def test_a_device_whose_key_is_revoked_is_heard_about_its_own_artifacts_alone() -> None:
    it = said(revokes(ME, STUDIO.public), revokes(STUDIO, ARTIFACT, "artifact"))
    assert not it.is_revoked_artifact(ARTIFACT, LAPTOP.public)
    assert it.is_revoked_artifact(ARTIFACT, STUDIO.public)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_revoked_everywhere_by_itself_by_own_keys_and_by_devices() -> None:
    for signer in (STRANGER, ME, FOUNDER, STUDIO):
        it = said(revokes(signer, STRANGER.public))
        assert it.is_revoked(STRANGER.public, SWARM)
        assert it.is_revoked(STRANGER.public, ELSEWHERE)


def test_a_key_is_not_revoked_by_strangers_or_by_trusted_publishers() -> None:
    assert not said(revokes(STRANGER, LAPTOP.public)).is_revoked(LAPTOP.public, SWARM)
    assert not said(revokes(FRIEND, LAPTOP.public)).is_revoked(LAPTOP.public, ELSEWHERE)


def test_the_founder_of_a_swarm_revokes_a_key_there_and_nowhere_else() -> None:
    it = said(revokes(FRIEND, STRANGER.public))
    assert it.is_revoked(STRANGER.public, SWARM)
    assert not it.is_revoked(STRANGER.public, ELSEWHERE)


def test_what_a_founder_says_in_another_namespace_counts_for_nothing_in_its_swarm() -> None:
    assert not said(revokes(FRIEND, STRANGER.public), told_in=[ELSEWHERE]).is_revoked(STRANGER.public, SWARM)


def test_the_key_that_a_founder_rotated_to_speaks_for_the_swarm() -> None:
    it = said(rotates(FRIEND, NEW), revokes(NEW, STRANGER.public))
    assert it.is_revoked(STRANGER.public, SWARM)


def test_a_founder_whose_key_is_revoked_revokes_nobody() -> None:
    it = said(revokes(ME, FRIEND.public), revokes(FRIEND, STRANGER.public))
    assert not it.is_revoked(STRANGER.public, SWARM)


def test_a_stolen_device_silences_neither_own_keys_nor_the_founder() -> None:
    it = said(revokes(LAPTOP, ME.public), revokes(LAPTOP, FOUNDER.public))
    assert not it.revoked


def test_of_two_that_revoke_each_other_the_one_that_stands_higher_counts() -> None:
    assert said(revokes(ME, LAPTOP.public), revokes(LAPTOP, STUDIO.public)).revoked == {LAPTOP.public}
    assert said(revokes(FOUNDER, LAPTOP.public), revokes(LAPTOP, STUDIO.public)).revoked == {LAPTOP.public}


def test_two_equal_devices_that_revoke_each_other_are_both_revoked() -> None:
    it = said(revokes(LAPTOP, STUDIO.public), revokes(STUDIO, LAPTOP.public))
    assert it.revoked == {LAPTOP.public, STUDIO.public}


def test_not_even_the_founder_takes_a_nodes_own_key_from_it() -> None:
    assert not said(revokes(FOUNDER, ME.public)).revoked


def test_an_own_key_revokes_itself_and_the_founder() -> None:
    assert said(revokes(ME, ME.public)).revoked == {ME.public}
    it = said(revokes(ME, FOUNDER.public), revokes(FOUNDER, STUDIO.public))
    assert it.revoked == {FOUNDER.public}


def test_an_old_key_of_this_node_that_was_revoked_takes_nothing_from_the_new_one() -> None:
    keys = Keys(own=frozenset({ME.public, NEW.public}), devices=frozenset({ME.public, NEW.public, STUDIO.public}))
    it = said(
        revokes(ME, ME.public),
        revokes(ME, NEW.public),
        revokes(ME, STUDIO.public),
        revokes(ME, ARTIFACT, "artifact"),
        keys=keys,
    )
    assert it.revoked == {ME.public}
    assert not it.is_revoked_artifact(ARTIFACT, NEW.public)
    assert it.is_revoked_artifact(ARTIFACT, ME.public)


# --- rotation ---------------------------------------------------------------------------------------------------------


def test_rotations_are_followed_one_after_another() -> None:
    it = said(rotates(FRIEND, NEW), rotates(NEW, NEWER))
    assert it.followed({FRIEND.public}) == {FRIEND.public, NEW.public, NEWER.public}
    assert it.followed({STRANGER.public}) == {STRANGER.public}


def test_rotations_in_a_circle_end() -> None:
    it = said(rotates(FRIEND, NEW), rotates(NEW, FRIEND))
    assert it.followed({FRIEND.public}) == {FRIEND.public, NEW.public}


def test_an_endless_chain_of_rotations_is_followed_so_far_and_no_further() -> None:
    keys = [PublisherKey(bytes([100 + n]) * 32) for n in range(MAX_ROTATIONS + 3)]
    it = said(*(rotates(old, new) for old, new in pairwise(keys)))
    assert len(it.followed({keys[0].public})) == MAX_ROTATIONS + 1


def test_a_key_that_rotated_to_two_others_is_followed_to_neither() -> None:
    it = said(rotates(FRIEND, NEW, issued=NOW_S), rotates(FRIEND, STRANGER, issued=NOW_S - 5))
    assert it.followed({FRIEND.public}) == {FRIEND.public}
    assert it.rotated[FRIEND.public].since_s == NOW_S - 5


def test_a_rotation_after_the_key_has_revoked_itself_does_not_count() -> None:
    revoked = revokes(FRIEND, FRIEND.public, sequence=10)
    assert said(revoked, rotates(FRIEND, NEW, sequence=9)).followed({FRIEND.public}) == {FRIEND.public, NEW.public}
    assert said(revoked, rotates(FRIEND, NEW, sequence=10)).followed({FRIEND.public}) == {FRIEND.public}


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_statements_of_other_types_are_passed_over() -> None:
    tag = sign_statement(
        Tag(sequence=1, issued=NOW_S, expires=0, namespace=SWARM, name="project", number=1, artifact=ARTIFACT), ME
    )
    assert said(tag) == said()


def test_what_is_withheld_is_withheld_in_that_namespace() -> None:
    it = said(withheld={SWARM: frozenset({FRIEND.public})})
    assert it.is_withheld(FRIEND.public, SWARM)
    assert not it.is_withheld(FRIEND.public, ELSEWHERE)


def test_without_statements_and_keys_nothing_is_revoked() -> None:
    it = said(keys=Keys())
    assert it == Standing()
