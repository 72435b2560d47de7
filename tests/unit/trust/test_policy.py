"""Policies: whose artifacts are used, and that nothing is laundered on the way."""

from dataclasses import replace

import pytest

from kvnet.errors import ConfigError
from kvnet.format.hashes import ArtifactHash
from kvnet.trust.authority import Rotated, Standing
from kvnet.trust.envelope import open_manifest
from kvnet.trust.keys import publisher_text
from kvnet.trust.policy import Accepted, Refusal, RefusalCode, TrustPolicy
from tests.unit.trust.samples import FRIEND, MINE, OTHER, OWN, STRANGER, make_artifact, span


def policy(name: str, *, revoked: frozenset[bytes] = frozenset()) -> TrustPolicy:
    return TrustPolicy(
        name,  # type: ignore[arg-type]
        own=frozenset({OWN.public}),
        trusted=frozenset({FRIEND.public}),
        revoked=revoked,
    )


ALL_REVOKED = frozenset({OWN.public, FRIEND.public})


@pytest.mark.parametrize("name", ["own", "trusted"])
def test_own_artifacts_are_used_under_every_policy(name: str) -> None:
    assert policy(name).judge(make_artifact().manifest) == Accepted(OWN.public, own=True)


def test_trusted_publishers_count_under_the_policy_trusted() -> None:
    assert policy("trusted").judge(make_artifact(key=FRIEND).manifest) == Accepted(FRIEND.public, own=False)


@pytest.mark.parametrize(
    ("name", "signer", "code"),
    [
        ("own", FRIEND, RefusalCode.NOT_OWN),
        ("own", STRANGER, RefusalCode.NOT_OWN),
        ("trusted", STRANGER, RefusalCode.UNTRUSTED_PUBLISHER),
    ],
)
def test_unknown_publishers_follow_the_policy_and_the_refusal_says_why(name, signer, code) -> None:  # type: ignore[no-untyped-def]
    refusal = policy(name).judge(make_artifact(key=signer).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == code.value
    assert publisher_text(signer.public) in refusal.text
    assert refusal.publisher == signer.public


@pytest.mark.parametrize(
    ("name", "source", "code"),
    [
        ("own", FRIEND, RefusalCode.DERIVED_FROM_NOT_OWN),
        ("own", STRANGER, RefusalCode.DERIVED_FROM_NOT_OWN),
        ("trusted", STRANGER, RefusalCode.DERIVED_FROM_UNTRUSTED),
    ],
)
def test_artifact_derived_from_somebody_not_believed_is_not_used(name, source, code) -> None:  # type: ignore[no-untyped-def]
    refusal = policy(name).judge(make_artifact(derived_from=(span(source, 0, 1),)).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == code.value
    assert "its blocks 0 to 1 come from an artifact signed by" in refusal.text
    assert refusal.publisher == source.public


def test_every_span_counts_not_only_the_first() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND, 0, 0), span(STRANGER, 1, 1))).manifest
    refusal = policy("trusted").judge(manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.publisher == STRANGER.public


def test_artifact_derived_from_believed_publishers_is_used() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND, 0, 0), span(OWN, 1, 1))).manifest
    assert policy("trusted").judge(manifest) == Accepted(OWN.public, own=True)


@pytest.mark.parametrize("name", ["own", "trusted"])
def test_revoked_keys_count_for_nothing_own_ones_included(name: str) -> None:
    refusal = policy(name, revoked=ALL_REVOKED).judge(make_artifact().manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revoked_publisher"
    assert "revoked" in refusal.text


def test_revocation_reaches_what_was_derived() -> None:
    manifest = make_artifact(derived_from=(span(FRIEND),)).manifest
    refusal = policy("trusted", revoked=frozenset({FRIEND.public})).judge(manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "derived_from_revoked"


def test_only_what_is_revoked_is_not_served() -> None:
    strangers = make_artifact(key=STRANGER).manifest
    derived = make_artifact(derived_from=(span(FRIEND),)).manifest
    assert policy("own").may_serve(strangers)
    assert policy("own").may_serve(derived)
    assert not policy("own", revoked=ALL_REVOKED).may_serve(make_artifact(key=FRIEND).manifest)
    assert not policy("own", revoked=frozenset({FRIEND.public})).may_serve(derived)


def test_artifact_relayed_by_anybody_counts_by_its_signer() -> None:
    relayed = open_manifest(make_artifact(key=FRIEND).envelope)
    assert isinstance(policy("trusted").judge(relayed.manifest), Accepted)


def test_refusal_codes_are_stable() -> None:
    assert {code.value for code in RefusalCode} == {
        "revoked_publisher", "not_own", "untrusted_publisher",
        "derived_from_revoked", "derived_from_not_own", "derived_from_untrusted",
        "revoked_artifact", "revocation_withheld", "rotated_publisher", "derived_from_withheld",
    }  # fmt: skip


def test_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="expected the trust policy own or trusted, found 'everybody'"):
        policy("everybody")


# --- members ----------------------------------------------------------------------------------------------------------


def test_a_member_is_trusted_in_its_namespace_and_nowhere_else() -> None:
    who = TrustPolicy("trusted", frozenset({OWN.public}), frozenset(), members={MINE.id: frozenset({FRIEND.public})})
    assert isinstance(who.judge(make_artifact(key=FRIEND).manifest), Accepted)
    elsewhere = who.judge(make_artifact(key=FRIEND, namespace=OTHER).manifest)
    assert isinstance(elsewhere, Refusal)
    assert elsewhere.code == "untrusted_publisher"
    assert who.believes(FRIEND.public, MINE.id)
    assert not who.believes(FRIEND.public, OTHER.id)


def test_members_do_not_count_under_the_policy_own() -> None:
    who = TrustPolicy("own", frozenset({OWN.public}), frozenset(), members={MINE.id: frozenset({FRIEND.public})})
    refusal = who.judge(make_artifact(key=FRIEND).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "not_own"
    assert who.believes(FRIEND.public, MINE.id)


# --- what statements say ----------------------------------------------------------------------------------------------


def given(standing: Standing) -> TrustPolicy:
    return policy("trusted").given(standing)


def test_a_revoked_artifact_is_neither_used_nor_served() -> None:
    artifact = make_artifact(key=FRIEND)
    who = given(Standing(artifacts={artifact.hash: frozenset({FRIEND.public})}))
    refusal = who.judge(artifact.manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revoked_artifact"
    assert not who.may_serve(artifact.manifest)
    assert isinstance(who.judge(make_artifact(range(301), key=FRIEND).manifest), Accepted)


def test_a_strangers_word_revokes_no_artifact_of_others() -> None:
    artifact = make_artifact(key=FRIEND)
    who = given(Standing(artifacts={artifact.hash: frozenset({STRANGER.public})}))
    assert isinstance(who.judge(artifact.manifest), Accepted)
    assert who.may_serve(artifact.manifest)


def test_the_revocation_of_an_artifact_reaches_what_was_derived_from_it() -> None:
    source = span(FRIEND, 0, 1)
    derived = make_artifact(derived_from=(source,)).manifest
    who = given(Standing(artifacts={source.artifact: frozenset({OWN.public})}, believed=frozenset({OWN.public})))
    refusal = who.judge(derived)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "derived_from_revoked"
    assert "its blocks 0 to 1 come from the artifact" in refusal.text
    assert not who.may_serve(derived)
    assert given(Standing(artifacts={ArtifactHash(bytes(32)): frozenset({OWN.public})})).may_serve(derived)


def test_a_key_revoked_in_one_namespace_counts_in_others() -> None:
    who = given(Standing(revoked_in={MINE.id: frozenset({FRIEND.public})}))
    refusal = who.judge(make_artifact(key=FRIEND).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revoked_publisher"
    assert not who.believes(FRIEND.public, MINE.id)
    assert isinstance(who.judge(make_artifact(key=FRIEND, namespace=OTHER).manifest), Accepted)


def test_while_a_revocation_is_withheld_its_signers_artifacts_are_served_but_not_used() -> None:
    who = given(Standing(withheld={MINE.id: frozenset({FRIEND.public})}))
    refusal = who.judge(make_artifact(key=FRIEND).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "revocation_withheld"
    assert who.may_serve(make_artifact(key=FRIEND).manifest)
    derived = who.judge(make_artifact(derived_from=(span(FRIEND),)).manifest)
    assert isinstance(derived, Refusal)
    assert derived.code == "derived_from_withheld"
    assert isinstance(who.judge(make_artifact(key=FRIEND, namespace=OTHER).manifest), Accepted)


def test_where_a_key_was_trusted_the_one_it_rotated_to_is() -> None:
    who = given(Standing(rotated={FRIEND.public: Rotated(STRANGER.public, 1_800_000_000)}))
    assert isinstance(who.judge(make_artifact(key=STRANGER).manifest), Accepted)
    assert isinstance(who.judge(make_artifact(key=FRIEND).manifest), Accepted)


def test_what_a_key_signs_after_it_was_rotated_is_not_used() -> None:
    rotated_s = 1_800_000_000
    who = given(Standing(rotated={FRIEND.public: Rotated(STRANGER.public, rotated_s)}))
    refusal = who.judge(make_artifact(key=FRIEND, created=rotated_s + 601).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "rotated_publisher"
    assert isinstance(who.judge(make_artifact(key=FRIEND, created=rotated_s + 600).manifest), Accepted)


def test_a_strangers_artifact_after_rotation_is_refused_as_a_strangers() -> None:
    who = given(Standing(rotated={STRANGER.public: Rotated(b"n" * 32, 0)}))
    refusal = who.judge(make_artifact(key=STRANGER).manifest)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "untrusted_publisher"


def test_the_policy_says_whose_word_counts() -> None:
    who = TrustPolicy(
        "trusted",
        frozenset({OWN.public}),
        frozenset(),
        devices=frozenset({FRIEND.public}),
        founder=OWN.public,
        founders={OTHER.id: STRANGER.public},
    )
    assert who.keys.own == {OWN.public}
    assert who.keys.devices == {FRIEND.public}
    assert who.keys.founder == OWN.public
    assert who.keys.founders == {OTHER.id: STRANGER.public}


def test_what_a_member_signed_before_it_was_removed_stays_good_until_its_key_is_revoked() -> None:
    removed_s = 1_800_000_000
    before, after = (make_artifact(key=STRANGER, created=removed_s + late).manifest for late in (0, 1))
    elsewhere = make_artifact(key=STRANGER, namespace=OTHER, created=removed_s).manifest
    extended = make_artifact(derived_from=(span(STRANGER, 0, 1),), created=removed_s + 100).manifest
    given = replace(policy("trusted"), departed={MINE.id: {STRANGER.public: removed_s}})
    assert given.judge(before) == Accepted(STRANGER.public, own=False)
    assert given.judge(extended) == Accepted(OWN.public, own=True)
    for manifest in (after, elsewhere):
        refusal = given.judge(manifest)
        assert isinstance(refusal, Refusal)
        assert refusal.code == RefusalCode.UNTRUSTED_PUBLISHER
    assert isinstance(replace(given, name="own").judge(before), Refusal)
    revoked = replace(given, revoked=frozenset({STRANGER.public})).judge(before)
    assert isinstance(revoked, Refusal)
    assert revoked.code == RefusalCode.REVOKED_PUBLISHER
    # Its word on anything else counts for nothing.
    assert not given.believes(STRANGER.public, MINE.id)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (RefusalCode.REVOKED_ARTIFACT, "no way back"),
        (RefusalCode.DERIVED_FROM_REVOKED, "no way back"),
        (RefusalCode.REVOCATION_WITHHELD, "kvnet peers"),
        (RefusalCode.UNTRUSTED_PUBLISHER, f"kvnet key trust {publisher_text(FRIEND.public)}"),
    ],
)
def test_a_refusal_says_what_helps(code: RefusalCode, hint: str) -> None:
    assert hint in Refusal(code.value, "", FRIEND.public).hint
